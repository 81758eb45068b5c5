from __future__ import annotations

import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from store.database import PAGE_CACHE_BYTES, WritableDatabase, integrity_problems, open_readonly
from store.errors import (
    CorruptDatabaseError,
    DatabaseInUseError,
    MissingDatabaseError,
    SchemaVersionError,
)
from store.migrations import Migration, Schema
from store.schemas import HISTORY

ROOT = Path(__file__).resolve().parents[2]
NOTES = Schema("notes", (Migration("notes", ("CREATE TABLE notes (text TEXT)",)),))


def pragma(connection: sqlite3.Connection, name: str) -> object:
    return connection.execute(f"PRAGMA {name}").fetchone()[0]


def make_notes(path: Path, *texts: str) -> None:
    database = WritableDatabase(path, NOTES, "FULL")
    database.connection.executemany("INSERT INTO notes VALUES (?)", [(text,) for text in texts])
    database.close()


def test_a_new_database_has_the_required_pragmas(tmp_path):
    database = WritableDatabase(tmp_path / "notes.db", NOTES, "FULL")
    connection = database.connection
    found = {name: pragma(connection, name) for name in ("journal_mode", "auto_vacuum", "synchronous")}
    assert found == {"journal_mode": "wal", "auto_vacuum": 2, "synchronous": 2}
    assert pragma(connection, "foreign_keys") == 1
    assert pragma(connection, "busy_timeout") == 5000
    assert pragma(connection, "mmap_size") == 0
    assert pragma(connection, "cache_size") == -PAGE_CACHE_BYTES // 1024
    database.close()


def test_a_clean_stop_leaves_one_complete_file_that_is_not_in_wal_mode(tmp_path):
    path = tmp_path / "notes.db"
    make_notes(path, "kept")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes.db", "notes.db-lock"]
    with closing(sqlite3.connect(path)) as connection:
        assert pragma(connection, "journal_mode") == "delete"
        assert connection.execute("SELECT text FROM notes").fetchall() == [("kept",)]


def test_an_auditor_without_write_permission_opens_the_file_of_a_stopped_service_with_plain_sqlite(
    public_folder, run_unprivileged
):
    path = public_folder / "notes.db"
    make_notes(path, "kept")
    path.chmod(0o444)
    public_folder.chmod(0o555)
    source = """
assert not os.access(Path(sys.argv[1]).parent, os.W_OK, effective_ids=True)
print(sqlite3.connect(sys.argv[1]).execute("SELECT text FROM notes").fetchone()[0])
"""
    assert run_unprivileged(source, path) == "kept"


def test_an_auditor_reads_the_file_of_a_running_service(public_folder, run_unprivileged):
    path = public_folder / "notes.db"
    path.touch(0o644)
    database = WritableDatabase(path, NOTES, "FULL")
    database.connection.execute("INSERT INTO notes VALUES ('live')")
    source = """
print(store.database.open_readonly(Path(sys.argv[1])).execute("SELECT text FROM notes").fetchone()[0])
"""
    assert run_unprivileged(source, path) == "live"
    database.close()


def test_a_copy_in_wal_mode_can_be_read_where_its_shared_memory_file_cannot_be_created(
    public_folder, run_unprivileged
):
    path = public_folder / "notes.db"
    path.touch(0o644)
    database = WritableDatabase(path, NOTES, "FULL")
    database.connection.execute("INSERT INTO notes VALUES ('copied')")
    database.abandon()
    path.chmod(0o444)
    public_folder.chmod(0o555)
    source = """
try:
    sqlite3.connect(sys.argv[1]).execute("SELECT text FROM notes")
except sqlite3.OperationalError:
    print("plain fails")
print(store.database.open_readonly(Path(sys.argv[1])).execute("SELECT text FROM notes").fetchone()[0])
"""
    assert run_unprivileged(source, path).split("\n") == ["plain fails", "copied"]


def test_new_files_are_for_the_services_user_and_group_only(tmp_path):
    database = WritableDatabase(tmp_path / "notes.db", NOTES, "FULL")
    modes = {file.name: oct(file.stat().st_mode & 0o777 | 0o040) for file in tmp_path.iterdir()}
    assert modes == {f"notes.db{suffix}": "0o640" for suffix in ("", "-wal", "-shm", "-lock")}
    database.close()


def test_a_reader_cannot_write(tmp_path):
    make_notes(tmp_path / "notes.db")
    with (
        closing(open_readonly(tmp_path / "notes.db")) as connection,
        pytest.raises(sqlite3.OperationalError, match="readonly"),
    ):
        connection.execute("INSERT INTO notes VALUES ('no')")


