"""Alerts and operators' silences in `history.db`. Each alert's start, end and acknowledgement are recorded.
`AlertLog` writes through the database's writer thread and never blocks."""

from __future__ import annotations

import sqlite3
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from store.database import insert_sql, reading
from store.schemas import HISTORY
from store.structs import Severity, Silence
from store.writer import Writer

MAX_ALERTS = 10_000
"""Maximum number of alerts to keep after they have ended."""


class AlertRow(msgspec.Struct, kw_only=True):
    """A row of the `alerts` table, with one field per column. Times are in unix seconds."""

    id: str
    rule: str
    severity: Severity
    subject: str
    """Name of the model, replica, front process, GPU, tenant or other component that the alert is about."""
    description: str
    cause: str
    remedy: str
    since: float
    """When the condition began."""
    raised_at: float
    ended_at: float | None = None
    value: float | None = None
    threshold: float | None = None
    unit: str = ""
    scope: str = "[]"
    """The affected components' kinds and names, as a JSON list."""
    suppressed_by: str = ""
    """Id of the alert that caused this one and therefore suppresses it."""
    suppressed: int = 0
    """Number of alerts that this one caused and therefore suppresses."""
    acknowledged_by: str = ""
    acknowledged_at: float | None = None

    def stored(self) -> tuple[object, ...]:
        """Return the row's values in the column order of `SAVE_ALERT`."""
        return tuple(getattr(self, name) for name in _COLUMNS)


_COLUMNS = AlertRow.__struct_fields__
_SILENCE_COLUMNS = Silence.__struct_fields__
SAVE_ALERT = insert_sql("alerts", _COLUMNS, "INSERT OR REPLACE")
_SAVE_SILENCE = insert_sql("silences", _SILENCE_COLUMNS, "INSERT OR REPLACE")


class AlertLog:
    """Writes alerts and silences through `writer`, which must have the schema `store.schemas.HISTORY`."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer

    def save(self, alert: AlertRow) -> bool:
        """Queue an alert's current state for writing. Returns False if the write was dropped."""
        return self._writer.submit(partial(_execute, SAVE_ALERT, alert.stored()))

    def save_silence(self, silence: Silence) -> bool:
        """Queue a silence for writing. Returns False if the write was dropped."""
        return self._writer.submit(partial(_execute, _SAVE_SILENCE, msgspec.structs.astuple(silence)))

    def remove_silence(self, silence_id: str) -> bool:
        """Queue the removal of a silence. Returns False if the write was dropped."""
        return self._writer.submit(partial(_execute, "DELETE FROM silences WHERE id = ?", (silence_id,)))


class AlertReader:
    """Reads alerts and silences from the database at `path`. Raises `StoreError` if the database cannot be
    read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def open(self) -> list[AlertRow]:
        """Return the alerts that have not ended, oldest first."""
        return self._alerts("WHERE ended_at IS NULL ORDER BY raised_at", ())

    def shown(self, at: float, ended_s: float, limit: int) -> list[AlertRow]:
        """Return up to `limit` alerts that were active at the given time (unix seconds) or had ended at most
        `ended_s` seconds earlier, newest first. Suppressed alerts are omitted."""
        return self._alerts(
            "WHERE raised_at <= ? AND (ended_at IS NULL OR ended_at > ?) AND suppressed_by = '' "
            "ORDER BY since DESC LIMIT ?",
            (at, at - ended_s, limit),
        )

    def between(self, since: float, until: float, limit: int) -> list[AlertRow]:
        """Return up to `limit` alerts that were raised between `since` and `until` or were already active at
        `since`, newest first."""
        return self._alerts(
            "WHERE raised_at <= ? AND (raised_at >= ? OR ended_at IS NULL OR ended_at > ?) "
            "ORDER BY raised_at DESC LIMIT ?",
            (until, since, since, limit),
        )

    def silences(self, now: float) -> list[Silence]:
        """Return the silences still in effect at `now`."""
        with reading(self.path, HISTORY) as connection:
            rows = connection.execute(
                f"SELECT {', '.join(_SILENCE_COLUMNS)} FROM silences WHERE until > ? ORDER BY created_at",
                (now,),
            ).fetchall()
        return [Silence(**dict(zip(_SILENCE_COLUMNS, row, strict=True))) for row in rows]

    def _alerts(self, clauses: str, values: tuple[Any, ...]) -> list[AlertRow]:
        with reading(self.path, HISTORY) as connection:
            rows = connection.execute(
                f"SELECT {', '.join(_COLUMNS)} FROM alerts {clauses}", values
            ).fetchall()
        return [AlertRow(**dict(zip(_COLUMNS, row, strict=True))) for row in rows]


def remove_alerts(connection: sqlite3.Connection, now: float) -> int:
    """Remove all expired silences. If there are more than `MAX_ALERTS` alerts that have ended, also remove up
    to 100 of the oldest ones. Returns the number of rows removed."""
    alerts = connection.execute(
        "DELETE FROM alerts WHERE id IN (SELECT id FROM alerts WHERE ended_at IS NOT NULL "
        "ORDER BY raised_at DESC LIMIT 100 OFFSET ?)",
        (MAX_ALERTS,),
    ).rowcount
    return alerts + connection.execute("DELETE FROM silences WHERE until <= ?", (now,)).rowcount


def _execute(sql: str, values: tuple[object, ...], connection: sqlite3.Connection) -> None:
    connection.execute(sql, values)
