"""Tests that no row is lost if a database is deleted or replaced while it is open."""

from __future__ import annotations

import errno
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from store import database
from store.control import ControlStore
from store.errors import StorageFaultError
from store.migrations import Migration, Schema
from store.writer import Writer

NOTES = Schema("notes", (Migration("notes", ("CREATE TABLE notes (number INTEGER PRIMARY KEY)",)),))


@pytest.fixture
def writer(tmp_path: Path):
    opened = Writer(tmp_path / "state" / "notes.db", NOTES, synchronous="NORMAL")
    opened.path.parent.mkdir()
    opened.start()
    for number in range(100):
        opened.submit(insert(number))
    assert opened.flush(60)
    yield opened
    opened.close()


def insert(number: int):
    return lambda connection: connection.execute("INSERT INTO notes VALUES (?)", (number,))


def numbers(path: Path) -> list[int]:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        return [row[0] for row in connection.execute("SELECT number FROM notes ORDER BY number")]


@pytest.mark.parametrize("suffixes", [("",), ("-wal",), ("", "-wal", "-shm")])
def test_deleted_files_are_written_back(writer, suffixes, eventually):
    for suffix in suffixes:
        Path(f"{writer.path}{suffix}").unlink()
    writer.submit(insert(100))
    assert writer.flush(60)
    assert numbers(writer.path) == list(range(101))
    eventually(lambda: "was deleted while the service was running" in writer.state().restored)
    assert (writer.state().dropped_rows, writer.state().last_error) == (0, None)


def test_a_restored_file_that_cannot_be_opened_at_once_is_opened_later(writer, monkeypatch, eventually):
    open_writer, failures = database._open_writer, [StorageFaultError("the disk is full")]

    def opened(*arguments):
        if failures:
            raise failures.pop()
        return open_writer(*arguments)

    monkeypatch.setattr(database, "_open_writer", opened)
    writer.path.unlink()
    writer.submit(insert(100))
    assert writer.flush(60)
    assert not failures and numbers(writer.path) == list(range(101))
    assert [one.name for one in writer.path.parent.glob("*restored*")] == []


def test_a_partial_restored_file_is_removed_if_the_disk_is_full(writer):
    def fail() -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    writer.close()
    opened = database.WritableDatabase(writer.path, NOTES, "NORMAL")
    writer.path.unlink()
    with pytest.raises(StorageFaultError):
        opened.write_back(fail)
    assert list(writer.path.parent.glob("*restored*")) == []
    opened.write_back(lambda: None)
    opened.abandon()
    assert numbers(writer.path) == list(range(100))


def test_an_idle_writer_notices_a_deleted_file_too(writer, eventually):
    writer.path.unlink()
    eventually(writer.path.exists)
    assert numbers(writer.path) == list(range(100))


def test_a_foreign_file_at_the_path_is_moved_aside(writer, tmp_path):
    other = tmp_path / "other.db"
    with closing(sqlite3.connect(other)) as connection, connection:
        connection.execute("CREATE TABLE notes (number INTEGER PRIMARY KEY)")
        connection.execute("INSERT INTO notes VALUES (7777)")
    other.rename(writer.path)
    writer.submit(insert(100))
    assert writer.flush(60)
    assert numbers(writer.path) == list(range(101))
    (aside,) = writer.path.parent.glob("notes.db.replaced-*")
    assert str(aside) in writer.state().restored
    assert numbers(aside) == [7777]


def test_rows_wait_while_the_folder_is_missing(writer, eventually):
    shutil.rmtree(writer.path.parent)
    for number in range(100, 200):
        writer.submit(insert(number))
    eventually(lambda: "no longer exists: create it" in (writer.state().last_error or ""))
    writer.path.parent.mkdir()
    assert writer.flush(60)
    assert numbers(writer.path) == list(range(200))
    assert writer.state().last_error is None


def test_a_file_deleted_just_before_the_stop_is_restored(writer):
    writer.path.unlink()
    writer.close()
    assert numbers(writer.path) == list(range(100))


def test_the_control_database_keeps_its_keys_and_its_chain(tmp_path, eventually):
    control = ControlStore(tmp_path / "control.db")
    control.start()
    first = control.create_key(actor="uid:0", name="first", tenant="default").result(60)
    (tmp_path / "control.db").unlink()
    second = control.create_key(actor="uid:0", name="second", tenant="default").result(60)
    control.close()
    again = ControlStore(tmp_path / "control.db")
    again.start()
    assert again.lookup(first.key) and again.lookup(second.key)
    assert again.trail.state().last_error is None
    again.close()