def test_an_open_reader_does_not_prevent_the_stop_or_the_next_start(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("store.database._LEAVE_WAL_TIMEOUT_S", 0.05)
    path = tmp_path / "notes.db"
    database = WritableDatabase(path, NOTES, "FULL")
    database.connection.execute("INSERT INTO notes VALUES ('one')")
    with closing(open_readonly(path)) as reader:
        assert reader.execute("SELECT count(*) FROM notes").fetchone() == (1,)
        database.close()
        assert "stays in WAL mode" in caplog.text
        make_notes(path, "two")
        assert reader.execute("SELECT count(*) FROM notes").fetchone() == (2,)


def test_only_one_writer_is_allowed_and_the_second_one_gets_its_process_id(tmp_path):
    path = tmp_path / "notes.db"
    first = WritableDatabase(path, NOTES, "FULL")
    with pytest.raises(DatabaseInUseError, match=f"process {os.getpid()}"):
        WritableDatabase(path, NOTES, "FULL")
    first.close()
    WritableDatabase(path, NOTES, "FULL").close()


def test_the_lock_of_a_killed_writer_is_released(tmp_path):
    path = tmp_path / "notes.db"
    source = """
import os, signal, sys; from pathlib import Path; from store.database import WritableDatabase
from store.migrations import Schema
WritableDatabase(Path(sys.argv[1]), Schema("notes", ()), "FULL")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", source, path], cwd=ROOT).returncode == -9
    make_notes(path)


def test_a_file_that_is_not_a_database_is_refused_by_name_with_a_remedy(tmp_path):
    path = tmp_path / "notes.db"
    path.write_bytes(b"this is not a database" * 100)
    for attempt in (lambda: WritableDatabase(path, NOTES, "FULL"), lambda: open_readonly(path)):
        with pytest.raises(CorruptDatabaseError, match=r"notes\.db .*move the file"):
            attempt()
    assert path.read_bytes().startswith(b"this is not")


def test_a_file_of_a_newer_version_is_refused_unchanged(tmp_path):
    path = tmp_path / "notes.db"
    newer = Schema("notes", (*NOTES.migrations, Migration("more", ("CREATE TABLE more (text TEXT)",))))
    WritableDatabase(path, newer, "FULL").close()
    before = path.read_bytes()
    for attempt in (lambda: WritableDatabase(path, NOTES, "FULL"), lambda: open_readonly(path, NOTES)):
        with pytest.raises(
            SchemaVersionError,
            match="version 2, but this release of Appliance supports only schema version 1",
        ):
            attempt()
    assert path.read_bytes() == before


def test_a_reader_does_not_misread_a_file_of_an_older_version(tmp_path):
    make_notes(tmp_path / "notes.db")
    newer = Schema("notes", (*NOTES.migrations, Migration("more", ("CREATE TABLE more (text TEXT)",))))
    with pytest.raises(SchemaVersionError, match="start the service once"):
        open_readonly(tmp_path / "notes.db", newer)


def test_missing_files_and_folders_are_named(tmp_path):
    with pytest.raises(MissingDatabaseError, match=r"absent\.db does not exist"):
        open_readonly(tmp_path / "absent.db")
    with pytest.raises(MissingDatabaseError, match=r"the folder .*nowhere does not exist"):
        WritableDatabase(tmp_path / "nowhere" / "notes.db", NOTES, "FULL")


@pytest.mark.parametrize(
    ("folder_mode", "named"), [(0o555, "{folder} is not writable"), (0o777, "{file} is not writable")]
)
def test_a_file_or_folder_without_write_permission_is_named(
    public_folder, run_unprivileged, folder_mode, named
):
    path = public_folder / "notes.db"
    make_notes(path)
    path.chmod(0o444)
    public_folder.chmod(folder_mode)
    source = """
from store.migrations import Schema
try:
    store.database.WritableDatabase(Path(sys.argv[1]), Schema("notes", ()), "FULL")
except store.database.NotWritableError as error:
    print(error)
"""
    assert named.format(folder=public_folder, file=path) in run_unprivileged(source, path)


def test_migrations_run_once_in_order_and_keep_the_existing_data(tmp_path):
    path = tmp_path / "notes.db"
    make_notes(path, "old")
    newer = Schema(
        "notes", (*NOTES.migrations, Migration("author", ("ALTER TABLE notes ADD COLUMN author TEXT",)))
    )
    for _ in range(3):
        WritableDatabase(path, newer, "FULL").close()
    with closing(open_readonly(path, newer)) as connection:
        assert connection.execute("SELECT text, author FROM notes").fetchall() == [("old", None)]
        names = connection.execute("SELECT name FROM _sqlite_migrations ORDER BY id").fetchall()
        assert names == [("notes",), ("author",)]


def test_a_migration_that_fails_halfway_leaves_nothing_behind(tmp_path):
    path = tmp_path / "notes.db"
    make_notes(path, "old")
    broken = Schema("notes", (*NOTES.migrations, Migration("broken", ("CREATE TABLE half (x)", "NO SQL"))))
    with pytest.raises(Exception, match="syntax error"):
        WritableDatabase(path, broken, "FULL")
    with closing(open_readonly(path, NOTES)) as connection:
        assert connection.execute("SELECT name FROM sqlite_master WHERE name = 'half'").fetchall() == []


def test_the_integrity_check_detects_a_damaged_page(tmp_path):
    path = tmp_path / "history.db"
    WritableDatabase(path, HISTORY, "NORMAL").close()
    assert integrity_problems(path) == []
    damaged = tmp_path / "damaged.db"
    shutil.copy(path, damaged)
    with closing(sqlite3.connect(path)) as connection:
        (page,) = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'requests'").fetchone()
    with damaged.open("r+b") as file:
        file.seek((page - 1) * 4096)
        file.write(b"\xff" * 4096)
    assert integrity_problems(damaged)


def test_reading_or_opening_an_up_to_date_file_imports_no_large_modules(tmp_path):
    WritableDatabase(tmp_path / "history.db", HISTORY, "NORMAL").close()
    source = """
import sys; from pathlib import Path
import store.requests, store.control
store.requests.RequestReader(Path(sys.argv[1])).changes(0)
store.database.WritableDatabase(Path(sys.argv[1]), store.schemas.HISTORY, "NORMAL").close()
heavy = {"sqlite_utils", "torch", "numpy", "starlette", "click"} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", source, tmp_path / "history.db"], cwd=ROOT, check=True)
