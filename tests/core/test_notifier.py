"""Tests of the real core's reports to the service manager, from start to stop, and while the database writer
hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from appliance.actions.parameters import AddModel, LoadModel
from appliance.core.notifier import Notifier
from appliance.core.state import opened
from appliance.core.systemd import Manager
from appliance.settings import Settings
from store.migrations import Migration, Schema
from store.writer import Writer
from tests.core.conftest import Service
from tests.waiting import until, wait_until

NOTES = Schema("notes", (Migration("notes", ("CREATE TABLE notes (x)",)),))
WATCHDOG_S = 0.4


class Heard:
    """The service manager's end of the notification socket, which collects the reports."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self.path))
        self.words: list[dict[str, str]] = []

    def listen(self) -> list[dict[str, str]]:
        """Return all messages received so far."""
        while True:
            try:
                said = self._socket.recv(4096, socket.MSG_DONTWAIT).decode()
            except BlockingIOError:
                return self.words
            self.words.append(dict(line.partition("=")[::2] for line in said.splitlines()))

    def count(self, name: str) -> int:
        return sum(name in said for said in self.listen())

    def place(self, **wanted: str) -> int:
        """Return the index of the first report with these values."""
        for place, said in enumerate(self.listen()):
            if all(said.get(name, "").startswith(text) for name, text in wanted.items()):
                return place
        raise ValueError(f"no report contains {wanted}: {self.words}")

    def says(self, **wanted: str) -> bool:
        try:
            self.place(**wanted)
        except ValueError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[Heard]:
    made = Heard(tmp_path)
    yield made
    made.close()


def test_the_service_manager_is_told_loading_ready_and_drained(
    make_service: Callable[..., Service], heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(heard.path))
    monkeypatch.setenv("WATCHDOG_USEC", "2000000")
    service = make_service("drain_grace_s = 8")
    script = tmp_path / "m" / "fake.json"
    script.write_text(json.dumps({"hang": True}))
    service.start()
    wait_until(lambda: heard.says(STATUS="loading: m-0 read 50% of 2.0 MiB"), description="the progress")
    asked = heard.count("EXTEND_TIMEOUT_USEC")
    wait_until(lambda: heard.count("EXTEND_TIMEOUT_USEC") >= asked + 2, description="time to load")
    assert not heard.says(READY="1")
    script.unlink()
    wait_until(lambda: heard.says(READY="1"), description="READY")
    wait_until(lambda: heard.says(STATUS="ready: 1 model"), description="its status")
    assert heard.place(STATUS="starting") < heard.place(STATUS="loading: m-0") < heard.place(READY="1")
    signs = heard.count("WATCHDOG")
    wait_until(lambda: heard.count("WATCHDOG") > signs + 2, description="signs of life")
    asked = heard.count("EXTEND_TIMEOUT_USEC")
    with service.connect("m 100000") as client:
        assert client.recv(1)
        process = service.process
        assert process is not None
        # The kernel buffers only a few messages for a receiver that does not read.
        heard.listen()
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: (heard.listen(), process.poll() is not None)[1], description="the end")
        assert process.returncode == 0
    heard.listen()
    assert heard.place(READY="1") < heard.place(STOPPING="1") < heard.place(STATUS="draining: 1 running")
    assert heard.count("EXTEND_TIMEOUT_USEC") > asked + 1
    last = [said["STATUS"] for said in heard.words if "STATUS" in said][-1]
    assert last == f"stopped: closing {service.state_dir}/control.db"


def test_a_load_beside_models_that_serve_is_part_of_the_status_text(
    make_service: Callable[..., Service], heard: Heard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(heard.path))
    service = make_service()
    folder = tmp_path / "late"
    folder.mkdir()
    for file in (tmp_path / "m").iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "fake.json").write_text(json.dumps({"hang": True}))
    service.start_and_wait()
    service.admin.act(AddModel(name="late", folder=str(folder)))
    service.admin.act(LoadModel(model="late"))
    expected = "ready: 1 model, 0 running, 0 waiting; loading: late@1-0 read 50% of 2.0 MiB"
    wait_until(lambda: heard.says(STATUS=expected), description="the load in the status text")


