from __future__ import annotations

import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from store.errors import (
    CorruptDatabaseError,
    DatabaseInUseError,
    StorageFaultError,
    UnknownKeyError,
    WriterClosedError,
)
from store.migrations import Migration, Schema
from store.writer import COMMIT_INTERVAL_S, Writer

NOTES = Schema(
    "notes", (Migration("notes", ("CREATE TABLE notes (number INTEGER PRIMARY KEY, text TEXT)",)),)
)


@pytest.fixture
def writer(tmp_path):
    opened = Writer(tmp_path / "notes.db", NOTES, synchronous="NORMAL")
    opened.start()
    yield opened
    opened.close(timeout_s=0.2)


def insert(number: int, text: str = ""):
    return lambda connection: connection.execute("INSERT INTO notes VALUES (?, ?)", (number, text))


def numbers(path: Path) -> list[int]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        return [row[0] for row in connection.execute("SELECT number FROM notes ORDER BY number")]


def limit_pages(writer: Writer, pages: int) -> None:
    writer.call(lambda connection: connection.execute(f"PRAGMA max_page_count = {pages}").fetchone()).result(
        60
    )


def test_a_row_is_committed_within_the_interval_without_a_flush(writer, eventually):
    writer.submit(insert(1))
    eventually(lambda: numbers(writer.path) == [1])
    assert COMMIT_INTERVAL_S == 0.2  # As documented, a crash loses at most the writes of this many seconds.


def test_rows_share_commits(writer):
    statements: list[str] = []
    writer.call(lambda connection: connection.set_trace_callback(statements.append)).result(60)
    for number in range(20_000):
        assert writer.submit(insert(number))
    assert writer.flush(60)
    assert numbers(writer.path) == list(range(20_000))
    # The writer commits once every 500 operations. It also makes a few time-based commits while this thread
    # is paused.
    assert 40 <= statements.count("COMMIT") <= 400
    assert writer.state().committed_rows == 20_001  # The call above counts as one row.


def test_submit_returns_at_once_while_another_process_locks_the_database(writer, eventually):
    with closing(sqlite3.connect(writer.path, isolation_level=None)) as intruder:
        intruder.execute("BEGIN IMMEDIATE")
        for number in range(1000):
            writer.submit(insert(number))
        time.sleep(0.3)
        state = writer.state()
        assert (state.lag_rows, state.committed_rows) == (1000, 0)
        assert state.lag_ms >= 250
        intruder.execute("ROLLBACK")
    eventually(lambda: writer.state().lag_rows == 0)
    assert len(numbers(writer.path)) == 1000


def test_a_full_database_keeps_the_rows_and_recovers_by_itself(writer, eventually, caplog):
    allowed_pages = [20]

    # This is the oldest waiting operation, so the writer runs it in every attempt. It sets the page limit,
    # which the test raises while the writer retries. Until then, the operation's own row does not fit, even
    # if the writer commits no other row with it.
    def first(connection: sqlite3.Connection) -> None:
        connection.execute(f"PRAGMA max_page_count = {allowed_pages[0]}").fetchone()
        insert(0, "x" * 100_000)(connection)

    assert writer.submit(first)
    for number in range(1, 300):
        assert writer.submit(insert(number, "x" * 1000))
    eventually(lambda: writer.state().last_error is not None)
    state = writer.state()
    assert "full" in (state.last_error or "")
    assert (state.lag_rows, state.dropped_rows, state.committed_rows) == (300, 0, 0)
    assert state.failing_s > 0
    assert not writer.flush(0.05)
    assert numbers(writer.path) == []

    allowed_pages[0] = 100_000
    eventually(lambda: writer.state().lag_rows == 0)
    assert numbers(writer.path) == list(range(300))
    assert (writer.state().last_error, writer.state().failing_s) == (None, 0.0)
    eventually(lambda: "can be written again" in caplog.text)


def test_a_call_on_a_full_database_fails_with_a_reason_and_the_next_one_works(writer):
    limit_pages(writer, 5)
    with pytest.raises(
        StorageFaultError, match=r"notes\.db cannot be written at the moment .*full.*: check the free space"
    ):
        writer.call(insert(1, "x" * 100_000)).result(60)
    limit_pages(writer, 100_000)
    writer.call(insert(2, "x" * 100_000)).result(60)
    assert numbers(writer.path) == [2]


