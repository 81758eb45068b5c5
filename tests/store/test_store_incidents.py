"""Tests that incident files are complete or absent, private, limited in size, and readable by later
versions."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from store.errors import SchemaVersionError, StoreError
from store.incidents import IncidentReader, IncidentTooLargeError, IncidentWriter, readable_copy
from store.requests import RequestFilter, RequestReader
from store.schemas import HISTORY
from store.telemetry import RESOLUTIONS, TelemetryLog
from store.telemetry_reader import TelemetryReader
from tests.store.test_store_telemetry import START, record, tree

MIB = 1 << 20


def copied(reader: TelemetryReader, writer: IncidentWriter) -> None:
    rows = reader.stored(RESOLUTIONS[0], START, START + 100, 100)
    writer.samples(1, rows, reader.layouts({row.layout for row in rows}))


def test_a_slice_is_read_like_a_history(history, request_row, tmp_path):
    record(TelemetryLog(history.writer), START, 10)
    history.log.end(request_row(finished_at=1_000_001.0, status=200, tenant="acme"))
    history.writer.flush()
    path = tmp_path / "incident.db"
    with IncidentWriter(path, MIB) as writer:
        copied(TelemetryReader(history.path), writer)
        writer.requests(history.reader.query(RequestFilter(), 10))
        writer.actions([(START + 1, 7, '{"seq": 7}'), (START + 3, None, "{}")])
        writer.lines([(START + 2, 5, "a line"), (START + 4, 6, "later")])
        writer.describe({"since": str(START)})
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in tmp_path.iterdir() if "partial" in entry.name] == []
    for second in (0, 9):
        found = TelemetryReader(path).snapshot(START + second)
        assert found is not None and found.sample.tree() == tree(second)
    [row], [original] = (RequestReader(one).query(RequestFilter(), 10) for one in (path, history.path))
    assert msgspec.structs.replace(row, sequence=original.sequence) == original
    incident = IncidentReader(path)
    assert incident.facts() == {"since": str(START)}
    assert IncidentReader(history.path).facts() is None
    assert incident.actions(START, START + 9, None, 10) == ["{}", '{"seq": 7}']
    assert incident.actions(START, START + 9, 8, 10) == ['{"seq": 7}']
    assert incident.lines(START + 3, 10) == ["a line"]


def test_a_slice_that_is_too_large_leaves_no_file(history, tmp_path):
    record(TelemetryLog(history.writer), START, 60)
    history.writer.flush()
    path = tmp_path / "incident.db"
    with (
        pytest.raises(IncidentTooLargeError, match="shorter time span"),
        IncidentWriter(path, 200 << 10) as writer,
    ):
        for number in range(100):
            writer.lines([(START, number, "x" * 10_000)])
    assert not [one.name for one in tmp_path.iterdir() if "incident" in one.name]


def test_an_existing_file_is_not_overwritten(tmp_path):
    path = tmp_path / "precious"
    path.write_text("kept")
    with pytest.raises(StoreError, match="already exists: choose another name"):
        IncidentWriter(path, MIB)
    assert path.read_text() == "kept"
    with pytest.raises(StoreError, match="missing"):
        IncidentWriter(tmp_path / "missing" / "incident.db", MIB)


def test_a_file_that_another_program_creates_meanwhile_is_not_overwritten(tmp_path):
    path = tmp_path / "incident.db"
    with (
        pytest.raises(StoreError, match=r"incident\.db already exists: choose another name"),
        IncidentWriter(path, MIB),
    ):
        path.write_text("kept")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("incident.db", "kept")]


def test_a_file_of_an_earlier_version_is_upgraded_in_a_copy(history, tmp_path, monkeypatch):
    record(TelemetryLog(history.writer), START, 3)
    history.writer.flush()
    older = HISTORY._replace(migrations=HISTORY.migrations[:-1])
    path = tmp_path / "incident.db"
    with monkeypatch.context() as patched:
        patched.setattr("store.incidents.HISTORY", older)
        with IncidentWriter(path, MIB) as writer:
            copied(TelemetryReader(history.path), writer)
    before = path.read_bytes()
    with pytest.raises(SchemaVersionError):
        TelemetryReader(path).span()
    folder = tmp_path / "copies"
    folder.mkdir()
    copy = readable_copy(path, folder)
    assert copy.parent == folder and path.read_bytes() == before
    assert TelemetryReader(copy).span() == (START, START + 2)
    assert readable_copy(history.path, folder) == history.path


def test_a_file_of_a_newer_version_is_refused(tmp_path):
    path: Path = tmp_path / "incident.db"
    with IncidentWriter(path, MIB):
        pass
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(f"PRAGMA user_version = {len(HISTORY.migrations) + 1}")
    with pytest.raises(SchemaVersionError, match="supports only"):
        TelemetryReader(readable_copy(path, tmp_path)).span()


def test_a_damaged_file_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "incident.db"
    with IncidentWriter(path, MIB) as writer:
        writer.describe({"source": "test"})
    with closing(sqlite3.connect(path)) as connection:
        [(page,)] = connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'incident'")
        [(size,)] = connection.execute("PRAGMA page_size")
    with path.open("rb+") as file:
        file.seek((page - 1) * size)
        file.write(b"\xff" * size)
    with pytest.raises(StoreError, match=r"incident\.db is not a valid SQLite database"):
        IncidentReader(path).facts()


def test_a_part_that_could_not_be_read_completely_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "incident.db"
    with IncidentWriter(path, MIB) as writer:
        writer.actions([(1.0, 1, "{}")])
        writer.discard_actions()
        writer.lines([(1.0, 1, "{}")])
        writer.discard_lines()
        writer.lines([(2.0, 2, "[]")])
        writer.describe({"source": "test"})
    incident = IncidentReader(path)
    assert incident.actions(0.0, 10.0, None, 10) == []
    assert incident.lines(10.0, 10) == ["[]"]
