"""Stores in `history.db` how much of each quota remains, so that a restart does not refill quotas. A snapshot
of the remaining amounts (levels) is written every few seconds instead of after each request.

After a crash, the usage since the last snapshot is read from the request log, whose rows contain each
request's tokens (`quota_tokens`). `QuotaState.used` lists the usage not included in the levels. The request
log's writer also writes the snapshots, so each snapshot can record the last row that it includes.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import msgspec

from store.database import insert_sql, reading
from store.policies import RATE_LIMITS, QuotaScope
from store.schemas import HISTORY
from store.writer import Writer


class QuotaLevels(msgspec.Struct, frozen=True, kw_only=True):
    """The amounts remaining under a tenant's or key's limits. Usage by open requests is not yet subtracted;
    it is recorded in the rows of those requests.
    """

    scope: QuotaScope
    name: str
    """The tenant's name or the key's id."""
    at: float
    """Time when the levels were stored, in unix seconds."""
    remaining: dict[str, float] = {}
    """Amount remaining under each limit that is set, keyed by limit name (`RATE_LIMITS`)."""


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
    """The remaining quotas and the usage not yet subtracted from them, as read at startup."""

    levels: list[QuotaLevels] = []
    used: list[Used] = []
    """Usage that the levels do not yet reflect, oldest first."""


_COLUMNS = ("scope", "name", "at", *RATE_LIMITS)
_SAVE = (
    insert_sql("quota_levels", (*_COLUMNS, "sequence"))
    + " ON CONFLICT (scope, name) DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in ("at", *RATE_LIMITS, "sequence"))
)


class QuotaLog:
    """Writes quota levels through `writer`, which must be the request log's writer."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def save(self, levels: Iterable[QuotaLevels], deleted: Iterable[tuple[str, str]] = ()) -> bool:
        """Store these levels, and delete those for the (scope, name) pairs in `deleted`. Never blocks;
        returns False if the snapshot was dropped. Call this after submitting the rows for every request
        counted in the levels, and before submitting any others."""
        return self._writer.submit(partial(_save, list(levels), list(deleted)))


def _save(levels: list[QuotaLevels], deleted: list[tuple[str, str]], connection: sqlite3.Connection) -> None:
    sequence = connection.execute("SELECT ifnull(max(sequence), 0) FROM requests").fetchone()[0]
    connection.executemany("DELETE FROM quota_levels WHERE scope = ? AND name = ?", deleted)
    for one in levels:
        amounts = [one.remaining.get(limit) for limit in RATE_LIMITS]
        connection.execute(_SAVE, (one.scope, one.name, one.at, *amounts, sequence))


def _levels(scope: QuotaScope, name: str, at: float, *amounts: float | None) -> QuotaLevels:
    """Return a row's levels."""
    limits = zip(RATE_LIMITS, amounts, strict=True)
    remaining = {limit: amount for limit, amount in limits if amount is not None}
    return QuotaLevels(scope=scope, name=name, at=at, remaining=remaining)


def read_quotas(path: Path) -> QuotaState:
    """Read the quota state from the file at `path`. Call this before the first request. Raises `StoreError`
    on failure."""
    with reading(path, HISTORY) as connection:
        levels = [
            _levels(*row) for row in connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM quota_levels")
        ]
        # A snapshot contains only the levels that changed since the previous one, so a level missing from the
        # newest snapshot is still current.
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
