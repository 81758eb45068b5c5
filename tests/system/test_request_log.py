"""Tests of the request contents that a real service stores. The tenant's log policy determines whether the
service stores nothing, hashes, or texts with secrets removed, and for how long."""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import msgspec
import openai
import pytest

from appliance.actions.parameters import ShowContents
from appliance.client import AdminError
from tests.system.service import Service, service
from tests.system.traffic import ended

pytestmark = pytest.mark.system

SECRETS = ("ak-42Wz8WexrvPVbzgyANeDeA367WMYIg4REgNL5PcR8Ik", "hunter2-is-mine", "acme_0815_4711")
PROMPT = "def login():  # key {}, password: {}, badge {}\n    ".format(*SECRETS)
REDACTED = "def login():  # key [key redacted], password: [password redacted], badge [secret redacted]\n    "


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = tmp_path_factory.mktemp("log") / "appliance.toml"
    config.write_text('[log]\nsecret_prefixes = ["acme_"]\n')
    with service("--config", str(config)) as started:
        for policy in ("metadata", "hashes", "full"):
            started.tenant(policy, log_policy=policy)
        yield started


def client_of(running: Service, tenant: str) -> openai.OpenAI:
    return running.client().with_options(api_key=running.key("k", tenant))


def ask(client: openai.OpenAI, stream: bool = False) -> tuple[str, str]:
    """Send a request and return its id and answer."""
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=12, temperature=0, stream=stream
    )
    parts: list[Any] = list(answer) if stream else [answer]
    return parts[0].id.removeprefix("cmpl-"), "".join(part.choices[0].text for part in parts if part.choices)


def shown(running: Service, request_id: str) -> Any:
    """Return the stored contents of a request, or None if there are none."""
    try:
        return msgspec.to_builtins(running.act(ShowContents(request_id=request_id)))
    except AdminError as error:
        assert error.status == 404 and "its tenant's log policy is 'metadata'" in str(error)
        return None


def kept(running: Service, request_id: str) -> Any:
    """Wait until a request's contents are stored, and return them."""
    return running.wait_until(lambda: shown(running, request_id), 60, "the stored contents of a request")


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def state_bytes(running: Service) -> bytes:
    """Return all bytes in the service's state directory."""
    found = b""
    for path in running.state_dir.iterdir():
        with suppress(FileNotFoundError):  # the service may remove a temporary file meanwhile
            found += path.read_bytes()
    return found


def test_each_log_policy_stores_what_it_allows_and_never_a_secret(running: Service) -> None:
    request_ids, answers = {}, {}
    for policy in ("metadata", "hashes", "full"):
        request_ids[policy], answers[policy] = ask(client_of(running, policy), stream=policy == "full")
    full, hashes = kept(running, request_ids["full"]), kept(running, request_ids["hashes"])
    assert full["tenant"] == "full" and full["goes_at"] == pytest.approx(full["created_at"] + 30 * 86400)
    prompt, answer = full["texts"]
    assert (prompt["part"], prompt["text"], prompt["redactions"]) == ("prompt", REDACTED, 3)
    assert (answer["part"], answer["text"], answer["redactions"]) == ("answer", answers["full"], 0)
    assert [text["sha256"] for text in full["texts"]] == [sha256(REDACTED), sha256(answers["full"])]
    assert [text["text"] for text in hashes["texts"]] == [None, None]
    assert [text["sha256"] for text in hashes["texts"]] == [sha256(PROMPT), sha256(answers["hashes"])]
    # The contents of later requests have already been written. This request's contents are therefore not just
    # late: the service never stored them.
    assert shown(running, request_ids["metadata"]) is None
    running.wait_until(lambda: ended(running) >= set(request_ids.values()), 60, "the rows of the requests")
    on_disk = state_bytes(running)
    assert not [secret for secret in SECRETS if secret.encode() in on_disk]
    assert b"def login" in on_disk


def test_each_display_of_stored_contents_is_audited(running: Service) -> None:
    request_id, _ = ask(client_of(running, "full"))
    kept(running, request_id)
    assert running.command("requests", "show", request_id) == shown(running, request_id)

    def recorded() -> Any:
        last = running.command("audit", "list", "--action", "requests.show")[-1]
        return last if last["result"] else None

    last = running.wait_until(recorded, 60, "the result of the action in the audit trail")
    assert (last["params"], last["result"]) == ({"request_id": request_id}, "ok")
    assert last["actor"] == f"uid:{os.geteuid()}" and last["host"]
    assert last["after"] is None, "the audit trail must contain no text"


def test_stored_texts_are_readable_only_by_the_services_user(running: Service) -> None:
    kept(running, ask(client_of(running, "full"))[0])
    for path in running.state_dir.glob("contents.db*"):
        assert path.stat().st_mode & 0o077 == 0 or path.name.endswith("-lock"), path
    assert (running.state_dir / "history.db").stat().st_mode & 0o777 == 0o640


def test_expired_texts_are_removed_and_the_row_is_kept(running: Service) -> None:
    request_id, _ = ask(client_of(running, "full"))
    stays, _ = ask(client_of(running, "hashes"))
    kept(running, request_id)
    kept(running, stays)
    running.command("tenants", "set", "full", "--log-days", "0.000001")
    running.wait_until(lambda: shown(running, request_id) is None, 60, "the texts to be removed")
    # The service also overwrites removed data, including in the write-ahead log.
    running.wait_until(lambda: b"def login" not in state_bytes(running), 60, "the texts to be overwritten")
    assert kept(running, stays)["texts"]
    running.wait_until(lambda: request_id in ended(running), 60, "the row of the request")
    assert [row["status"] for row in running.command("requests", "--id", request_id)] == [200]
    with closing(sqlite3.connect(f"file:{running.state_dir}/contents.db?mode=ro", uri=True)) as database:
        assert database.execute("SELECT count(*) FROM contents WHERE tenant = 'full'").fetchone() == (0,)
    running.command("tenants", "set", "full", "--log-days", "none")


def test_changed_log_settings_apply_after_a_reload(running: Service) -> None:
    config = Path(running.flags[1])
    before = config.read_text()
    config.write_text(before + "redact = []\nmax_text_chars = 20\ncontents_days = 0\n")
    try:
        assert "log.max_text_chars" in str(running.command("config", "reload"))
        known = kept(running, ask(client_of(running, "full"))[0])
        assert known["texts"][0]["text"] == PROMPT[:20] and known["texts"][0]["truncated"]
        assert known["goes_at"] is None
    finally:
        config.write_text(before)
        running.command("config", "reload")
