"""Tests, under load, of databases that are deleted, locked or damaged, and of disks that are full or
read-only. None of these faults may make a request fail or lose a row. `status` and `doctor` must report the
cause."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from msgspec.structs import replace

from store.control import ControlStore
from store.requests import RequestLog, RequestRow
from store.schemas import CONTENTS, HISTORY
from store.writer import Writer
from tests.system.attacks.reading import doctor, no_problem, problem
from tests.system.service import APPLIANCE, Forked, Service
from tests.system.test_deaths import answer
from tests.system.traffic import Load, ended

pytestmark = pytest.mark.system

PAGE_BYTES = 4096


@pytest.fixture(scope="module")
def disk() -> Iterator[Path]:
    """Yield a small, separate disk for the state directory. The disk is an ext4 image next to its mount
    point."""
    folder = Path(tempfile.mkdtemp(prefix="appl-"))
    mounted, image = folder / "state", folder / "image"
    mounted.mkdir()
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, mounted]).returncode:
        pytest.skip("needs the right to mount a file system")
    yield mounted
    subprocess.run(["umount", "--lazy", mounted], check=True)
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def stopped(disk: Path) -> Iterator[Service]:
    """Yield a service that is not running. Its databases already exist."""
    service = Forked(disk.parent)
    assert service.state_dir == disk
    for database in (
        ControlStore(disk / "control.db"),
        Writer(disk / "history.db", HISTORY, synchronous="NORMAL"),
        Writer(disk / "contents.db", CONTENTS, synchronous="NORMAL"),
    ):
        database.start()
        database.close()
    yield service


@pytest.fixture(scope="module")
def running(stopped: Service) -> Iterator[Service]:
    """Start the stopped service."""
    stopped.start()
    try:
        no_problem(stopped)
        yield stopped
    finally:
        stopped.process.kill()
        stopped.process.wait()


@contextmanager
def load(running: Service, *, logged: bool = True) -> Iterator[None]:
    """Send requests while the `with` block runs. Each request must be answered and, if `logged` is true, must
    have a row in the log afterwards."""
    clients = [Load(running) for _ in range(2)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        for client in clients:
            client.end()
    asked = {request_id for client in clients for request_id in client.request_ids}
    assert asked
    if not logged:
        return
    running.wait_until(lambda: asked <= ended(running), 60, "the rows of all requests")
    with closing(sqlite3.connect(f"file:{running.state_dir}/history.db?mode=ro", uri=True)) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_a_damaged_control_database_is_refused_at_the_start_with_a_remedy(stopped: Service) -> None:
    before = damage(stopped.state_dir / "control.db")
    command = [APPLIANCE, "serve", "--run-dir", str(stopped.run_dir), "--state-dir", str(stopped.state_dir)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert refused.returncode == 1 and "Traceback" not in refused.stderr
    assert "control.db is not a valid SQLite database" in refused.stderr
    assert "restore a backup" in refused.stderr
    assert any("control.db" in text and "restore a backup" in text for text in doctor(stopped))
    (stopped.state_dir / "control.db").write_bytes(before)


def test_with_damaged_logs_the_service_starts_and_serves_and_reports_the_damage(stopped: Service) -> None:
    names = ("history.db", "contents.db")
    before = {name: damage(stopped.state_dir / name) for name in names}
    stopped.start()
    try:
        assert answer(stopped)
        problem(stopped, "history.db", "not a valid SQLite database")
        for name in names:
            stopped.wait_until(
                lambda name=name: any(
                    name in text and "restore a backup" in text for text in doctor(stopped)
                ),
                60,
                f"the finding about {name}",
            )
    finally:
        stopped.stop()
    for name in names:
        (stopped.state_dir / name).write_bytes(before[name])


def test_a_log_that_is_damaged_while_the_service_runs_stops_no_request_and_is_reported(
    stopped: Service,
) -> None:
    path = stopped.state_dir / "history.db"
    before = path.read_bytes()
    fill(path)
    stopped.start()
    try:
        no_problem(stopped)
        with path.open("r+b") as file:
            file.seek(PAGE_BYTES)
            file.write(b"\xa5" * (path.stat().st_size - PAGE_BYTES))
        with load(stopped, logged=False):
            problem(stopped, "history.db", "not a valid SQLite database")
            assert any("history.db" in text and "restore a backup" in text for text in doctor(stopped))
        assert answer(stopped)
    finally:
        stopped.stop()
    for suffix in ("-wal", "-shm"):
        path.with_name(path.name + suffix).unlink(missing_ok=True)
    path.write_bytes(before)


def test_a_full_disk_stops_no_request_and_costs_no_row(running: Service, disk: Path) -> None:
    ballast = disk / "ballast"
    with load(running):
        with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
            while True:
                file.write(bytes(4096))
        problem(running, "history.db", "full")
        assert any("history.db" in text and "full" in text for text in doctor(running))
        assert answer(running)
        ballast.unlink()
        no_problem(running)


def test_deleted_databases_are_written_back(running: Service) -> None:
    key = running.command("keys", "create", "--name", "kept")
    with load(running):
        for name in ("history.db", "control.db", "contents.db"):
            (running.state_dir / name).unlink()
        for name in ("history.db", "control.db", "contents.db"):
            running.wait_until((running.state_dir / name).exists, 60, f"{name} to be written back")
        notes = running.wait_until(
            lambda: (
                all(database["restored"] for database in running.status()["databases"])
                and [database["restored"] for database in running.status()["databases"]]
            ),
            60,
            "the status to report the problem",
        )
        assert all("was deleted while the service was running" in note for note in notes)
    found = doctor(running, "warning")
    assert all(any(note in text for text in found) for note in notes), found
    assert key["id"] in {one["id"] for one in running.command("keys", "list")}
    running.command("audit", "verify")


def test_a_locked_request_log_stops_no_request_and_costs_no_row(running: Service) -> None:
    with load(running):
        with closing(
            sqlite3.connect(running.state_dir / "history.db", isolation_level=None, timeout=600)
        ) as intruder:
            intruder.execute("BEGIN IMMEDIATE")
            problem(running, "history.db", "locked")
            assert any("history.db" in text and "locked" in text for text in doctor(running))
            assert answer(running)
            intruder.execute("ROLLBACK")
        no_problem(running)


def test_a_change_that_failed_because_of_a_lock_is_not_made_later(running: Service) -> None:
    with closing(
        sqlite3.connect(running.state_dir / "control.db", isolation_level=None, timeout=600)
    ) as intruder:
        intruder.execute("BEGIN IMMEDIATE")
        words = ("keys", "create", "--name", "late", "--run-dir", str(running.run_dir))
        command = subprocess.Popen([APPLIANCE, *words], stderr=subprocess.PIPE, text=True)
        assert answer(running), "requests need no write to control.db"
        _, errors = command.communicate(timeout=600)
        assert command.returncode == 1 and "control.db" in errors
        assert problem(running, "audit", "")
        assert any("control.db" in text for text in doctor(running))
        intruder.execute("ROLLBACK")
    no_problem(running)
    assert "late" not in {one["name"] for one in running.command("keys", "list")}
    running.command("keys", "create", "--name", "in-time")


def test_a_disk_that_becomes_read_only_stops_no_request(running: Service, disk: Path) -> None:
    # ext4 becomes read-only after a disk error. Nothing can be written then, not even through files that are
    # already open.
    with load(running, logged=False):
        subprocess.run(["mount", "-o", "remount,abort", disk], check=True)
        problem(running, "history.db", "writes have failed for")
        assert any("history.db" in text for text in doctor(running))
        assert answer(running)
    assert running.status()["databases"][1]["dropped_rows"] == 0


def fill(path: Path) -> None:
    """Add so many requests to the log that its pages do not fit into the service's page cache."""
    writer = Writer(path, HISTORY, synchronous="NORMAL")
    writer.start()
    log = RequestLog(writer)
    for _ in range(10_000):
        row = RequestRow(request_id=f"req-{uuid4()}", created_at=time.time(), endpoint="/v1/completions")
        log.end(replace(row, finished_at=time.time(), status=200))
    writer.close()


def damage(path: Path) -> bytes:
    """Overwrite the first page of every table and index, as a failing disk might. Returns the original
    content."""
    before = path.read_bytes()
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as connection:
        pages = [
            page for (page,) in connection.execute("SELECT rootpage FROM sqlite_master WHERE rootpage > 1")
        ]
    assert len(pages) > 4
    with path.open("r+b") as file:
        for page in pages:
            file.seek((page - 1) * PAGE_BYTES)
            file.write(b"\xa5" * PAGE_BYTES)
    return before
