"""The hash chain of operator actions in `control.db`. Every action has two rows with the same action id
(`act`). The `intent` row is written before the action begins; the `result` row records its outcome.

A row's hash is the SHA-256 of the previous row's hash followed by the row's own canonical JSON. This JSON
(RFC 8259, sorted keys, no spaces, ASCII) contains all non-null columns except the two hashes. Changing,
removing or inserting a row therefore breaks every later hash. A column added in a later version is null in
older rows, so their hashes stay the same. Only a chain head recorded elsewhere (`store.heads`) reveals that
the whole chain was rewritten or that rows were removed from its end.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import Final, Literal, NamedTuple

from store.keys import without_secrets

GENESIS_HASH = "0" * 64
"""The `previous_hash` of a chain's oldest row."""
AuditPhase = Literal["intent", "result"]
INTENT: Final = "intent"
RESULT: Final = "result"

KEY_ACTION = "audit.key"
"""The `action` of a row that names a new signing key, which signs all chain heads from that row on."""

_HASHES = frozenset({"previous_hash", "hash"})


class Head(NamedTuple):
    """A chain's newest row. A copy of the head that is kept elsewhere can later prove that this row and all
    earlier ones are unchanged."""

    seq: int
    hash: str


class Actor(NamedTuple):
    """The person or process that performs an action."""

    name: str
    """The actor's name: `uid:1000`, `key:key_0a1b` or `service`."""
    host: str | None = None
    """The machine from which the action was requested."""
    act: str | None = None
    """Id of the action, shared by its intent row and its result row."""


class Entry(NamedTuple):
    """A row not yet appended to the chain. All values are stored as text; None means no value.

    `at` is UTC in ISO 8601 with microseconds; `params`, `before` and `after` are canonical JSON.
    """

    at: str
    actor: str
    action: str
    params: str
    result: str
    host: str | None = None
    act: str | None = None
    phase: AuditPhase | None = None
    before: str | None = None
    after: str | None = None
    note: str | None = None


class AuditRow(NamedTuple):
    """A stored row of the chain: an `Entry` and its position. The first versions of the product recorded no
    intents, so their rows have neither `act` nor `phase`."""

    seq: int
    at: str
    actor: str
    action: str
    params: str
    result: str
    previous_hash: str
    hash: str
    host: str | None = None
    act: str | None = None
    phase: AuditPhase | None = None
    before: str | None = None
    after: str | None = None
    note: str | None = None


class Verdict(NamedTuple):
    """The result of verifying an audit chain. `broken_seq` is the seq of the first wrong or missing row, and
    `problem` describes the fault."""

    rows: int
    head: Head
    broken_seq: int | None = None
    problem: str | None = None

    @property
    def ok(self) -> bool:
        """Whether the chain is complete and unchanged."""
        return self.problem is None


_COLUMNS = ", ".join(AuditRow._fields)
_MARKS = ", ".join("?" * len(AuditRow._fields))


def canonical_json(value: object) -> str:
    """Return `value` as canonical JSON. Raises `ValueError` for NaN and infinities, and `TypeError` for
    values that JSON cannot represent."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def utc_now() -> str:
    """Return the current time in the format of `Entry.at`."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def unix_time(at: str) -> float | None:
    """Convert a time in the format of `Entry.at` to unix seconds. Return None if the text is not a time, as
    in a row that was tampered with."""
    try:
        return datetime.fromisoformat(at).timestamp()
    except (ValueError, OverflowError):
        return None


def new_act() -> str:
    """Return a new action id."""
    return secrets.token_hex(8)


def as_actor(actor: Actor | str) -> Actor:
    """Convert `actor` to an `Actor`. A string is the actor's name."""
    return Actor(actor) if isinstance(actor, str) else actor


