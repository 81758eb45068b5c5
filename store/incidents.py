"""Incident files: a slice of the recorded history in one SQLite file that can be read on any machine, without
the service. An incident file contains the slice's rows in the same tables as `history.db`, so code that reads
`history.db` can read it too. Additional tables hold data from other files: operators' actions and log lines,
as JSON documents in a format known only to the caller.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from types import TracebackType
from typing import Any

from store.alerts import SAVE_ALERT, AlertRow
from store.database import open_readonly, sync
from store.errors import MissingDatabaseError, StoreError, explain, explain_os
from store.migrations import migrate, schema_version
from store.requests import INSERT_LOGGED, LoggedRequest
from store.schemas import HISTORY
from store.telemetry import DETAILS, RESOLUTIONS

_TABLES = """
CREATE TABLE incident (name TEXT PRIMARY KEY NOT NULL, value TEXT NOT NULL);
CREATE TABLE incident_actions (at REAL NOT NULL, seq INTEGER, document TEXT NOT NULL);
CREATE TABLE incident_lines (at REAL NOT NULL, number INTEGER NOT NULL, document TEXT NOT NULL);
CREATE INDEX incident_actions_at ON incident_actions (at);
CREATE INDEX incident_lines_at ON incident_lines (at);
"""
_MODE = 0o600


class IncidentTooLargeError(StoreError):
    """Raised if the slice of history is too large for an incident file. The message gives the remedy."""


class IncidentWriter:
    """Writes an incident file. Use as a context manager: the file gets its final name only if the block
    succeeds. Raises `StoreError` on failure."""

    def __init__(self, path: Path, limit_bytes: int) -> None:
        """Raises `StoreError` if `path` exists or cannot be written. The file may grow to at most
        `limit_bytes`."""
        self.path = path
        self._limit_bytes = limit_bytes
        self._partial = path.with_name(f".{path.name}.partial")
        self._layouts: dict[bytes, int] = {}
        self._sequence = 0
        if os.path.lexists(path):
            raise self._existing()
        try:
            self._partial.unlink(missing_ok=True)
            os.close(os.open(self._partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, _MODE))
        except OSError as error:
            raise explain_os(path, error) from error
        self._connection = sqlite3.connect(self._partial, isolation_level=None, check_same_thread=False)
        try:
            # An incomplete file is never kept, so the database needs no journal.
            self._connection.execute("PRAGMA journal_mode=OFF").fetchone()
            self._connection.execute("PRAGMA synchronous=OFF")
            migrate(self._connection, path, HISTORY)
            self._connection.executescript(_TABLES)
        except BaseException as error:
            self._abandon()
            if isinstance(error, sqlite3.Error):
                raise explain(path, error) from error
            raise

    def __enter__(self) -> IncidentWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the file its final name, or remove the file after an error."""
        if error is not None:
            self._abandon()
            if isinstance(error, sqlite3.Error):
                raise explain(self.path, error) from error
            return
        try:
            self._connection.close()
            sync(self._partial)
            self._finish()
        except FileExistsError as failure:
            self._partial.unlink(missing_ok=True)
            raise self._existing() from failure
        except OSError as failure:
            self._partial.unlink(missing_ok=True)
            raise explain_os(self.path, failure) from failure

    def _finish(self) -> None:
        """Give the file its final name. Raises FileExistsError if another program has created a file with
        this name in the meantime."""
        try:
            os.link(self._partial, self.path)
        except FileExistsError:
            raise
        except OSError:  # The file system does not support hard links.
            self._partial.rename(self.path)
        else:
            self._partial.unlink()

    def _existing(self) -> StoreError:
        return StoreError(f"{self.path} already exists", "choose another name, or remove the file")

    def describe(self, facts: Mapping[str, str]) -> None:
        """Add named properties of the recorded slice of history."""
        self._insert("INSERT INTO incident (name, value) VALUES (?, ?)", list(facts.items()))

    def samples(
        self, resolution_s: int, rows: Iterable[tuple[int, int, int, bytes]], layouts: Mapping[int, bytes]
    ) -> None:
        """Add telemetry rows. Each is a tuple: time in milliseconds, layout id, number of samples, and packed
        numbers. `layouts` maps layout ids to layout documents."""
        table = next(one.table for one in RESOLUTIONS if one.seconds == resolution_s)
        ids = {one: self._layout(document) for one, document in layouts.items()}
        self._insert(
            f"INSERT OR IGNORE INTO {table} (at, layout, samples, numbers) VALUES (?, ?, ?, ?)",
            [(at, ids[layout], samples, numbers) for at, layout, samples, numbers in rows],
        )

    def details(self, rows: Iterable[tuple[int, bool, bytes]]) -> None:
        """Add detail rows. Each is a tuple: time in milliseconds, whether the document is a full frame, and
        the document."""
        self._insert(f"INSERT OR IGNORE INTO {DETAILS} (at, whole, document) VALUES (?, ?, ?)", list(rows))

    def requests(self, rows: Iterable[LoggedRequest]) -> None:
        """Add rows of the request log."""
        values = []
        for row in rows:
            self._sequence += 1
            values.append(row.stored(self._sequence))
        self._insert(INSERT_LOGGED, values)

    def alerts(self, rows: Iterable[AlertRow]) -> None:
        """Add alerts."""
        self._insert(SAVE_ALERT, [row.stored() for row in rows])

    def actions(self, rows: Iterable[tuple[float, int | None, str]]) -> None:
        """Add operators' actions. Each action is a tuple: time in unix seconds, seq, and document."""
        self._insert("INSERT INTO incident_actions (at, seq, document) VALUES (?, ?, ?)", list(rows))

    def lines(self, rows: Iterable[tuple[float, int, str]]) -> None:
        """Add log lines. Each line is a tuple: time in unix seconds, line number, and document."""
        self._insert("INSERT INTO incident_lines (at, number, document) VALUES (?, ?, ?)", list(rows))

    def discard_actions(self) -> None:
        """Remove the actions added so far."""
        self._connection.execute("DELETE FROM incident_actions")

    def discard_lines(self) -> None:
        """Remove the log lines added so far."""
        self._connection.execute("DELETE FROM incident_lines")

    @property
    def size(self) -> int:
        """Current size of the file, in bytes."""
        pages, page = (
            int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])
            for name in ("page_count", "page_size")
        )
        return pages * page

    def _layout(self, document: bytes) -> int:
        known = self._layouts.get(document)
        if known is None:
            known = self._layouts[document] = len(self._layouts) + 1
            self._insert(
                "INSERT INTO telemetry_layouts (id, sha256, document) VALUES (?, ?, ?)",
                [(known, hashlib.sha256(document).digest(), zlib.compress(document, 6))],
            )
        return known

    def _insert(self, sql: str, rows: list[tuple[object, ...]]) -> None:
        self._connection.execute("BEGIN")
        self._connection.executemany(sql, rows)
        self._connection.execute("COMMIT")
        if self.size > self._limit_bytes:
            raise IncidentTooLargeError(
                f"the slice needs more than {self._limit_bytes >> 20} MiB: select a shorter time span"
            )

    def _abandon(self) -> None:
        self._connection.close()
        self._partial.unlink(missing_ok=True)