def test_the_service_manager_waits_for_slow_databases(
    tmp_path: Path, heard: Heard, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    start, close = Writer.start, Writer.close

    def slow_start(writer: Writer) -> None:
        assert writer.path.name != "history.db" or go_on.wait(60)
        start(writer)

    def slow_close(writer: Writer, timeout_s: float = 5.0) -> None:
        assert writer.path.name != "history.db" or go_on.wait(60)
        close(writer, timeout_s)

    async def asks_again_and_again(status: str) -> None:
        async with asyncio.timeout(60):
            while not heard.says(STATUS=status):
                await asyncio.sleep(0.01)
            so_far = heard.count("EXTEND_TIMEOUT_USEC")
            while heard.count("EXTEND_TIMEOUT_USEC") < so_far + 3:
                await asyncio.sleep(0.01)

    async def scenario() -> None:
        settings = Settings(run_dir=str(tmp_path / "run"), state_dir=str(tmp_path / "state"))
        manager = Manager({"NOTIFY_SOCKET": str(heard.path)})
        async with contextlib.AsyncExitStack() as held:
            held.callback(manager.close)
            opening = asyncio.create_task(held.enter_async_context(opened(settings, manager)))
            await asks_again_and_again(f"starting: opening {tmp_path}/state/history.db")
            assert not opening.done()
            go_on.set()
            await opening
            go_on.clear()
            closing = asyncio.create_task(held.aclose())
            await asks_again_and_again(f"stopped: closing {tmp_path}/state/history.db")
            assert not closing.done()
            go_on.set()
            await closing
        assert not manager.listens

    monkeypatch.setattr("appliance.core.systemd._EVERY_S", 0.05)
    monkeypatch.setattr(Writer, "start", slow_start)
    monkeypatch.setattr(Writer, "close", slow_close)
    asyncio.run(scenario())


class Board:
    """Stands in for `Readiness` in tests of the notifier."""

    def __init__(self) -> None:
        self.is_started = self.is_worth_it = False

    def started(self) -> bool:
        return self.is_started

    def worth_waiting_for(self) -> bool:
        return self.is_worth_it

    def headline(self) -> str:
        return "as it is"


class Watched:
    """Runs a notifier together with the writer that it monitors."""

    def __init__(self, folder: Path, heard: Heard) -> None:
        self.heard = heard
        self.board: Any = Board()
        self.writer = Writer(folder / "notes.db", NOTES, synchronous="FULL")
        environ = {"NOTIFY_SOCKET": str(heard.path), "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
        self.notifier = Notifier(Manager(environ), self.board, lambda: self.writer.stalled_s)

    async def signs(self, more: int) -> None:
        """Wait for `more` further keep-alive messages."""
        so_far = self.heard.count("WATCHDOG")
        await until(lambda: self.heard.count("WATCHDOG") >= so_far + more)


@pytest.fixture
def watched(tmp_path: Path, heard: Heard) -> Iterator[Watched]:
    made = Watched(tmp_path, heard)
    made.writer.start()
    yield made
    made.writer.close(0.1)


def test_no_keep_alive_is_sent_while_a_writer_hangs(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    def complaints() -> int:
        return sum("one database operation has taken" in record.getMessage() for record in caplog.records)

    async def scenario() -> None:
        watched.notifier.start()
        await watched.signs(3)
        hangs = threading.Event()
        before = complaints()
        done = watched.writer.call(lambda connection: hangs.wait(60))
        await until(lambda: complaints() > before)
        so_far = watched.heard.count("WATCHDOG")
        await until(lambda: complaints() > before + 3)
        assert watched.heard.count("WATCHDOG") == so_far
        hangs.set()
        assert await asyncio.wrap_future(done)
        await watched.signs(3)
        watched.notifier.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(scenario())


def test_keep_alives_continue_with_a_full_disk(watched: Watched) -> None:
    def fill(connection: sqlite3.Connection) -> None:
        connection.execute("PRAGMA max_page_count = 5").fetchone()
        connection.execute("INSERT INTO notes VALUES (zeroblob(1000000))")

    async def scenario() -> None:
        watched.notifier.start()
        watched.writer.submit(fill)
        await until(lambda: watched.writer.state().last_error is not None)
        await watched.signs(8)
        assert "full" in (watched.writer.state().last_error or "")
        watched.notifier.close()

    asyncio.run(scenario())


def test_a_start_is_extended_only_while_something_is_loading(watched: Watched) -> None:
    async def scenario() -> None:
        heard = watched.heard
        watched.notifier.start()
        await watched.signs(3)
        assert heard.count("EXTEND_TIMEOUT_USEC") == 0
        watched.board.is_worth_it = True
        await watched.signs(3)
        asked = heard.count("EXTEND_TIMEOUT_USEC")
        assert asked >= 2
        watched.board.is_started = True
        await until(lambda: heard.says(READY="1"))
        asked = heard.count("EXTEND_TIMEOUT_USEC")
        await watched.signs(3)
        assert heard.count("EXTEND_TIMEOUT_USEC") == asked
        assert heard.count("READY") == 1
        watched.notifier.close()

    asyncio.run(scenario())