def intent(actor: Actor, action: str, params: Mapping[str, object]) -> Entry:
    """Return the intent row for an action that is about to begin. `actor.act` must be set. Raises
    `ValueError` or `TypeError` if JSON cannot represent a value in `params`."""
    return Entry(
        at=utc_now(),
        actor=_storable(actor.name),
        action=_storable(action),
        params=without_secrets(canonical_json(dict(params))),
        result="",
        host=None if actor.host is None else _storable(actor.host),
        act=actor.act,
        phase=INTENT,
    )


def outcome(
    actor: Actor | str,
    action: str,
    params: Mapping[str, object],
    result: str,
    before: object = None,
    after: object = None,
) -> Entry:
    """Return the result row for an action. `result` is `ok` or the error; `before` and `after` are the old
    and new values. Raises `ValueError` or `TypeError` if JSON cannot represent a value."""
    actor = as_actor(actor)
    return intent(actor, action, params)._replace(
        result=without_secrets(_storable(result)),
        act=actor.act or new_act(),
        phase=RESULT,
        before=None if before is None else without_secrets(canonical_json(before)),
        after=None if after is None else without_secrets(canonical_json(after)),
    )


def row_hash(row: AuditRow) -> str:
    """Compute a row's hash (hex) from its other stored fields."""
    content = {
        name: value for name, value in row._asdict().items() if value is not None and name not in _HASHES
    }
    return hashlib.sha256((row.previous_hash + canonical_json(content)).encode("ascii")).hexdigest()


def append(connection: sqlite3.Connection, entry: Entry) -> Head:
    """Append an entry to the chain, in the same transaction as the change that the entry records, so that
    both are committed together. Raises `ValueError` outside a transaction.
    """
    if not connection.in_transaction:
        raise ValueError(
            f"the audit row for {entry.action} was appended outside a transaction: append it in the same "
            "transaction as the change that it records"
        )
    previous = head(connection)
    # Choose a seq higher than any used before, so that none is reused even if the chain has lost its last
    # rows.
    seq = max(previous.seq, highest_seq_given(connection)) + 1
    unhashed = AuditRow(seq=seq, previous_hash=previous.hash, hash="", **entry._asdict())
    row = unhashed._replace(hash=row_hash(unhashed))
    connection.execute(f"INSERT INTO audit ({_COLUMNS}) VALUES ({_MARKS})", row)
    return Head(row.seq, row.hash)


def holds(connection: sqlite3.Connection, entry: Entry) -> bool:
    """Return True if the chain already contains the action's row for this phase."""
    found = connection.execute(
        "SELECT 1 FROM audit WHERE act = ? AND phase = ? LIMIT 1", (entry.act, entry.phase)
    ).fetchone()
    return found is not None


def unfinished(connection: sqlite3.Connection, among: int) -> list[AuditRow]:
    """Return the intents that have no result, oldest first. Only the newest `among` rows are searched."""
    found = connection.execute(
        f"SELECT {_COLUMNS} FROM audit AS intended "
        f"WHERE phase = ? AND seq > (SELECT max(seq) FROM audit) - ? "
        f"AND NOT EXISTS (SELECT 1 FROM audit WHERE act = intended.act AND phase = ?) ORDER BY seq",
        (INTENT, among, RESULT),
    )
    return [AuditRow(*row) for row in found]


def key_named(chain: Iterable[AuditRow], key: str) -> int:
    """Return the seq of the newest row that names this key as the signing key. Returns 0 if no row names this
    key, which means that this key has signed all heads from the start."""
    named = canonical_json({"key": key})
    return max((row.seq for row in chain if row.action == KEY_ACTION and row.params == named), default=0)


def head(connection: sqlite3.Connection) -> Head:
    """Return the head of the chain, or `Head(0, GENESIS_HASH)` if the chain is empty."""
    row = connection.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return Head(0, GENESIS_HASH) if row is None else Head(*row)


