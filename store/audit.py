"""The hash chain of operator actions in `control.db`.

Each row carries the SHA-256 of the previous row's hash followed by the row's own canonical JSON (RFC 8259;
keys sorted, no spaces, ASCII), so changing, removing or inserting a row breaks every hash after it. Rewriting
all of them, or cutting rows off the end, shows against a head that was recorded elsewhere (`head()`, which
the service writes to the journal).
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

GENESIS_HASH = "0" * 64
"""The previous hash of the first row."""


class Head(NamedTuple):
    """The newest row of a chain: enough to prove later that it still holds everything up to here."""

    seq: int
    hash: str


class AuditRow(NamedTuple):
    """One action, as stored. `at` is UTC in ISO 8601 with microseconds, `params` canonical JSON text."""

    seq: int
    at: str
    actor: str
    action: str
    params: str
    result: str
    previous_hash: str
    hash: str


class Verdict(NamedTuple):
    """What `verify` found. `broken_seq` is the first row that is wrong or missing, `problem` what is wrong
    with it."""

    rows: int
    head: Head
    broken_seq: int | None = None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the chain is whole."""
        return self.problem is None


_COLUMNS = ", ".join(AuditRow._fields)


def canonical_json(value: object) -> str:
    """The one JSON text of `value`. Raises `ValueError` for NaN and infinities, `TypeError` for what is not
    JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def row_hash(row: AuditRow) -> str:
    """The hash that `row` must carry, in hex, from its other fields. Its texts go in as stored, `params`
    too."""
    content = {name: getattr(row, name) for name in ("seq", "at", "actor", "action", "params", "result")}
    return hashlib.sha256((row.previous_hash + canonical_json(content)).encode("ascii")).hexdigest()


def append(
    connection: sqlite3.Connection, *, actor: str, action: str, params: Mapping[str, object], result: str
) -> Head:
    """Add a row inside the open transaction, which is the one of the change that it records: both stand or
    neither.

    Raises `ValueError` outside a transaction, and what `canonical_json` raises for `params`.
    """
    if not connection.in_transaction:
        raise ValueError(
            f"audit row for {action} outside a transaction: append it within the one of the change"
        )
    previous = head(connection)
    unhashed = AuditRow(
        # Above every seq ever used: a chain that lost its end must not grow over the gap.
        seq=max(previous.seq, _highest_seq_given(connection)) + 1,
        at=datetime.now(UTC).isoformat(timespec="microseconds"),
        actor=_storable(actor),
        action=_storable(action),
        params=canonical_json(dict(params)),
        result=_storable(result),
        previous_hash=previous.hash,
        hash="",
    )
    row = unhashed._replace(hash=row_hash(unhashed))
    connection.execute(f"INSERT INTO audit ({_COLUMNS}) VALUES (?, ?, ?, ?, ?, ?, ?, ?)", row)
    return Head(row.seq, row.hash)


def head(connection: sqlite3.Connection) -> Head:
    """The newest row; `Head(0, GENESIS_HASH)` of an empty chain."""
    row = connection.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return Head(0, GENESIS_HASH) if row is None else Head(*row)


def rows(connection: sqlite3.Connection, after: int = 0, limit: int = 1000) -> list[AuditRow]:
    """The first `limit` rows with a seq above `after`, oldest first."""
    found = connection.execute(
        f"SELECT {_COLUMNS} FROM audit WHERE seq > ? ORDER BY seq LIMIT ?", (after, limit)
    )
    return [AuditRow(*row) for row in found]


def verify(connection: sqlite3.Connection, recorded: Iterable[Head] = ()) -> Verdict:
    """Check the whole chain, and that it holds every head in `recorded` (kept outside the database).

    Returns the first fault by seq. Without recorded heads, rows cut off the end show only while
    `sqlite_sequence` still tells, and a chain rewritten as a whole does not show at all.
    """
    expected = {recorded_head.seq: recorded_head.hash for recorded_head in recorded if recorded_head.seq > 0}
    last = Head(0, GENESIS_HASH)
    count = 0
    for values in connection.execute(f"SELECT {_COLUMNS} FROM audit ORDER BY seq"):
        row = AuditRow(*values)
        problem = _problem(row, last, expected.pop(row.seq, None))
        if problem is not None:
            return Verdict(count, last, *problem)
        last = Head(row.seq, row.hash)
        count += 1
    highest = max([_highest_seq_given(connection), *expected])
    if highest > last.seq:
        return Verdict(
            count, last, last.seq + 1, f"rows {last.seq + 1} to {highest} are missing from the end"
        )
    return Verdict(count, last)


def _problem(row: AuditRow, last: Head, recorded_hash: str | None) -> tuple[int, str] | None:
    """The first seq that is wrong, and what is wrong, given the sound row before; None for a sound row."""
    if row.seq != last.seq + 1:
        return last.seq + 1, f"missing: row {row.seq} follows row {last.seq}"
    if row.previous_hash != last.hash:
        return row.seq, f"rewritten: its previous_hash is not the hash of row {last.seq}"
    if row.hash != row_hash(row):
        return row.seq, "rewritten: its hash does not match its content"
    if recorded_hash is not None and row.hash != recorded_hash:
        return row.seq, f"rewritten up to here: its hash is {row.hash}, recorded outside was {recorded_hash}"
    return None


def _highest_seq_given(connection: sqlite3.Connection) -> int:
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'audit'").fetchone()
    return 0 if row is None else int(row[0])


def _storable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
