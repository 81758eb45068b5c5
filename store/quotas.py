"""Stores the levels of quotas in `history.db`, so that a restart does not refill them. Levels are written
every few seconds, not at each request. After a crash, the request log has the use since then: each row has
the amount that its request took (`quota_tokens`), and `QuotaState.used` is the use that the levels do not
include. Snapshots go through the request log's own writer, so that it is known which rows they include.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from store.database import reading
from store.schemas import HISTORY
from store.writer import Writer


class QuotaLevels(msgspec.Struct, frozen=True, kw_only=True):
    """The levels of one tenant's or key's limits; None if there is no such limit. Requests whose row has not
    ended count as if they had taken nothing, because their rows have the amount.
    """

    scope: str
    """The owner of the limits: "tenant" or "key"."""
    name: str
    """The tenant's name, or the key's id."""
    at: float
    """When the levels were stored, in unix seconds."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    tokens_per_day: float | None = None


class Used(msgspec.Struct, frozen=True):
    """The use of one request that the levels do not include."""

    tenant: str
    key_id: str
    """The id of the key; empty for a Unix peer."""
    at: float
    """When the request was admitted, in unix seconds."""
    tokens: int
    """Always above 0, because requests that took nothing are left out."""


class QuotaState(msgspec.Struct, frozen=True):
    """The stored state that a start of the service reads."""

    levels: list[QuotaLevels] = []
    used: list[Used] = []
    """The use that the levels do not include, oldest first."""


_COLUMNS = QuotaLevels.__struct_fields__
_SAVE = (
    f"INSERT INTO quota_levels ({', '.join(_COLUMNS)}, sequence) VALUES ({', '.join('?' * len(_COLUMNS))}, ?)"
    " ON CONFLICT (scope, name) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in (*_COLUMNS[2:], "sequence"))
)


class QuotaLog:
    """Writes levels through `writer`, which must be the request log's."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def save(self, levels: Iterable[QuotaLevels], gone: Iterable[tuple[str, str]] = ()) -> bool:
        """Store these levels, and delete those of each (scope, name) in `gone`. Never blocks; returns False
        if they were dropped. Call this when exactly those rows that the levels include have been handed to
        the writer.
        """
        values = [msgspec.structs.astuple(level) for level in levels]
        return self._writer.submit(partial(_save, values, list(gone)))


def _save(
    values: list[tuple[object, ...]], gone: list[tuple[str, str]], connection: sqlite3.Connection
) -> None:
    sequence = connection.execute("SELECT ifnull(max(sequence), 0) FROM requests").fetchone()[0]
    connection.executemany("DELETE FROM quota_levels WHERE scope = ? AND name = ?", gone)
    connection.executemany(_SAVE, [(*row, sequence) for row in values])


def read_quotas(path: Path) -> QuotaState:
    """Return the stored levels of every quota from the file at `path`, before the first request. Raises a
    `StoreError`."""
    with reading(path, HISTORY) as connection:
        levels = [
            QuotaLevels(**dict(zip(_COLUMNS, row, strict=True)))
            for row in connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM quota_levels")
        ]
        # A snapshot has the levels that changed since the previous one; all others are unchanged.
        (sequence,) = connection.execute("SELECT max(sequence) FROM quota_levels").fetchone()
        if sequence is None:
            return QuotaState()
        used = [
            Used(*row)
            for row in connection.execute(
                "SELECT tenant, ifnull(key_id, ''), created_at, quota_tokens FROM requests "
                "WHERE (sequence > ? OR finished_at IS NULL) AND quota_tokens > 0 AND tenant IS NOT NULL "
                "ORDER BY created_at",
                (sequence,),
            )
        ]
        return QuotaState(levels, used)