def rows_of(connection: sqlite3.Connection, action: str) -> list[AuditRow]:
    """Return all rows with this action name, oldest first."""
    found = connection.execute(f"SELECT {_COLUMNS} FROM audit WHERE action = ? ORDER BY seq", (action,))
    return [AuditRow(*row) for row in found]


def all_rows(connection: sqlite3.Connection) -> Iterator[AuditRow]:
    """Yield all rows of the chain, oldest first. Invalid UTF-8 is decoded to surrogates, so a damaged row
    fails its hash check."""
    cursor = connection.cursor()
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    for row in cursor.execute(f"SELECT {_COLUMNS} FROM audit ORDER BY seq"):
        yield AuditRow(*row)


def verify(connection: sqlite3.Connection, recorded: Iterable[Head] = ()) -> Verdict:
    """Check the whole chain. Also check that it contains every head in `recorded` (heads kept outside the
    database). Returns the fault with the lowest seq.

    Without recorded heads, two kinds of tampering go undetected: rewriting the whole chain, and removing the
    last rows while also lowering the number in `sqlite_sequence`.
    """
    return check(all_rows(connection), recorded, highest_seq_given(connection))


def check(chain: Iterable[AuditRow], recorded: Iterable[Head] = (), highest_seq: int = 0) -> Verdict:
    """Check a chain as `verify` does, but from rows that have already been read. If a row up to `highest_seq`
    is missing, the chain is broken."""
    expected: dict[int, set[str]] = {}
    for known in recorded:
        if known.seq > 0:
            expected.setdefault(known.seq, set()).add(known.hash)
    last = Head(0, GENESIS_HASH)
    confirmed = 0  # seq of the newest row confirmed by a recorded head
    try:
        for row in chain:
            hashes = expected.pop(row.seq, None)
            problem = _problem(row, last, hashes, confirmed)
            if problem is not None:
                return Verdict(last.seq, last, *problem)
            last = Head(row.seq, row.hash)
            if hashes is not None:
                confirmed = row.seq
    except sqlite3.DatabaseError as error:
        return Verdict(last.seq, last, last.seq + 1, f"cannot be read: {error}")
    highest = max([highest_seq, *expected])
    if highest > last.seq:
        missing = f"row {highest} is" if highest == last.seq + 1 else f"rows {last.seq + 1} to {highest} are"
        where = "missing from the end of the chain" if last.seq else "missing: the chain is empty"
        return Verdict(last.seq, last, last.seq + 1, f"{missing} {where}")
    return Verdict(last.seq, last)


def _problem(row: AuditRow, last: Head, recorded: set[str] | None, confirmed: int) -> tuple[int, str] | None:
    """Check one row, given that the preceding row is valid. Returns the seq of the first wrong or missing row
    and a description of the fault, or None if the row is valid."""
    if row.seq != last.seq + 1:
        found = f"row {last.seq} is followed by row {row.seq}"
        return last.seq + 1, f"missing: {found if last.seq else f'the chain begins with row {row.seq}'}"
    if any(value is not None and not isinstance(value, str) for value in row[1:]):
        return row.seq, "rewritten: one of its values is not text"
    if row.previous_hash != last.hash:
        right = f"the hash of row {last.seq}" if last.seq else "that of a chain's first row (64 zeros)"
        return row.seq, f"rewritten: its previous_hash is not {right}"
    if row.hash != row_hash(row):
        return row.seq, "rewritten: its hash does not match its content"
    if recorded is not None and recorded != {row.hash}:
        other = sorted(recorded - {row.hash})[0]
        since = f" (rows up to {confirmed} are correct)" if confirmed else ""
        return row.seq, (
            f"this row or an earlier one was rewritten{since}: its hash is {row.hash}, but a recorded "
            f"head has {other}"
        )
    return None


def highest_seq_given(connection: sqlite3.Connection) -> int:
    """Return the highest seq ever used in the `audit` table, from `sqlite_sequence`."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'audit'").fetchone()
    return 0 if row is None else int(row[0])


def _storable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
