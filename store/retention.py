"""Removes rows of the request log, telemetry and stored contents when their retention period ends, and
returns free pages to the file system. Rows are removed in small batches, so that other operations never wait
long. Functions that take a connection are meant to be submitted to the database's writer.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple

from store.telemetry import DETAILS, RESOLUTIONS
from store.writer import Writer

BATCH_ROWS = 100
BATCH_BYTES = 256 << 10
BATCH_PAGES = 32
KEPT_FREE = 0.1
"""Maximum fraction of a database file's pages that may stay free."""


# The recursive query needs one index lookup per tenant, whereas DISTINCT would read the whole index.
_TENANTS = """
WITH RECURSIVE found (name) AS (
    SELECT min(tenant) FROM contents
    UNION ALL SELECT (SELECT min(tenant) FROM contents WHERE tenant > name) FROM found WHERE name IS NOT NULL
)
SELECT name FROM found WHERE name IS NOT NULL
"""


class Removed(NamedTuple):
    """The result of removing one batch."""

    rows: int
    pages: int
    """Number of pages returned to the file system."""
    more: bool
    """Whether more rows or pages may remain to be removed."""


def remove_requests(connection: sqlite3.Connection, before: float) -> Removed:
    """Remove a batch of closed requests that were admitted earlier than `before` (unix seconds). The most
    recently changed row is kept, because readers that follow the log continue from its sequence number."""
    removed = connection.execute(
        "DELETE FROM requests WHERE rowid IN (SELECT rowid FROM requests WHERE created_at < ? "
        "AND finished_at IS NOT NULL AND sequence < (SELECT max(sequence) FROM requests) "
        "ORDER BY created_at LIMIT ?)",
        (before, BATCH_ROWS),
    ).rowcount
    return _and_pages(connection, removed, removed == BATCH_ROWS)


def remove_usage(connection: sqlite3.Connection, before: float) -> Removed:
    """Remove a batch of usage rows for days that ended by `before` (unix seconds)."""
    removed = connection.execute(
        "DELETE FROM usage WHERE (day, tenant, key_id, model) IN (SELECT day, tenant, key_id, model FROM "
        "usage WHERE day < date(?, 'unixepoch') LIMIT ?)",
        (before, BATCH_ROWS),
    ).rowcount
    return Removed(removed, 0, removed == BATCH_ROWS)


def remove_contents(
    connection: sqlite3.Connection, before: Mapping[str, float | None], otherwise: float | None
) -> Removed:
    """Remove a batch of stored contents. `before` maps each tenant to a time (unix seconds): contents of
    requests admitted earlier are removed. For tenants not in `before`, such as deleted ones, `otherwise`
    applies. A time of None keeps the contents."""
    # Overwrite removed data instead of only unlinking its pages.
    connection.execute("PRAGMA secure_delete=ON").fetchone()
    tenants = [name for (name,) in connection.execute(_TENANTS)]
    removed = 0
    for tenant in tenants:
        until = before.get(tenant, otherwise)
        if until is not None:
            removed += _remove_of_tenant(connection, tenant, until, BATCH_ROWS - removed)
        if removed >= BATCH_ROWS:
            break
    return _and_pages(connection, removed, removed > 0)


def remove_telemetry(connection: sqlite3.Connection, before: Mapping[str, float]) -> Removed:
    """Remove a batch of rows from the telemetry tables, and any layouts no longer in use. `before` maps each
    table to the time (unix seconds) before which its rows are removed. The layout with the highest id is
    kept, so that no id is used twice: readers keep layouts in memory by id."""
    removed = 0
    layouts: set[tuple[int]] = set()
    for table, until in before.items():
        layout_ids = connection.execute(
            f"DELETE FROM {table} WHERE at IN (SELECT at FROM {table} WHERE at < ? ORDER BY at LIMIT ?) "
            "RETURNING layout",
            (until * 1000, BATCH_ROWS - removed),
        ).fetchall()
        removed += len(layout_ids)
        layouts.update(layout_ids)
    used = " OR ".join(f"EXISTS (SELECT 1 FROM {one.table} WHERE layout = id)" for one in RESOLUTIONS)
    connection.executemany(
        "DELETE FROM telemetry_layouts WHERE id = ? AND id < (SELECT max(id) FROM telemetry_layouts) "
        f"AND NOT ({used})",
        layouts,
    )
    return _and_pages(connection, removed, removed == BATCH_ROWS)


def remove_details(connection: sqlite3.Connection, before: float) -> Removed:
    """Remove a batch of telemetry details recorded earlier than `before` (unix seconds)."""
    removed = connection.execute(
        f"DELETE FROM {DETAILS} WHERE at IN (SELECT at FROM {DETAILS} WHERE at < ? ORDER BY at LIMIT ?)",
        (before * 1000, BATCH_ROWS),
    ).rowcount
    return _and_pages(connection, removed, removed == BATCH_ROWS)


class Emptying:
    """The result of `empty_log`."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.done = False
        """Whether the write-ahead log was emptied; False if a reader prevented it."""


def empty_log(writer: Writer) -> Future[Emptying]:
    """Copy the write-ahead log into the database and empty the log, which would otherwise keep removed data
    until it is overwritten. Does not wait for readers, because that would block pending writes. If
    `Emptying.done` is False, call this function again later. The future raises `StoreError` on failure."""

    def empty(emptying: Emptying) -> None:
        connection = emptying.connection
        patience_ms = int(connection.execute("PRAGMA busy_timeout").fetchone()[0])
        connection.execute("PRAGMA busy_timeout=0")
        try:
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout={patience_ms}")
        emptying.done = not busy

    # `empty` runs after the commit, because a checkpoint is impossible within a transaction.
    return writer.call(Emptying, empty)


def _remove_of_tenant(connection: sqlite3.Connection, tenant: str, until: float, most: int) -> int:
    found = connection.execute(
        "SELECT rowid, CASE WHEN text IS NULL THEN 0 ELSE bytes END FROM contents "
        "WHERE tenant = ? AND created_at < ? ORDER BY created_at LIMIT ?",
        (tenant, until, most),
    ).fetchall()
    chosen, size = [], 0
    for rowid, length in found:
        chosen.append((rowid,))
        size += length
        if size >= BATCH_BYTES:
            break
    connection.executemany("DELETE FROM contents WHERE rowid = ?", chosen)
    return len(chosen)


def _and_pages(connection: sqlite3.Connection, removed: int, more: bool) -> Removed:
    free, pages = (
        int(connection.execute(f"PRAGMA {n}").fetchone()[0]) for n in ("freelist_count", "page_count")
    )
    # Some free pages will soon be needed again, so return only the excess, and only after all rows have been
    # removed.
    if more or free <= max(BATCH_PAGES, pages * KEPT_FREE):
        return Removed(removed, 0, more)
    for _ in range(BATCH_PAGES):
        # Free one page per statement. SQLite frees one page per step of the statement, and Python's sqlite3
        # module makes only one step for a statement without result columns.
        connection.execute("PRAGMA incremental_vacuum(1)")
    return Removed(removed, BATCH_PAGES, True)
