"""Tests of how dialogs describe an action's impact, and of how changes to its target are detected."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from appliance.actions import Action, action_named
from appliance.protocol import Contents, DrainStatus, Key, ModelStatus, PeerMapping, Reloaded, ReplicaStatus
from appliance.protocol.registry import RegisteredModel, RegisteredVersion
from appliance.snapshot import Alert, KvCache, Snapshot, UnfinishedRequest
from console import units
from console.context import Context
from console.impact import Impact, impact, result_lines
from console.keys import offered
from store.policies import Quota
from store.structs import KeptText, Silence
from tests.console.frames import session, unknown

GIB = 1 << 30


def a_replica(name: str, **fields: Any) -> ReplicaStatus:
    """Return a replica on two GPUs with 30 GiB of weights and 100 GiB of KV cache in total."""
    values = {"state": "ready", "devices": ["cuda:0", "cuda:1"], "tensor_parallel_size": 2}
    sizes = {"weight_bytes": 30 * GIB, "kv_bytes": 100 * GIB}
    return ReplicaStatus(name=name, **{**values, **sizes, **fields})


def a_model(name: str, *replicas: ReplicaStatus, **fields: Any) -> ModelStatus:
    given = {"state": "ready", "drain_eta_s": 9.0, **fields}
    return ModelStatus(name=name, folder="/m", version="v", created=0, replicas=list(replicas), **given)


def a_request(name: str, model: str, replica: str, tenant: str, tokens: int = 10) -> UnfinishedRequest:
    return UnfinishedRequest(
        request_id=name,
        state="running" if replica else "queued",
        model=model,
        tenant=tenant,
        key_id="",
        peer="",
        front="front-1",
        replica=replica,
        attempt=0,
        age_s=3.0,
        prompt_tokens=100,
        max_tokens=100,
        phase="decode" if replica else "queued",
        generated_tokens=tokens if replica else None,
    )


def registered(default: int, **fields: Any) -> RegisteredModel:
    versions = [RegisteredVersion(version=number, folder="/m", state="ready") for number in (1, 2)]
    values = {"name": "chat", "state": "ready", "default": default, "source": "registry", **fields}
    return RegisteredModel(versions=versions, **values)


def two_versions(**fields: Any) -> Context:
    """Return the state of a service with two loaded versions of "chat", of which version 2 is the default."""
    snapshot = msgspec.structs.replace(
        unknown(),
        models=[
            a_model("chat@1", a_replica("chat@1-1")),
            a_model("chat@2", a_replica("chat@2-1"), a_replica("chat@2-2")),
            a_model("demo", a_replica("demo-1")),
        ],
        requests=[
            a_request("r1", "chat", "chat@1-1", "acme", 7),
            a_request("r2", "chat", "chat@2-1", "acme", 20),
            a_request("r3", "chat", "chat@2-2", "beta", 30),
            a_request("r4", "assistant", "", "gamma"),
            a_request("r5", "demo", "demo-1", "acme"),
        ],
    )
    return Context(snapshot=snapshot, rows={"models": [registered(2, aliases=["assistant"], **fields)]})


def lines_of(name: str, target: str, context: Context) -> list[str]:
    return impact(action_named(name), target, context)


@pytest.mark.parametrize(
    ("action", "target"),
    [
        ("models.unload", "chat"),
        ("models.unload", "chat@2"),
        ("models.sleep", "chat"),
        ("models.default", "chat@1"),
        ("models.rollback", "chat"),
    ],
)
def test_the_impact_of_ending_a_version_names_its_requests_and_the_freed_memory(
    action: str, target: str
) -> None:
    *versions, requests, tokens, end, freed = lines_of(action, target, two_versions(previous=1))
    is_replaced = action in ("models.default", "models.rollback")
    assert versions == (["default version: 2 → 1"] if is_replaced else [])
    assert requests == "2 running and 1 queued requests from 3 tenants: acme, beta, gamma"
    assert tokens == "50 output tokens generated so far"
    assert end.startswith("expected end: in 9.0s")
    # Replicas report the sum over their ranks.
    assert freed == "frees 60.0G weights + 200G KV cache of 2 replicas"


def test_the_impact_of_ending_another_version_leaves_out_the_default_version() -> None:
    requests, tokens, _, freed = lines_of("models.unload", "chat@1", two_versions())
    assert requests == "1 running and 0 queued requests from 1 tenant: acme"
    assert tokens == "7 output tokens generated so far"
    assert freed == "frees 30.0G weights + 100G KV cache of 1 replica"


def test_the_impact_of_a_model_without_memory_values_is_unknown_and_not_zero() -> None:
    context = two_versions()
    assert context.snapshot is not None
    context.snapshot.models[2] = a_model("demo", a_replica("demo-1", weight_bytes=0))
    assert lines_of("models.unload", "demo", context)[-1] == "frees -- weights + 100G KV cache of 1 replica"
    assert lines_of("models.unload", "other", context) == [
        "no running or queued requests are affected",
        "not loaded: no memory is freed",
    ]


def test_a_sleeping_model_frees_only_host_memory() -> None:
    context = two_versions()
    assert context.snapshot is not None
    asleep = a_replica("demo-1", state="sleeping", host_bytes=30 * GIB, freed_bytes=130 * GIB)
    context.snapshot.models[2] = a_model("demo", asleep)
    assert lines_of("models.unload", "demo", context)[-1] == "frees 30.0G host memory of 1 replica"
    assert lines_of("models.sleep", "demo", context)[-1] == "already asleep: no memory is freed"


@pytest.mark.parametrize("action", ["models.split", "models.alias", "models.shadow"])
def test_the_impact_of_routing_names_the_requests_for_the_name(action: str) -> None:
    requests, tokens = lines_of(action, "chat", two_versions())
    assert requests == "3 running and 0 queued requests from 2 tenants: acme, beta"
    assert tokens == "57 output tokens generated so far"


def test_the_impact_of_removing_a_loaded_model_is_that_the_service_refuses() -> None:
    assert lines_of("models.remove", "chat", two_versions()) == [
        "loaded: chat@1, chat@2",
        "the service will refuse this action: unload the model first",
    ]
    context = two_versions()
    assert context.snapshot is not None
    context.snapshot.models.pop(0)
    assert "no memory is freed" in lines_of("models.remove", "chat@1", context)[0]


def test_the_impact_of_a_cancelled_request_names_its_blocks() -> None:
    context = two_versions()
    assert context.snapshot is not None
    context.snapshot.kv = [
        KvCache(
            model="demo",
            replica="demo-1",
            blocks_total=100,
            blocks_used=12,
            blocks_cached=0,
            block_tokens=64,
            kv_bytes=100 * GIB,
        )
    ]
    assert lines_of("requests.cancel", "r5", context)[-1] == "frees up to -- KV blocks (--)"
    context.snapshot.requests[4].blocks = 12
    assert lines_of("requests.cancel", "r5", context)[-1] == "frees up to 12 KV blocks (12.0G)"
    assert lines_of("requests.cancel", "r4", context)[-1] == "waiting in the queue: uses no KV blocks"


def test_a_drain_of_a_version_names_the_requests_of_its_replicas() -> None:
    assert lines_of("drain", "chat@1", two_versions())[0].startswith("1 running and 0 queued")
    for name in ("chat", "chat@2", "assistant"):
        assert lines_of("drain", name, two_versions())[0].startswith("2 running and 1 queued"), name


def a_drain(model: str | None) -> DrainStatus:
    return DrainStatus(
        model=model,
        state="draining",
        grace_s=9.0,
        grace_left_s=9.0,
        queue=True,
        started_at=0.0,
        elapsed_s=0.0,
        running=1,
        queued=0,
        held=1234,
        tokens_left=0,
    )


def test_the_impact_of_resuming_names_the_held_requests() -> None:
    context = two_versions()
    assert context.snapshot is not None
    assert impact(action_named("resume"), None, context) == ["not draining"]
    context.snapshot.drains = [a_drain("chat@2")]
    for name in ("chat", "chat@2", "assistant"):
        assert lines_of("resume", name, context) == ["1,234 held requests will be served first"], name
    assert lines_of("resume", "chat@1", context) == ["not draining"]
    context.snapshot.drains = [a_drain(None)]
    assert impact(action_named("resume"), None, context) == ["1,234 held requests will be served first"]


def test_the_impact_of_resuming_counts_a_single_request() -> None:
    context = two_versions()
    assert context.snapshot is not None
    context.snapshot.drains = [msgspec.structs.replace(a_drain(None), held=1)]
    assert impact(action_named("resume"), None, context) == ["1 held request will be served first"]


@pytest.mark.parametrize("action", offered(), ids=lambda action: action.name)
def test_every_action_that_affects_requests_declares_its_impact(action: Action) -> None:
    """An action that needs confirmation may refuse or end requests, so the registry must state its impact."""
    context = session(steps=3).context
    assert context.snapshot is not None
    targets = {
        "model": "qwen3-8b",
        "tenant": context.snapshot.tenants[0].name,
        "key": context.rows_of("callers", Key)[0].id,
        "request": context.snapshot.requests[0].request_id,
    }
    if action.target not in targets:
        assert action.impact == "none", "show the impact on this kind of target"
        return
    if action.danger != "none":
        assert action.impact != "none", "declare the impact of the new action"
    if action.impact != "none":
        assert Impact(action, lambda: context).lines(targets[action.target]) != []


def test_an_action_warns_about_an_unknown_target_unless_it_creates_the_target() -> None:
    context = session(steps=3).context
    for action in offered():
        if action.target in ("model", "peer", "alert", "silence"):
            lines = Impact(action, lambda: context).lines("nosuch")
            warns = any("nosuch is listed: check the name" in line for line in lines)
            assert warns is not action.creates_object, action.name


@pytest.mark.parametrize("action", ["tenants.suspend", "keys.revoke"])
def test_the_impact_on_an_unknown_tenant_or_key_says_that_it_is_not_listed(action: str) -> None:
    context = session(steps=3).context
    kind = action_named(action).target
    assert lines_of(action, "nosuch", context) == [f"no {kind} nosuch is listed: check the name"]
    assert impact(action_named(action), None, context) == []
    known = {"tenant": context.snapshot.tenants[0].name, "key": context.rows_of("callers", Key)[0].id}  # type: ignore[union-attr]
    assert "is listed" not in lines_of(action, known[kind], context)[0]


def test_a_dialog_notices_that_a_drain_has_begun() -> None:
    before = two_versions()
    after = newer(before, lambda snapshot: snapshot.drains.append(a_drain("chat@2")))
    for action, target in (("drain", "chat"), ("models.unload", "chat@2")):
        message = change_of(action, target, before, after)
        assert message.startswith("admission changed from accepting requests to draining"), action


def newer(context: Context, change: Callable[[Snapshot], object]) -> Context:
    """Return a copy of the state, with `change` applied to its snapshot."""
    assert context.snapshot is not None
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(context.snapshot), type=Snapshot)
    change(snapshot)
    return replace(context, snapshot=snapshot)


def change_of(action: str | Action, target: str, before: Context, after: Context) -> str:
    """Return the message of a dialog that was opened in one state and confirmed in another."""
    states = [before]
    watched = Impact(action_named(action) if isinstance(action, str) else action, lambda: states[-1])
    watched.lines(target)
    assert watched.changes(target) == ""
    states.append(after)
    message = watched.changes(target)
    assert watched.changes(target) == "", "the operator has been told once"
    return message


def test_a_dialog_notices_that_a_request_has_ended() -> None:
    before = two_versions()
    after = newer(before, lambda snapshot: snapshot.requests.pop(0))
    message = change_of("requests.cancel", "r1", before, after)
    assert message == "state changed from unfinished to ended: review the impact and confirm again"


def set_capacity(snapshot: Snapshot, capacity: int) -> None:
    tenant = next(one for one in snapshot.tenants if one.name == "mobile")
    tenant.usage[0].capacity = capacity


def set_tenant(snapshot: Snapshot, **fields: Any) -> None:
    snapshot.tenants = [
        msgspec.structs.replace(one, **fields) if one.name == "mobile" else one for one in snapshot.tenants
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda snapshot: set_capacity(snapshot, 240_000),
            "tokens per minute changed from 120,000 to 240,000",
        ),
        (lambda snapshot: set_tenant(snapshot, weight=7.0), "weight changed from 1 to 7"),
        (lambda snapshot: set_tenant(snapshot, highest_class=3), "highest class changed from P1 to P3"),
        (lambda snapshot: set_tenant(snapshot, suspended_at=1.0), "state changed from active to suspended"),
        (lambda snapshot: set_tenant(snapshot, keys=2), "valid keys changed from 3 to 2"),
        (lambda snapshot: set_tenant(snapshot, usage=[]), "tokens per minute changed from 120,000 to none"),
        (lambda snapshot: set_tenant(snapshot, running=999), ""),
    ],
)
def test_a_dialog_notices_another_operators_change_of_a_tenant(
    change: Callable[[Snapshot], object], message: str
) -> None:
    before = newer(session(steps=3).context, lambda snapshot: set_capacity(snapshot, 120_000))
    before = newer(before, lambda snapshot: set_tenant(snapshot, weight=1.0, highest_class=1))
    noticed = change_of("tenants.set", "mobile", before, newer(before, change))
    assert noticed.startswith(message) and bool(noticed) == bool(message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda models: setattr(models[1], "state", "failed"), "state changed from ready to failed"),
        (lambda models: setattr(models[1], "version", "w"), "version changed from v to w"),
        (lambda models: models[1].replicas.pop(), "replicas changed from 2 to 1"),
        (lambda models: models.pop(1), "state changed from ready to none"),
        (lambda models: setattr(models[1], "queued", 5), ""),
        (lambda models: models.pop(0), ""),
    ],
)
def test_a_dialog_notices_that_a_model_has_changed(
    change: Callable[[list[ModelStatus]], object], message: str
) -> None:
    before = two_versions()
    noticed = change_of("models.unload", "chat@2", before, newer(before, lambda one: change(one.models)))
    assert noticed.startswith(message) and bool(noticed) == bool(message)


def test_a_dialog_notices_that_the_default_version_or_the_split_has_changed() -> None:
    before = two_versions()
    after = replace(before, rows={"models": [registered(1, aliases=["assistant"], split={"1": 9.0})]})
    message = change_of("models.rollback", "chat", before, after)
    assert message.startswith("default version changed from 2 to 1, split changed from none to 1 9:")


KEY = Key(id="k1", name="ci", tenant="acme", prefix="sk", created_at=1.0)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (msgspec.structs.replace(KEY, revoked_at=5.0), "key changed from valid to revoked"),
        (msgspec.structs.replace(KEY, expires_at=1.0), "key changed from valid to expired"),
        (msgspec.structs.replace(KEY, tenant="beta"), "tenant changed from acme to beta"),
        (
            msgspec.structs.replace(KEY, quota=Quota(tokens_per_day=9)),
            "tokens per day changed from none to 9",
        ),
        (None, "key changed from valid to absent"),
        (KEY, ""),
    ],
)
def test_a_dialog_notices_that_a_key_has_changed(key: Key | None, message: str) -> None:
    before = replace(two_versions(), rows={"callers": [KEY]})
    after = replace(before, rows={"callers": [] if key is None else [key]})
    noticed = change_of("keys.revoke", "k1", before, after)
    assert noticed.startswith(message) and bool(noticed) == bool(message)


def test_a_dialog_notices_that_a_mapping_has_changed() -> None:
    rows = [PeerMapping(kind="uid", number=7, tenant=tenant, source="mapped") for tenant in ("a", "b")]
    before, after = (replace(two_versions(), rows={"callers": [row]}) for row in rows)
    message = change_of("peers.unmap", "uid:7", before, after)
    assert message.startswith("mapping changed from tenant a from mapped to tenant b from mapped")


def test_a_result_is_shown_without_the_notation_of_a_programming_language() -> None:
    silence = Silence(
        id="s1", rule="disk-full", subject="*", until=1_800_000_000.0, created_at=1_790_000_000.0
    )
    assert result_lines(silence)[3] == f"until: {units.date(1_800_000_000.0)}"
    reloaded = Reloaded(changed=["queue.limit: 10 to 20"], models=[], at_restart=[])
    assert result_lines(reloaded) == [
        "changed:",
        "  queue.limit: 10 to 20",
        "models: none",
        "at restart: none",
    ]
    kept = KeptText(number=0, part="prompt", text="first\nsecond", bytes=12, sha256="ab")
    lines = result_lines(Contents(request_id="r1", tenant="a", created_at=1.0, goes_at=None, texts=[kept]))
    at = lines.index("texts:")
    assert lines[at + 1 : at + 3] == ["  part: prompt", "  number: 0"]
    assert lines[lines.index("  text: first") + 1] == "    second"


def test_the_impact_on_alerts_names_the_alert_or_the_number_of_alerts() -> None:
    alert = Alert(
        id="a1", rule="replica-down", severity="critical", state="firing", where="m", description="m is down"
    )
    ended = msgspec.structs.replace(alert, id="a2", state="resolved")
    context = newer(two_versions(), lambda snapshot: snapshot.alerts.extend([alert, ended]))
    assert lines_of("alerts.ack", "a1", context) == ["m is down (critical, firing)"]
    assert lines_of("alerts.ack", "a2", context)[1:] == [
        "the service will refuse this action: the alert has ended"
    ]
    assert lines_of("alerts.silence", "replica-*", context) == ["1 active alert for this rule"]
    assert lines_of("alerts.silence", "disk-full", context) == ["0 active alerts for this rule"]


@pytest.mark.parametrize(("action", "target"), [("alerts.ack", "a1"), ("alerts.silence", "replica-*")])
def test_a_dialog_notices_that_an_alert_has_changed(action: str, target: str) -> None:
    alert = Alert(
        id="a1", rule="replica-down", severity="critical", state="firing", where="m", description="w"
    )
    before = newer(two_versions(), lambda snapshot: snapshot.alerts.append(alert))
    ended = msgspec.structs.replace(alert, state="resolved")
    after = newer(before, lambda snapshot: snapshot.alerts.__setitem__(0, ended))
    assert "firing to " in change_of(action, target, before, after)


def test_the_impact_of_ending_a_silence_names_it_and_its_end_is_noticed() -> None:
    alert = Alert(
        id="a1",
        rule="replica-down",
        severity="critical",
        state="silenced",
        where="m",
        description="m is down",
    )
    silence = Silence(
        id="s1", rule="replica-*", subject="*", until=1_800_000_000.0, reason="repair", created_by="ops"
    )
    before = newer(two_versions(), lambda snapshot: snapshot.alerts.append(alert))
    before = replace(before, rows={"silences": [silence]})
    assert lines_of("alerts.unsilence", "s1", before) == [
        f"rule replica-* on * until {units.date(1_800_000_000.0)}, by ops (repair)",
        "this silence currently covers 1 active alert",
    ]
    after = replace(before, rows={"silences": []})
    assert "silence changed from active to ended" in change_of("alerts.unsilence", "s1", before, after)


def test_every_dialog_notices_that_the_service_has_restarted() -> None:
    before = two_versions()
    after = newer(before, lambda snapshot: setattr(snapshot, "started_at", snapshot.started_at + 60))
    assert change_of("config.reload", "", before, after).startswith("service start changed from ")


def test_a_list_that_is_read_only_after_the_dialog_opened_is_no_change() -> None:
    states = [replace(two_versions(), rows={})]
    watched = Impact(action_named("keys.revoke"), lambda: states[-1])
    watched.lines("k1")
    states.append(replace(states[0], rows={"callers": [KEY]}))
    watched.lines("k1")
    assert watched.changes("k1") == ""
    states.append(replace(states[0], rows={"callers": []}))
    assert watched.changes("k1").startswith("key changed from valid to absent")


def test_the_impact_of_a_drain_names_requests_and_tenants() -> None:
    shown = session(steps=3)
    lines = impact(action_named("drain"), None, shown.context)
    assert "running and" in lines[0]
    assert "tenants: " in lines[0]


def test_the_impact_of_a_drain_names_its_expected_end() -> None:
    snapshot = session(steps=3).context.snapshot
    assert snapshot is not None
    first, *others = models = copy.deepcopy(snapshot.models)
    assert others
    for one in models:
        one.drain_eta_s = 5.0
    first.drain_eta_s = 90.0
    context = Context(snapshot=msgspec.structs.replace(snapshot, models=models))
    drain = action_named("drain")
    assert impact(drain, None, context)[-1].startswith("expected end: in 1m30s, at ")
    assert impact(drain, others[0].name, context)[-1].startswith("expected end: in 5.0s, at ")
    first.drain_eta_s = None
    assert impact(drain, None, context)[-1].startswith("expected end: --")
    assert impact(drain, others[0].name, context)[-1].startswith("expected end: in 5.0s, at ")
    assert not any("expected end" in row for row in impact(action_named("tenants.set"), "search", context))


def test_showing_a_request_frees_nothing_and_a_new_key_affects_no_request() -> None:
    context = two_versions()
    [line] = lines_of("requests.show", "r2", context)
    assert line.startswith("tenant acme, model chat")
    live = session(steps=3).context
    assert live.snapshot is not None
    assert lines_of("keys.create", live.snapshot.tenants[0].name, live) == []
    assert lines_of("keys.create", "nobody", live) == ["no tenant nobody is listed: check the name"]
