"""Stores in `history.db` how much of each quota remains, so a restart does not refill the quotas. The
remaining amounts (levels) are written as a snapshot every few seconds instead of after each request.

After a crash, the request log supplies the usage since the last snapshot. Each row contains its request's
tokens (`quota_tokens`), and `QuotaState.used` lists the usage that the levels do not include. The request
log's writer also writes the snapshots, so each snapshot records the last row that it includes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from store.database import reading
from store.policies import QuotaScope
from store.schemas import HISTORY
from store.writer import Writer


class QuotaLevels(msgspec.Struct, frozen=True, kw_only=True):
    """The remaining amount of each limit of one tenant or key; None for a limit that is not set.

    The usage of requests whose rows are still open has not been subtracted. Those rows record that usage.
    """

    scope: QuotaScope
    name: str
    """The name of the tenant, or the id of the key."""
    at: float
    """Time when the levels were stored, in unix seconds."""
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None
    tokens_per_day: float | None = None


class Used(msgspec.Struct, frozen=True):
    """The part of a request's usage that the stored levels do not yet reflect."""

    tenant: str
    key_id: str
    """Id of the key; empty for a Unix peer."""
    at: float
    """Time when the request was admitted, in unix seconds."""
    tokens: int
    """Number of tokens, always above 0, because requests without usage are not listed."""


class QuotaState(msgspec.Struct, frozen=True):
    """The quota state that is read at startup."""

    levels: list[QuotaLevels] = []
    used: list[Used] = []
    """Usage that the levels do not yet reflect, oldest first."""


_COLUMNS = QuotaLevels.__struct_fields__
_SAVE = (
    f"INSERT INTO quota_levels ({', '.join(_COLUMNS)}, sequence) VALUES ({', '.join('?' * len(_COLUMNS))}, ?)"
    " ON CONFLICT (scope, name) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in (*_COLUMNS[2:], "sequence"))
)


class QuotaLog:
    """Writes levels through `writer`, which must be the writer of the request log."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def save(self, levels: Iterable[QuotaLevels], deleted: Iterable[tuple[str, str]] = ()) -> bool:
        """Store these levels, and delete the levels of the (scope, name) pairs in `deleted`. Never blocks;
        returns False if the snapshot was dropped. Call this after submitting the rows of all requests that
        the levels include, and before submitting any other rows."""
        values = [msgspec.structs.astuple(level) for level in levels]
        return self._writer.submit(partial(_save, values, list(deleted)))


def _save(
    values: list[tuple[object, ...]], deleted: list[tuple[str, str]], connection: sqlite3.Connection
) -> None:
    sequence = connection.execute("SELECT ifnull(max(sequence), 0) FROM requests").fetchone()[0]
    connection.executemany("DELETE FROM quota_levels WHERE scope = ? AND name = ?", deleted)
    connection.executemany(_SAVE, [(*row, sequence) for row in values])


def read_quotas(path: Path) -> QuotaState:
    """Return the state of all quotas in the file at `path`. Call this before the first request. Raises
    `StoreError`."""
    with reading(path, HISTORY) as connection:
        levels = [
            QuotaLevels(**dict(zip(_COLUMNS, row, strict=True)))
            for row in connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM quota_levels")
        ]
        # A snapshot contains only the levels that changed since the previous snapshot. A level that is
        # missing from the newest snapshot is therefore still current.
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