class IncidentReader:
    """Reads the tables that only incident files have. Raises `StoreError` if they cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def facts(self) -> dict[str, str] | None:
        """Return the slice's properties by name, or None if the file is not an incident file."""
        if not self._rows("SELECT 1 FROM sqlite_master WHERE name = 'incident'", ()):
            return None
        return dict(self._rows("SELECT name, value FROM incident", ()))

    def actions(self, since: float, until: float, before: int | None, limit: int) -> list[str]:
        """Return the documents of the newest `limit` actions between two times, newest first. If `before` is
        given, return only actions with a lower seq."""
        rows = self._rows(
            "SELECT document FROM incident_actions WHERE at >= ? AND at <= ? AND (? IS NULL OR seq < ?) "
            "ORDER BY at DESC, seq DESC LIMIT ?",
            (since, until, before, before, limit),
        )
        return [str(document) for (document,) in rows]

    def lines(self, until: float, limit: int) -> list[str]:
        """Return the documents of the newest `limit` log lines up to a given time, oldest first."""
        rows = self._rows(
            "SELECT document FROM incident_lines WHERE at <= ? ORDER BY number DESC LIMIT ?", (until, limit)
        )
        return [str(document) for (document,) in reversed(rows)]

    def _rows(self, sql: str, values: tuple[object, ...]) -> list[tuple[Any, ...]]:
        with closing(open_readonly(self.path)) as connection:
            try:
                return connection.execute(sql, values).fetchall()
            except sqlite3.Error as error:
                raise explain(self.path, error) from error


def readable_copy(path: Path, folder: Path) -> Path:
    """Return the path of a file that readers of `history.db` can read: `path` itself or, if an earlier
    version of the product wrote it, an upgraded copy in `folder`. Raises `StoreError` on failure."""
    if not path.is_file():
        raise MissingDatabaseError(
            f"{path} is not a file: give the path of history.db or of an incident file"
        )
    with closing(open_readonly(path)) as connection:
        try:
            tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
        except sqlite3.Error as error:
            raise explain(path, error) from error
        if "telemetry_1s" not in tables and "requests" not in tables:
            raise StoreError(
                f"{path} contains no recorded history: open a service's history.db, or a file written by "
                "appliance history export"
            )
        if schema_version(connection) >= len(HISTORY.migrations):
            return path  # Readers refuse a file written by a newer version.
        copy = folder / path.name
        with closing(sqlite3.connect(copy, isolation_level=None)) as target:
            try:
                connection.backup(target)
                migrate(target, copy, HISTORY)
            except sqlite3.Error as error:
                raise explain(path, error) from error
    return copy
