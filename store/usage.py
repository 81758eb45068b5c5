"""Daily usage in `history.db`, with one row per day, tenant, key and model. The transaction that closes a
request also updates its usage row, so usage stays exact after the request's row has been removed."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import NamedTuple

from store.database import reading
from store.schemas import ADD_USAGE, HISTORY


class UsageFilter(NamedTuple):
    """Conditions that select usage rows; None matches any value."""

    since_day: str | None = None
    """Include only usage on or after this day (UTC), such as "2026-11-20"."""
    until_day: str | None = None
    """Include only usage on or before this day (UTC)."""
    tenant: str | None = None
    key_id: str | None = None
    """Id of the key; an empty string selects requests without a key."""
    model: str | None = None


class DailyUsage(NamedTuple):
    """A tenant's usage of one model with one key on one day."""

    day: str
    tenant: str
    key_id: str
    model: str
    requests: int
    failed: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


_CONDITIONS = ("day >= ?", "day <= ?", "tenant = ?", "key_id = ?", "model = ?")


def add_ended(connection: sqlite3.Connection, request_id: str) -> None:
    """Add a request to the daily usage. Call this in the transaction that closes the request."""
    connection.execute(ADD_USAGE, (request_id,))


def read_usage(path: Path, wanted: UsageFilter, limit: int, limit_s: float | None) -> list[DailyUsage]:
    """Return the first `limit` matching usage rows, oldest day first. `limit_s` is the call's time limit.
    Raises `StoreError` on failure."""
    given = [(sql, value) for sql, value in zip(_CONDITIONS, wanted, strict=True) if value is not None]
    where = " AND ".join(["true", *(sql for sql, _ in given)])
    sql = f"SELECT {', '.join(DailyUsage._fields)} FROM usage WHERE {where} ORDER BY 1, 2, 3, 4 LIMIT ?"
    with reading(path, HISTORY, limit_s) as connection:
        found = connection.execute(sql, (*(value for _, value in given), limit)).fetchall()
    return [DailyUsage(*row) for row in found]