def test_a_full_disk_keeps_the_rows_and_recovers_by_itself(tiny_disk, eventually):
    writer = Writer(tiny_disk / "notes.db", NOTES, synchronous="FULL")
    writer.start()
    ballast = tiny_disk / "ballast"
    fill(ballast)
    for number in range(300):
        assert writer.submit(insert(number, "x" * 1000))
    eventually(lambda: writer.state().last_error is not None)
    assert writer.state().lag_rows > 0
    ballast.unlink()
    assert writer.flush(60)
    assert numbers(writer.path) == list(range(300))
    writer.close()
    assert writer.state().dropped_rows == 0


def test_a_start_on_a_full_disk_spools_until_there_is_space(tiny_disk):
    ballast = tiny_disk / "ballast"
    fill(ballast)
    writer = Writer(tiny_disk / "notes.db", NOTES, synchronous="FULL")
    writer.start()
    assert "notes.db" in (writer.state().last_error or "")
    assert writer.submit(insert(1))
    with pytest.raises(StorageFaultError):
        other = Writer(tiny_disk / "other.db", NOTES, synchronous="FULL")
        other.start()
        try:
            other.call(insert(1)).result(60)
        finally:
            other.close(0.1)
    ballast.unlink()
    assert writer.flush(60)
    assert numbers(writer.path) == [1]
    writer.close()


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 1024)
        except OSError:
            pass


def test_a_full_spool_drops_the_newest_rows_and_counts_and_reports_them(tmp_path, caplog):
    writer = Writer(tmp_path / "notes.db", NOTES, synchronous="NORMAL", spool_rows=10)
    writer.start()
    limit_pages(writer, 1)
    accepted = [writer.submit(insert(number, "x" * 100_000)) for number in range(15)]
    assert accepted == [True] * 10 + [False] * 5
    assert writer.state().dropped_rows == 5
    assert "a row was dropped" in caplog.text
    writer.close(timeout_s=0.2)
    assert writer.state().dropped_rows == 15
    assert "10 rows dropped" in caplog.text


def test_one_row_that_cannot_be_written_does_not_block_the_others(writer, caplog):
    for number in (1, 2, 2, 3):
        writer.submit(insert(number))
    writer.submit(lambda connection: connection.execute("INSERT INTO nowhere VALUES (1)"))
    writer.submit(lambda connection: 1 / 0)
    writer.submit(insert(4))
    assert writer.flush()
    assert numbers(writer.path) == [1, 2, 3, 4]
    assert writer.state().rejected_rows == 3
    assert (writer.state().last_error, writer.state().lag_rows) == (None, 0)
    assert "nowhere" in caplog.text


def test_a_failing_disk_loses_the_connection_but_no_row(writer, eventually, caplog):
    connections: list[sqlite3.Connection] = []
    seen = threading.Event()

    def fails_until_seen(connection: sqlite3.Connection) -> None:
        connections.append(connection)
        if len(connections) <= 2 or not seen.is_set():
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_WRITE
            raise error

    writer.submit(insert(1))
    writer.submit(fails_until_seen)
    writer.submit(insert(2))
    # The second retry begins at the earliest 0.2 s + 0.4 s after the first failure.
    eventually(lambda: len(connections) >= 3 and writer.state().last_error is not None)
    assert writer.state().failing_s >= 0.6
    assert caplog.text.count("disk I/O error") == 1 and "can be written again" not in caplog.text
    seen.set()
    assert writer.flush(60)
    assert numbers(writer.path) == [1, 2]
    eventually(lambda: caplog.text.count("can be written again") == 1)
    assert len(set(map(id, connections))) == len(connections) >= 3
    assert writer.state().last_error is None


def test_an_after_commit_callback_that_raises_does_not_undo_or_repeat_the_commit(writer, caplog):
    with pytest.raises(ZeroDivisionError):
        writer.call(insert(1), after_commit=lambda result: 1 / 0).result(60)
    writer.call(insert(2)).result(60)
    assert numbers(writer.path) == [1, 2]
    assert "the callback for a committed change failed" in caplog.text


def test_a_call_that_raises_is_rolled_back_and_the_writer_continues(writer):
    def half(connection):
        insert(1)(connection)
        raise UnknownKeyError("no")

    with pytest.raises(UnknownKeyError):
        writer.call(half).result(60)
    writer.call(insert(2)).result(60)
    assert numbers(writer.path) == [2]


