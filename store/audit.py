"""The hash chain of operator actions in `control.db`: one row for what somebody is about to do
(`intent`), one for what came of it (`result`), joined by `act`.

Each row carries the SHA-256 of the previous row's hash followed by the row's own canonical JSON: all of its
columns that are not null, but for the two hashes (RFC 8259; keys sorted, no spaces, ASCII). So changing,
removing or inserting a row breaks every hash after it, and a column that comes with a later version leaves
older rows as they are. Rewriting all of them, or cutting rows off the end, shows against a head that was
recorded elsewhere (`store.heads`).
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from typing import NamedTuple

from store.keys import without_secrets

GENESIS_HASH = "0" * 64
"""The previous hash of the first row."""
INTENT, RESULT = "intent", "result"

KEY_ACTION = "audit.key"
"""A row in which the service says with which key heads are signed from there on, where it was another."""

_HASHES = frozenset({"previous_hash", "hash"})


class Head(NamedTuple):
    """The newest row of a chain: enough to prove later that it still holds everything up to here."""

    seq: int
    hash: str


class Actor(NamedTuple):
    """Who acts."""

    name: str
    """`uid:1000`, `key:key_0a1b`, `service`."""
    host: str | None = None
    """The machine that they act from."""
    act: str | None = None
    """Joins the rows of one action, from its intent on."""


class Entry(NamedTuple):
    """What there is to record, without its place in the chain. Texts, as they are stored; None is no value.

    `at` is UTC in ISO 8601 with microseconds; `params`, `before` and `after` are canonical JSON.
    """

    at: str
    actor: str
    action: str
    params: str
    result: str
    host: str | None = None
    act: str | None = None
    phase: str | None = None
    before: str | None = None
    after: str | None = None
    note: str | None = None


class AuditRow(NamedTuple):
    """A row of the chain, as stored: an `Entry` in its place. Rows from before there were intents have no
    `act` and no `phase`."""

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
    phase: str | None = None
    before: str | None = None
    after: str | None = None
    note: str | None = None


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
_MARKS = ", ".join("?" * len(AuditRow._fields))


def canonical_json(value: object) -> str:
    """The one JSON text of `value`. Raises `ValueError` for NaN and infinities, `TypeError` for what is not
    JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def utc_now() -> str:
    """The time as rows carry it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def new_act() -> str:
    """A name for one action."""
    return secrets.token_hex(8)


def as_actor(actor: Actor | str) -> Actor:
    """`actor`, where a name says it all too."""
    return Actor(actor) if isinstance(actor, str) else actor


def intent(actor: Actor, action: str, params: Mapping[str, object]) -> Entry:
    """What `actor`, whose `act` is set, is about to do. Raises what `canonical_json` raises for `params`."""
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
    """What came of it: `result` is `ok` or says why not; `before` and `after` are what it found and left.

    Raises what `canonical_json` raises for values.
    """
    actor = as_actor(actor)
    return intent(actor, action, params)._replace(
        result=without_secrets(_storable(result)),
        act=actor.act or new_act(),
        phase=RESULT,
        before=None if before is None else without_secrets(canonical_json(before)),
        after=None if after is None else without_secrets(canonical_json(after)),
    )


def row_hash(row: AuditRow) -> str:
    """The hash that `row` must carry, in hex, from its other fields. Its texts go in as stored."""
    content = {
        name: value for name, value in row._asdict().items() if value is not None and name not in _HASHES
    }
    return hashlib.sha256((row.previous_hash + canonical_json(content)).encode("ascii")).hexdigest()


def append(connection: sqlite3.Connection, entry: Entry) -> Head:
    """Give `entry` its place, inside the open transaction, which is the one of the change that it records:
    both stand or neither.

    Raises `ValueError` outside a transaction.
    """
    if not connection.in_transaction:
        raise ValueError(
            f"audit row for {entry.action} outside a transaction: append it within the one of the change"
        )
    previous = head(connection)
    # Above every seq ever used: a chain that lost its end must not grow over the gap.
    seq = max(previous.seq, highest_seq_given(connection)) + 1
    unhashed = AuditRow(seq=seq, previous_hash=previous.hash, hash="", **entry._asdict())
    row = unhashed._replace(hash=row_hash(unhashed))
    connection.execute(f"INSERT INTO audit ({_COLUMNS}) VALUES ({_MARKS})", row)
    return Head(row.seq, row.hash)


def holds(connection: sqlite3.Connection, entry: Entry) -> bool:
    """Whether the chain has this phase of this action already."""
    found = connection.execute(
        "SELECT 1 FROM audit WHERE act = ? AND phase = ? LIMIT 1", (entry.act, entry.phase)
    ).fetchone()
    return found is not None


def unfinished(connection: sqlite3.Connection, among: int) -> list[AuditRow]:
    """Intents without a result, of the newest `among` rows, oldest first."""
    found = connection.execute(
        f"SELECT {_COLUMNS} FROM audit AS intended "
        f"WHERE phase = ? AND seq > (SELECT max(seq) FROM audit) - ? "
        f"AND NOT EXISTS (SELECT 1 FROM audit WHERE act = intended.act AND phase = ?) ORDER BY seq",
        (INTENT, among, RESULT),
    )
    return [AuditRow(*row) for row in found]


def key_named(chain: Iterable[AuditRow], key: str) -> int:
    """The newest row that says that the key of this id signs heads; 0: none does, it did from the start."""
    named = canonical_json({"key": key})
    return max((row.seq for row in chain if row.action == KEY_ACTION and row.params == named), default=0)


def head(connection: sqlite3.Connection) -> Head:
    """The newest row; `Head(0, GENESIS_HASH)` of an empty chain."""
    row = connection.execute("SELECT seq, hash FROM audit ORDER BY seq DESC LIMIT 1").fetchone()
    return Head(0, GENESIS_HASH) if row is None else Head(*row)


def rows_of(connection: sqlite3.Connection, action: str) -> list[AuditRow]:
    """All rows of an action, oldest first."""
    found = connection.execute(f"SELECT {_COLUMNS} FROM audit WHERE action = ? ORDER BY seq", (action,))
    return [AuditRow(*row) for row in found]


def all_rows(connection: sqlite3.Connection) -> Iterator[AuditRow]:
    """The whole chain, oldest first. A byte that is no text any more comes as a surrogate, which no row was
    hashed with."""
    cursor = connection.cursor()
    connection.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    for row in cursor.execute(f"SELECT {_COLUMNS} FROM audit ORDER BY seq"):
        yield AuditRow(*row)


def verify(connection: sqlite3.Connection, recorded: Iterable[Head] = ()) -> Verdict:
    """Check the whole chain, and that it holds every head in `recorded` (kept outside the database).

    Returns the first fault by seq. Without recorded heads, rows cut off the end show only while
    `sqlite_sequence` still tells, and a chain rewritten as a whole does not show at all.
    """
    return check(all_rows(connection), recorded, highest_seq_given(connection))


def check(chain: Iterable[AuditRow], recorded: Iterable[Head] = (), highest_seq: int = 0) -> Verdict:
    """`verify` of rows from anywhere, which go on to `highest_seq` at least."""
    expected: dict[int, set[str]] = {}
    for known in recorded:
        if known.seq > 0:
            expected.setdefault(known.seq, set()).add(known.hash)
    last = Head(0, GENESIS_HASH)
    vouched = 0  # the newest row that a recorded head vouches for
    try:
        for row in chain:
            hashes = expected.pop(row.seq, None)
            problem = _problem(row, last, hashes, vouched)
            if problem is not None:
                return Verdict(last.seq, last, *problem)
            last = Head(row.seq, row.hash)
            if hashes is not None:
                vouched = row.seq
    except sqlite3.DatabaseError as error:
        return Verdict(last.seq, last, last.seq + 1, f"cannot be read: {error}")
    highest = max([highest_seq, *expected])
    if highest > last.seq:
        missing = f"row {highest} is" if highest == last.seq + 1 else f"rows {last.seq + 1} to {highest} are"
        return Verdict(last.seq, last, last.seq + 1, f"{missing} missing from the end")
    return Verdict(last.seq, last)


def _problem(row: AuditRow, last: Head, recorded: set[str] | None, vouched: int) -> tuple[int, str] | None:
    """The first seq that is wrong, and what is wrong, given the sound row before; None for a sound row."""
    if row.seq != last.seq + 1:
        return last.seq + 1, f"missing: row {row.seq} follows row {last.seq}"
    if any(value is not None and not isinstance(value, str) for value in row[1:]):
        return row.seq, "rewritten: a value of it is not a text"
    if row.previous_hash != last.hash:
        return row.seq, f"rewritten: its previous_hash is not the hash of row {last.seq}"
    if row.hash != row_hash(row):
        return row.seq, "rewritten: its hash does not match its content"
    if recorded is not None and recorded != {row.hash}:
        other = sorted(recorded - {row.hash})[0]
        since = f" (rows up to {vouched} hold)" if vouched else ""
        return row.seq, (
            f"rewritten, it or a row before it{since}: its hash is {row.hash}, recorded outside was {other}"
        )
    return None


def highest_seq_given(connection: sqlite3.Connection) -> int:
    """The highest seq that the table ever gave, by SQLite's own count."""
    row = connection.execute("SELECT seq FROM sqlite_sequence WHERE name = 'audit'").fetchone()
    return 0 if row is None else int(row[0])


def _storable(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()
