"""Tests of the core's small components: model versions, listeners, the run directory, and access to the admin
API."""

from __future__ import annotations

import asyncio
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from appliance.actions import ACTIONS, action_named
from appliance.admin.app import admin_app
from appliance.admin.callers import Authenticator
from appliance.background import Backoff
from appliance.client import AdminClient, ServiceNotRunningError
from appliance.core.problems import Problems
from appliance.http import Peer
from appliance.http.sockets import ListenError, bind_tcp, bind_unix
from appliance.models.registry import describe, fingerprint
from appliance.rundir import RunDirError, RunDirLock, new_rendezvous, prepare_directories
from appliance.settings import AdminSettings, ModelSettings, demo_model_folder


def test_the_version_of_a_model_depends_on_its_files_and_not_on_their_dates(tmp_path: Path) -> None:
    first = tmp_path / "first"
    first.mkdir()
    shutil.copyfile(demo_model_folder() / "config.json", first / "config.json")
    (first / "model.safetensors").write_bytes(b"x" * 1000)
    shutil.copytree(first, tmp_path / "copy", copy_function=shutil.copyfile)
    assert fingerprint(first) == fingerprint(tmp_path / "copy")
    (tmp_path / "copy" / "model.safetensors").write_bytes(b"x" * 999 + b"y")
    assert fingerprint(first) != fingerprint(tmp_path / "copy")
    model = describe("m", ModelSettings(folder=str(first), max_model_len=64))
    assert (model.max_model_len, model.vocab_size, len(model.version)) == (64, 5120, 12)


def test_a_stale_socket_is_replaced_but_a_regular_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "api.sock"
    bind_unix(path, "0660").close()
    with bind_unix(path, "0640"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o640
    path.unlink()
    path.write_text("precious")
    with pytest.raises(ListenError, match=r"cannot listen on .*api\.sock .* not a socket; move it away"):
        bind_unix(path, "0660")
    assert path.read_text() == "precious"


def test_an_address_in_use_is_named() -> None:
    with (
        bind_tcp("127.0.0.1", 0) as sock,
        pytest.raises(ListenError, match=r"cannot listen on listen = 127\.0\.0\.1:"),
    ):
        bind_tcp("127.0.0.1", sock.getsockname()[1])


def test_a_run_directory_has_one_holder(tmp_path: Path) -> None:
    lock = RunDirLock(tmp_path, tmp_path)
    with pytest.raises(RunDirError, match=f"process {os.getpid()}"):
        RunDirLock(tmp_path, tmp_path)
    lock.release()
    lock = RunDirLock(tmp_path, tmp_path)
    assert lock.former is not None and lock.former.stopped
    lock.release()


def test_a_lock_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    (tmp_path / "service.lock").mkdir()
    with pytest.raises(RunDirError, match=r"service\.lock cannot be opened .*: remove the file"):
        RunDirLock(tmp_path, tmp_path)


def test_the_next_lock_holder_removes_rendezvous_files(tmp_path: Path) -> None:
    Path(new_rendezvous(tmp_path)).write_text("of a service that was killed")
    assert len(list(tmp_path.iterdir())) == 1
    RunDirLock(tmp_path, tmp_path).release()
    assert [path.name for path in tmp_path.iterdir()] == ["service.lock"]


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunDirError, match="run_dir"):
        prepare_directories(tmp_path / "file", tmp_path)


def test_delays_double_up_to_five_seconds_and_start_over_after_healthy_service() -> None:
    backoff = Backoff(draw=lambda: 0.5)
    assert [backoff.delay_s(0.0) for _ in range(8)] == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]
    assert backoff.delay_s(60.0) == 0.1
    slow = Backoff(5.0, 300.0, draw=lambda: 0.5)
    assert [slow.delay_s(0.0) for _ in range(8)] == [5, 10, 20, 40, 80, 160, 300, 300]


def test_delays_deviate_by_at_most_a_fifth() -> None:
    delays = [Backoff(10.0, 10.0).delay_s(0.0) for _ in range(200)]
    assert 8.0 <= min(delays) < 9.0 and 11.0 < max(delays) <= 12.0


def test_repeated_problems_are_counted_and_the_latest_comes_first() -> None:
    problems = Problems()
    for description in ("a", "b", "a"):
        problems.note("somewhere", description)
    assert [(problem.description, problem.count) for problem in problems.recent()] == [("a", 2), ("b", 1)]
    for number in range(50):
        problems.note("somewhere", str(number))
    assert [problem.description for problem in problems.recent()] == [
        str(number) for number in range(49, -1, -1)
    ]


def test_the_client_says_where_it_looked_and_how_to_start_a_service(tmp_path: Path) -> None:
    client = AdminClient(tmp_path)
    with pytest.raises(ServiceNotRunningError, match="appliance serve"):
        client.status()
    bind_unix(tmp_path / "admin.sock", "0600").close()
    with pytest.raises(ServiceNotRunningError, match=r"admin\.sock"):
        client.status()


class Nothing:
    """A backend that fails the test if it is called."""

    routes = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *words: pytest.fail("an unknown sender reached the backend")


def ask(path: str, uid: int | None, method: str = "GET", body: bytes = b"") -> tuple[int, bytes]:
    _, app = admin_app(Nothing(), Authenticator(AdminSettings(uids=[7], groups=[]), lambda key: None))
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "root_path": "",
        "scheme": "http",
        "server": None,
        "client": None,
        "state": {} if uid is None else {"peer": Peer("unix", uid, "", (uid,))},
    }

    async def call() -> None:
        await app(scope, receive, send)

    asyncio.run(call())
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


def test_the_admin_api_denies_other_users() -> None:
    paths = ["/status", "/requests", "/keys", "/openapi.json", "/nothing"]
    for path in paths + [f"/actions/{action.name}" for action in ACTIONS]:
        for uid in (None, 8, -1):
            assert ask(path, uid)[0] == 403


def test_the_admin_api_describes_itself_with_every_reference_resolved() -> None:
    status, body = ask("/openapi.json", 7)
    document = msgspec.json.decode(body)
    assert status == 200
    parts = document["components"]["schemas"]
    assert {"Status", "NewKey", "CreateKey"} <= set(parts)
    assert {f"/actions/{action.name}" for action in ACTIONS} <= set(document["paths"])
    for piece in body.decode().split('"#/components/schemas/')[1:]:
        assert piece.partition('"')[0] in parts


def test_an_action_with_wrong_parameters_is_refused_with_the_field() -> None:
    status, body = ask("/actions/keys.create", 7, "POST", b'{"nme": "x"}')
    assert (status, b"nme" in body) == (400, True)


def test_the_registry_lists_its_actions() -> None:
    with pytest.raises(LookupError, match=r"keys\.create"):
        action_named("keys.burn")