def test_a_call_is_on_disk_and_its_callback_has_run_when_its_future_resolves(writer):
    seen: list[object] = []
    future = writer.call(
        lambda connection: insert(1)(connection).rowcount,
        after_commit=lambda result: seen.append((result, numbers(writer.path))),
    )
    assert future.result(60) == 1
    assert seen == [(1, [1])]


def test_calls_and_rows_keep_their_order(writer):
    order: list[int] = []
    for number in range(10):
        writer.submit(lambda connection, number=number: order.append(number))
        if number % 3 == 0:
            writer.call(lambda connection, number=number: order.append(100 + number))
    assert writer.flush()
    assert order == [0, 100, 1, 2, 3, 103, 4, 5, 6, 106, 7, 8, 9, 109]


def test_close_writes_the_waiting_rows_and_refuses_later_ones(writer):
    for number in range(100):
        writer.submit(insert(number))
    writer.close()
    assert len(numbers(writer.path)) == 100
    assert not writer.submit(insert(200))
    with pytest.raises(WriterClosedError, match="closed"):
        writer.call(insert(201)).result(1)
    assert not writer.flush(1)
    writer.close()


def test_close_writes_all_rows_if_the_writer_is_slow_but_the_disk_accepts_them(tmp_path, monkeypatch):
    monkeypatch.setattr("store.writer._BATCH_ROWS", 1)
    writer = Writer(tmp_path / "notes.db", NOTES, synchronous="NORMAL")
    writer.start()

    def slow(number: int):
        return lambda connection: (time.sleep(0.3), insert(number)(connection))

    for number in range(4):
        assert writer.submit(slow(number))
    writer.close(timeout_s=0.01)
    assert numbers(writer.path) == [0, 1, 2, 3]
    assert writer.state().dropped_rows == 0


def test_rows_from_many_threads_all_arrive(writer):
    def submit(first: int) -> None:
        for number in range(first, first + 500):
            assert writer.submit(insert(number))

    threads = [threading.Thread(target=submit, args=(first,)) for first in range(0, 4000, 500)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.flush()
    assert numbers(writer.path) == list(range(4000))


def test_a_problem_that_only_an_operator_can_fix_prevents_the_start(writer, tmp_path):
    with pytest.raises(DatabaseInUseError):
        Writer(writer.path, NOTES, synchronous="NORMAL").start()
    (tmp_path / "broken.db").write_bytes(b"nothing of use" * 500)
    broken = Writer(tmp_path / "broken.db", NOTES, synchronous="NORMAL")
    with pytest.raises(CorruptDatabaseError):
        broken.start()
    assert not broken.flush(1)
    broken.close()


def test_rows_committed_by_time_survive_kill_9(tmp_path, eventually):
    source = """
import sys, time; from pathlib import Path
from store.migrations import Migration, Schema
from store.writer import Writer
table = "CREATE TABLE notes (number INTEGER PRIMARY KEY, text TEXT)"
schema = Schema("notes", (Migration("notes", (table,)),))
writer = Writer(Path(sys.argv[1]), schema, synchronous="NORMAL"); writer.start()
print("started", flush=True)
for number in range(10**9):
    writer.submit(lambda c, n=number: c.execute("INSERT INTO notes VALUES (?, ?)", (n, "x" * 300)))
    time.sleep(0.001)
"""
    root = Path(__file__).resolve().parents[2]
    path = tmp_path / "notes.db"
    process = subprocess.Popen(
        [sys.executable, "-c", source, path], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "started\n"
    eventually(lambda: len(numbers(path)) > 500)
    seen = numbers(path)
    process.kill()
    process.communicate()
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    found = numbers(path)
    assert len(found) >= len(seen) and found == list(range(len(found)))


def test_a_call_that_does_not_begin_in_time_never_runs(writer):
    with closing(sqlite3.connect(writer.path, isolation_level=None)) as intruder:
        intruder.execute("BEGIN IMMEDIATE")
        # The first call waits for the lock until its attempt times out.
        first = writer.call(insert(1), within_s=60)
        second = writer.call(insert(2), within_s=0.1)
        with pytest.raises(StorageFaultError, match="locked"):
            first.result(60)
        with pytest.raises(StorageFaultError, match=r"could not be written for .* the change was not made"):
            second.result(60)
        intruder.execute("ROLLBACK")
    writer.call(insert(3), within_s=60).result(60)
    assert numbers(writer.path) == [3]
