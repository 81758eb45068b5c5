"""Tests of `tenants`, `keys` and `peers`: their requests to the service and their output."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.cli.output import cells
from appliance.protocol import Key, LimitUsage, PeerMapping
from store.policies import Quota
from tests.cli.conftest import Run, on_a_terminal
from tests.cli.servers import AdminService, a_tenant

LIMITS = Quota(
    requests_per_minute=600.0,
    tokens_per_minute=200_000.0,
    tokens_per_day=5e6,
    concurrent_requests=16,
    queued_requests=64,
    context_tokens=8192,
    kv_share=0.25,
    burst_s=120.0,
)


def last(admin: AdminService) -> tuple[str, dict[str, Any]]:
    return admin.actions[-1]


def test_only_the_given_fields_are_sent(cli: Run, admin: AdminService, run_dir: Path) -> None:
    assert cli("tenants", "set", "acme", "--weight", "2.5", "--run-dir", run_dir).code == 0
    assert last(admin) == ("tenants.set", {"name": "acme", "weight": 2.5})


def test_every_field_of_a_tenant_can_be_set_with_an_option(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    outcome = cli(
        *("tenants", "create", "acme", "--weight", 4, "--highest-class", "p0", "--default-class", 2),
        *("--default-max-tokens", 100, "--cache-group", "lab", "--log-policy", "full", "--log-days", 7),
        *("--requests-per-minute", 600, "--tokens-per-minute", "1e5", "--tokens-per-day", "2_000_000"),
        *("--burst", "2m", "--concurrent-requests", 16, "--queued-requests", 64, "--context-tokens", 8192),
        *("--kv-share", 0.25),
        *("--run-dir", run_dir),
    )
    assert outcome.code == 0, outcome.err
    assert last(admin) == (
        "tenants.create",
        {
            "name": "acme",
            "weight": 4.0,
            "highest_class": 0,
            "default_class": 2,
            "default_max_tokens": 100,
            "cache_group": "lab",
            "log_policy": "full",
            "log_days": 7.0,
            "requests_per_minute": 600.0,
            "tokens_per_minute": 100_000.0,
            "tokens_per_day": 2_000_000.0,
            "burst_s": 120.0,
            "concurrent_requests": 16,
            "queued_requests": 64,
            "context_tokens": 8192,
            "kv_share": 0.25,
        },
    )


def test_the_value_none_removes_a_limit(cli: Run, admin: AdminService, run_dir: Path) -> None:
    for flag, field in (
        ("--requests-per-minute", "requests_per_minute"),
        ("--concurrent-requests", "concurrent_requests"),
        ("--cache-group", "cache_group"),
        ("--log-days", "log_days"),
        ("--default-max-tokens", "default_max_tokens"),
    ):
        assert cli("tenants", "set", "acme", flag, "none", "--run-dir", run_dir).code == 0
        assert last(admin) == ("tenants.set", {"name": "acme", field: None})
    admin.keys = [Key(id="key_1", name="k", tenant="t", prefix="ak-", created_at=1.79e9)]
    assert (
        cli("keys", "set", "key_1", "--models", "none", "--expires", "none", "--run-dir", run_dir).code == 0
    )
    assert last(admin) == ("keys.set", {"id": "key_1", "models": None, "expires_at": None})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("tenants", "set", "a", "--concurrent-requests", "many"),
            "'many' is not valid: use a whole number from 1 to 1,000,000,000,000, or none",
        ),
        (("tenants", "set", "a", "--concurrent-requests", "1.5"), "or none"),
        (
            ("tenants", "set", "a", "--tokens-per-day", "x"),
            "--tokens-per-day 'x' is not valid: use a number",
        ),
        (("tenants", "set", "a", "--tokens-per-day", "1e400"), "'1e400' is not valid: use a number"),
        (("tenants", "set", "a", "--weight", "nan"), "--weight 'nan' is not valid: use a number"),
        (("tenants", "set", "a", "--weight", "two"), "--weight 'two' is not valid: use a number"),
        (("tenants", "set", "a", "--highest-class", "none"), "use P0, P1, P2 or P3\n"),
        (("tenants", "set", "a", "--highest-class", "P7"), "'P7' is not valid: use P0, P1, P2 or P3\n"),
        (
            ("keys", "create", "--name", "a", "--expires", "2001-01-01"),
            "'2001-01-01' is in the past: use a future",
        ),
        (
            ("tenants", "set", "a", "--burst", "60"),
            "--burst '60' is not valid: use a time span such as 90s, 30m, 12h or 7d",
        ),
        (("tenants", "set", "a"), "no changes were given: see appliance tenants set --help"),
        (("keys", "set", "key_1"), "no changes were given: see appliance keys set --help"),
        (("keys", "rotate", "key_1", "--overlap", "soon"), "--overlap 'soon' is not valid: use a time span"),
        (("peers", "map", "user:nobody-here", "--tenant", "t"), "this machine has no user 'nobody-here'"),
        (("peers", "map", "group:nobody-here", "--tenant", "t"), "this machine has no group 'nobody-here'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_an_invalid_value_is_reported_with_option_value_and_remedy(
    cli: Run, admin: AdminService, run_dir: Path, words: tuple[str, ...], said: str
) -> None:
    outcome = cli(*words, "--run-dir", run_dir)
    assert outcome.code == 2 and said in outcome.err
    assert admin.actions == []


def test_a_key_can_be_created_with_scopes_models_and_limits(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    outcome = cli(
        *("keys", "create", "--name", "ci", "--tenant", "acme", "--scopes", "inference, read"),
        *("--models", "a,b", "--highest-class", "P2", "--tokens-per-minute", 1000, "--run-dir", run_dir),
    )
    assert outcome.out == "ak-secret\n"
    name, sent = last(admin)
    assert name == "keys.create"
    assert sent == {
        "name": "ci",
        "tenant": "acme",
        "scopes": ["inference", "read"],
        "models": ["a", "b"],
        "highest_class": 2,
        "tokens_per_minute": 1000.0,
    }


def test_a_rotated_key_is_printed_alone_and_the_expiry_of_the_old_key_is_reported(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    outcome = cli("keys", "rotate", "key_1", "--overlap", "2h", "--yes", "--run-dir", run_dir)
    assert outcome.out == "ak-fresh\n"
    assert "key_2" in outcome.err and "Key key_1 stays valid until " in outcome.err
    assert last(admin) == ("keys.rotate", {"id": "key_1", "overlap_s": 7200.0, "expires_at": None})
    made = json.loads(cli("keys", "rotate", "key_1", "--json", "--yes", "--run-dir", run_dir).out)
    assert (made["key"], made["replaces"]) == ("ak-fresh", "key_1")
    assert last(admin)[1]["overlap_s"] == 86400.0


def test_tenants_are_listed_with_their_state_and_limits(cli: Run, admin: AdminService, run_dir: Path) -> None:
    admin.tenants = [
        a_tenant("default", built_in=True),
        a_tenant("acme", quota=LIMITS, weight=2.5, highest_class=0, default_class=2, keys=3),
        a_tenant("gone", suspended_at=1.79e9),
    ]
    heading, *lines = cli("tenants", "list", "--run-dir", run_dir).out.splitlines()
    assert heading.split()[:2] == ["NAME", "STATE"]
    assert [line.split()[:2] for line in lines] == [
        ["default", "active"],
        ["acme", "active"],
        ["gone", "suspended"],
    ]
    assert lines[0].endswith("none")
    assert re.search(r" 2\.5 +P0 +P2 .* 3 ", lines[1])
    assert lines[1].endswith(
        "600 requests/min, 200,000 tokens/min, 5,000,000 tokens/day, 16 concurrent requests, "
        "64 queued requests, 8,192 context tokens, 0.25 KV share"
    )
    listed = json.loads(cli("tenants", "list", "--json", "--run-dir", run_dir).out)
    assert [tenant["name"] for tenant in listed] == ["default", "acme", "gone"]
    assert listed[1]["quota"]["kv_share"] == 0.25


def test_a_tenant_is_shown_with_every_limit(cli: Run, admin: AdminService, run_dir: Path) -> None:
    admin.tenants = [a_tenant("acme", quota=LIMITS, cache_group="lab", log_policy="hashes", log_days=30.0)]
    out = cli("tenants", "show", "acme", "--run-dir", run_dir).out
    shown = dict(re.split(r" {2,}", line, maxsplit=1) for line in out.splitlines())
    assert shown["state"] == "active" and shown["cache group"] == "lab"
    assert (shown["requests per minute"], shown["burst"], shown["context tokens"]) == ("600", "2m", "8,192")
    assert (shown["log policy"], shown["log days"]) == ("hashes", "30")
    assert json.loads(cli("tenants", "show", "acme", "--json", "--run-dir", run_dir).out)["name"] == "acme"
    unknown = cli("tenants", "show", "nobody", "--run-dir", run_dir)
    assert unknown.code == 1 and "no tenant 'nobody'" in unknown.err and "tenants list" in unknown.err


def test_a_tenant_is_shown_with_its_own_usage_and_that_of_its_keys(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    usage = [
        LimitUsage(limit="tokens_per_minute", capacity=200_000, used=1_520, held=512, resets_in_s=0.456),
        LimitUsage(limit="concurrent_requests", capacity=16, used=2, held=2, resets_in_s=None),
        LimitUsage(limit="queued_requests", capacity=64, used=0, held=0, resets_in_s=None),
    ]
    admin.tenants = [a_tenant("acme", quota=LIMITS, usage=usage)]
    names = {"name": "app", "prefix": "ak-abcde", "created_at": 1.79e9, "usage": usage[:1]}
    admin.keys = [
        Key(id="key_1", tenant="acme", **names),
        Key(id="key_2", tenant="other", **names),
        Key(id="key_3", tenant="acme", revoked_at=1.79e9, **names),
    ]
    out = cli("tenants", "show", "acme", "--run-dir", run_dir).out
    shown = [re.split(r" {2,}", line) for line in out.partition("\n\n")[2].splitlines()]
    assert shown == [
        ["SCOPE", "LIMIT", "USED", "OF", "HELD", "RESETS IN"],
        ["tenant", "tokens per minute", "1,520", "200,000", "512", "456ms"],
        ["tenant", "concurrent requests", "2", "16", "2", "when requests end"],
        ["tenant", "queued requests", "0", "64", "0", "-"],
        ["key app", "tokens per minute", "1,520", "200,000", "512", "456ms"],
    ]
    shown_json = json.loads(cli("tenants", "show", "acme", "--json", "--run-dir", run_dir).out)
    assert shown_json["usage"][0]["used"] == 1_520
    listed = json.loads(cli("keys", "list", "--json", "--run-dir", run_dir).out)
    assert listed[0]["usage"][0]["held"] == 512


def test_peers_are_listed_by_name_and_mapped_by_name_or_number(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    admin.peers = [
        PeerMapping(kind="uid", number=0, tenant="local", source="settings"),
        PeerMapping(kind="any", number=-1, tenant="local", source="settings"),
        PeerMapping(kind="gid", number=4_000_000_000, tenant="acme", source="mapped", created_at=1.79e9),
    ]
    lines = cli("peers", "list", "--run-dir", run_dir).out.splitlines()
    assert lines[1].split()[:3] == ["uid:0", "root", "local"] and lines[1].endswith("settings")
    assert lines[2].split()[:5] == ["any", "all", "other", "users", "local"]
    assert lines[3].split()[:3] == ["gid:4000000000", "?", "acme"] and "operator" in lines[3]
    for typed, meant in (
        ("uid:7", "uid:7"),
        ("user:root", "uid:0"),
        ("gid:9", "gid:9"),
        ("group:root", "gid:0"),
    ):
        outcome = cli("peers", "map", typed, "--tenant", "acme", "--run-dir", run_dir)
        assert outcome.out == "peers.map is done\n"
        assert last(admin) == ("peers.map", {"peer": meant, "tenant": "acme"})
        cli("peers", "unmap", typed, "--yes", "--run-dir", run_dir)
        assert last(admin) == ("peers.unmap", {"peer": meant})


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("description", ["tenants", "keys", "peers"])
def test_no_table_is_wider_than_the_terminal(
    admin: AdminService, run_dir: Path, monkeypatch: pytest.MonkeyPatch, description: str, width: int
) -> None:
    admin.tenants = [a_tenant("a" * 64, quota=LIMITS, cache_group="g" * 200, keys=12345, peers=999)]
    admin.keys = [
        Key(
            id="key_0123456789abcdef",
            name="n" * 200,
            tenant="t" * 64,
            prefix="ak-abcde",
            created_at=1.79e9,
            expires_at=time.time() + 86400,
            scopes=("inference", "admin", "read"),
            models=tuple(f"model-{number}" for number in range(20)),
            quota=LIMITS,
        )
    ]
    admin.peers = [
        PeerMapping(kind="uid", number=2**32 - 2, tenant="t" * 64, source="mapped", created_at=1.79e9)
    ]
    lines = on_a_terminal(
        description, "list", "--run-dir", str(run_dir), width=width, NO_COLOR="1"
    ).splitlines()
    assert len(lines) == 2
    assert max(map(cells, lines)) <= width


def test_names_chosen_by_others_cannot_control_the_terminal(
    cli: Run, admin: AdminService, run_dir: Path
) -> None:
    nasty = "x\x1b]0;owned\x07\r\ny"
    admin.tenants = [a_tenant(nasty, cache_group=nasty)]
    admin.keys = [Key(id="key_1", name=nasty, tenant=nasty, prefix="ak-", created_at=1.0, models=(nasty,))]
    admin.peers = [PeerMapping(kind="uid", number=0, tenant=nasty, source="mapped", created_at=1.0)]
    out = "".join(
        cli(*words, "--run-dir", run_dir).out
        for words in (("tenants", "list"), ("tenants", "show", nasty), ("keys", "list"), ("peers", "list"))
    )
    assert "owned" in out and not set(out) & {"\x1b", "\x07", "\r"}


@pytest.mark.parametrize(
    ("words", "question", "answer"),
    [
        (("tenants", "suspend", "acme"), "Suspend tenant acme? [y/N]", "y"),
        (("tenants", "delete", "acme"), "Delete tenant acme? Type the name to confirm:", "acme"),
        (("keys", "revoke", "key_1"), "Revoke key key_1? Type the id to confirm:", "key_1"),
        (("keys", "rotate", "key_1"), "Rotate key key_1? [y/N]", "y"),
        (("peers", "unmap", "uid:7"), "Unmap peer uid:7? [y/N]", "y"),
        (("models", "remove", "demo"), "Remove model demo? Type the name to confirm:", "demo"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_the_user_must_confirm_an_action_that_is_hard_to_undo(
    cli: Run,
    admin: AdminService,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    question: str,
    answer: str,
) -> None:
    for typed, done in (("\n", 0), ("n\n", 0), (f"{answer}\n", 1)):
        master, slave = os.openpty()
        os.write(master, typed.encode())
        with open(slave) as terminal:
            monkeypatch.setattr(sys, "stdin", terminal)
            outcome = cli(*words, "--run-dir", run_dir)
        os.close(master)
        assert question in outcome.err
        assert (len(admin.actions), outcome.code) == (done, 1 - done)


@pytest.mark.parametrize(
    ("words", "sent"),
    [
        ("alias chat demo@2", {"name": "chat", "target": "demo@2"}),
        ("alias chat --delete", {"name": "chat", "target": None}),
        ("split demo 1=90% 2=10", {"name": "demo", "weights": {"1": 90.0, "2": 10.0}}),
        ("split demo --clear", {"name": "demo", "weights": None}),
        ("shadow demo --to 2", {"name": "demo", "target": "2", "share": 0.05}),
        ("shadow demo --clear", {"name": "demo", "target": None, "share": 0.05}),
        ("alias chat", "no target given: add NAME[@VERSION], or --delete (Delete the alias.)"),
        ("split demo", "no weights given: add TARGET=WEIGHT..., or --clear (End the split: "),
        ("split demo 1=90 2=10 --clear", "1=90 2=10 and --clear were both given: give only one"),
        ("split demo 1=0", "'1=0' is not valid: write VERSION=WEIGHT"),
        ("split demo 1=1 1=2", "'1' is given twice"),
        ("shadow demo", "no target given: add --to TARGET, or --clear (End the shadow.)"),
        ("shadow demo --to 2 --clear", "--to 2 and --clear were both given"),
        ("shadow demo --to 2 --share 101%", "--share '101%' is not valid: write a percentage such as 5%"),
    ],
)
def test_an_option_instead_of_the_value_ends_an_alias_split_or_shadow(
    cli: Run, admin: AdminService, run_dir: Path, words: str, sent: dict[str, Any] | str
) -> None:
    outcome = cli("models", *words.split(), "--run-dir", run_dir)
    if isinstance(sent, str):
        assert outcome.code == 2 and sent in outcome.err and not admin.actions
    else:
        assert outcome.code == 0 and last(admin) == (f"models.{words.split()[0]}", sent)


def test_an_operator_key_in_the_environment_is_sent(
    cli: Run, admin: AdminService, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli("tenants", "list", "--run-dir", run_dir)
    assert admin.authorization is None
    monkeypatch.setenv("APPLIANCE_ADMIN_KEY", "ak-operator")
    cli("tenants", "list", "--run-dir", run_dir)
    assert admin.authorization == "Bearer ak-operator"
