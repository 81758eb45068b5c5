"""What goes when its time is over: rows of the request log, and the contents of requests. In batches so small
that nothing waits for one, with the pages given back to the file system.

Functions of a connection are operations for the writer of their database.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from concurrent.futures import Future
from typing import NamedTuple

from store.writer import Writer

BATCH_ROWS = 100
BATCH_BYTES = 256 << 10
BATCH_PAGES = 32
KEPT_FREE = 0.1
"""Part of a file that may be free."""


# Each is one look into the index; DISTINCT would read all of it.
_TENANTS = """
WITH RECURSIVE found (name) AS (
    SELECT min(tenant) FROM contents
    UNION ALL SELECT (SELECT min(tenant) FROM contents WHERE tenant > name) FROM found WHERE name IS NOT NULL
)
SELECT name FROM found WHERE name IS NOT NULL
"""


class Removed(NamedTuple):
    """What one batch did."""

    rows: int
    pages: int
    """Given back to the file system."""
    more: bool
    """There is more to do."""


def remove_requests(connection: sqlite3.Connection, before: float) -> Removed:
    """Take out of the request log a batch of ended requests that were admitted before `before` (unix
    seconds). The row that changed last stays, since followers count from it."""
    gone = connection.execute(
        "DELETE FROM requests WHERE rowid IN (SELECT rowid FROM requests WHERE created_at < ? "
        "AND finished_at IS NOT NULL AND sequence < (SELECT max(sequence) FROM requests) "
        "ORDER BY created_at LIMIT ?)",
        (before, BATCH_ROWS),
    ).rowcount
    return _and_pages(connection, gone, gone == BATCH_ROWS)


def remove_contents(
    connection: sqlite3.Connection, before: Mapping[str, float | None], otherwise: float | None
) -> Removed:
    """Take out a batch of contents of requests that were admitted before their tenant's time in `before`
    (unix seconds), or `otherwise` for tenants that are not there any more; None: they stay."""
    # What is taken out is overwritten, not only forgotten.
    connection.execute("PRAGMA secure_delete=ON").fetchone()
    tenants = [name for (name,) in connection.execute(_TENANTS)]
    gone = 0
    for tenant in tenants:
        until = before.get(tenant, otherwise)
        if until is not None:
            gone += _remove_of_tenant(connection, tenant, until, BATCH_ROWS - gone)
        if gone >= BATCH_ROWS:
            break
    return _and_pages(connection, gone, gone > 0)


class Emptying:
    """What `empty_log` came to."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.connection = connection
        self.done = False
        """False: a reader was in the way."""


def empty_log(writer: Writer) -> Future[Emptying]:
    """Have the write-ahead log put into the database and emptied: what was removed lies there as it was,
    until it is overwritten. Waits for no reader, since what is to be written waits too: whoever asks tries
    again later. The future raises a `StoreError`."""

    def empty(emptying: Emptying) -> None:
        connection = emptying.connection
        patience_ms = int(connection.execute("PRAGMA busy_timeout").fetchone()[0])
        connection.execute("PRAGMA busy_timeout=0")
        try:
            busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
        finally:
            connection.execute(f"PRAGMA busy_timeout={patience_ms}")
        emptying.done = not busy

    # After the commit: no checkpoint can be made within a transaction.
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


def _and_pages(connection: sqlite3.Connection, gone: int, more: bool) -> Removed:
    free, pages = (
        int(connection.execute(f"PRAGMA {n}").fetchone()[0]) for n in ("freelist_count", "page_count")
    )
    # Some of the room is needed again soon: only what is above goes back, after all rows have gone.
    if more or free <= max(BATCH_PAGES, pages * KEPT_FREE):
        return Removed(gone, 0, more)
    for _ in range(BATCH_PAGES):
        # One at a time: the module steps a statement without columns once.
        connection.execute("PRAGMA incremental_vacuum(1)")
    return Removed(gone, BATCH_PAGES, True)
