"""Reads and verifies the audit trail: the chain in `control.db`, the chain heads recorded outside it, and the
entries in the spool. Needs only read permission; the service need not be running."""

from __future__ import annotations

import json
import os
import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from store import audit, exports
from store.audit import INTENT, Entry, Head, Verdict
from store.control_schema import CONTROL
from store.database import reading
from store.errors import StoreError, explain_os
from store.heads import (
    HEADS_FILE,
    KEY_FILE,
    ROWS_BETWEEN_HEADS,
    SignedHead,
    SigningKey,
    heads_in,
    read_key,
)
from store.spool import SPOOL_FILE, read_spool

AUDIT_FILES = ("control.db", KEY_FILE, HEADS_FILE, SPOOL_FILE)
"""The files in a state directory that hold the audit trail."""


class Recorded(NamedTuple):
    """A recorded chain head and its source."""

    head: Head
    source: str
    signed: SignedHead | None = None
    """The head with its signature, or None if it was recorded without one."""


class Findings(NamedTuple):
    """The result of `examine`."""

    verdict: Verdict
    problems: list[str]
    """Descriptions of the faults found. Any fault in the chain comes first."""
    notes: list[str]
    """Remarks, for example about checks that could not be made."""
    sources: dict[str, int]
    """Number of recorded heads that the chain was checked against, by source."""
    confirmed_seq: int
    """Seq of the newest row confirmed by a recorded head."""
    spooled: int

    @property
    def heads(self) -> int:
        """Number of recorded heads that the chain was checked against."""
        return sum(self.sources.values())

    @property
    def ok(self) -> bool:
        """True if no fault was found."""
        return not self.problems


class AuditAction(msgspec.Struct, frozen=True, kw_only=True):
    """An operator's action. Times are in ISO 8601. The fields are in the order of the columns that `_ACTIONS`
    selects. The keys in JSON have the same order."""

    seq: int | None
    """Sequence number of the audit chain row with the action's intent. Null while the action is still in the
    spool."""
    result_seq: int | None
    """Sequence number of the row with the action's result."""
    at: str
    ended_at: str | None
    actor: str
    host: str | None
    action: str
    params: Any
    """The action's parameters, without secrets. This field, `before` and `after` are JSON values, or strings
    if the stored text is not valid JSON."""
    result: str | None
    """"ok", or the error. Null if no result has been recorded."""
    before: Any
    after: Any
    note: str | None

    @property
    def began_at(self) -> float | None:
        """`at` in unix seconds, or None if it is not a time."""
        return audit.unix_time(self.at)


class ActionFilter(NamedTuple):
    """Conditions that select actions; None matches any value."""

    actor: str | None = None
    """The actor's name. `uid:0` also matches actions that this user performed with a key."""
    action: str | None = None
    """Name of the action, or a prefix ending with a dot, such as `keys.`."""
    since: str | None = None
    """Include only actions that started at or after this time, in ISO 8601 (UTC)."""
    until: str | None = None
    """Include only actions that started at or before this time, in ISO 8601 (UTC)."""


_ACTIONS = """
SELECT
    first.seq, last.seq, first.at, ifnull(last.at, CASE WHEN first.phase IS NOT 'intent' THEN first.at END),
    first.actor, first.host, first.action, first.params,
    CASE WHEN first.phase IS 'intent' THEN last.result ELSE first.result END,
    CASE WHEN first.phase IS 'intent' THEN last.before ELSE first.before END,
    CASE WHEN first.phase IS 'intent' THEN last.after ELSE first.after END,
    coalesce(last.note, first.note)
FROM audit AS first
LEFT JOIN audit AS last ON last.act = first.act AND last.phase = 'result' AND first.phase = 'intent'
WHERE (first.phase IS NOT 'result'
    OR NOT EXISTS (SELECT 1 FROM audit WHERE act = first.act AND phase = 'intent'))
"""

_MAX_ACTION_ROWS = 10_000
"""`read_changed_actions` looks for an action's result only within this many rows after the intent, to avoid
reading the whole chain."""


def read_actions(
    path: Path,
    wanted: ActionFilter,
    limit: int,
    *,
    before: int | None = None,
    limit_s: float | None = None,
) -> list[AuditAction]:
    """Return the newest `limit` matching actions, oldest first, through a read-only connection. If `before`
    is given, return only actions whose first row precedes the row with this seq. `limit_s` is the time limit
    of the call, in seconds. Raises `StoreError` on failure."""
    sql, values = _ACTIONS, list[Any]()
    if before is not None:
        sql += " AND first.seq < ?"
        values.append(before)
    if wanted.actor is not None:
        sql += " AND (first.actor = ? OR first.actor LIKE ? || ' %')"
        values += [wanted.actor, wanted.actor]
    if wanted.action is not None:
        begins = wanted.action.endswith(".")
        sql += " AND substr(first.action, 1, length(?)) = ?" if begins else " AND first.action = ?"
        values += [wanted.action] * (2 if begins else 1)
    if wanted.since is not None:
        sql += " AND first.at >= ?"
        values.append(wanted.since)
    if wanted.until is not None:
        sql += " AND first.at <= ?"
        values.append(wanted.until)
    with reading(path, CONTROL, limit_s) as connection:
        found = connection.execute(f"{sql} ORDER BY first.seq DESC LIMIT ?", (*values, limit)).fetchall()
    return [_action(row) for row in reversed(found)]


def read_changed_actions(path: Path, after: int, limit: int, *, limit_s: float) -> list[AuditAction]:
    """Return the first `limit` actions that have a row with a seq above `after`, ordered by their newest row.
    Raises `StoreError` on failure."""
    sql = f"{_ACTIONS} AND ifnull(last.seq, first.seq) > ? AND first.seq > ? "
    since = max(0, after - _MAX_ACTION_ROWS)
    with reading(path, CONTROL, limit_s) as connection:
        found = connection.execute(
            f"{sql} ORDER BY ifnull(last.seq, first.seq) LIMIT ?", (after, since, limit)
        ).fetchall()
    return [_action(row) for row in found]


def matches_action(record: AuditAction, wanted: ActionFilter) -> bool:
    """Return True if an action matches the filter, as in `read_actions`."""
    actor, action, since, until = wanted
    by = actor is None or record.actor == actor or record.actor.startswith(f"{actor} ")
    named = (
        action is None
        or record.action == action
        or (action.endswith(".") and record.action.startswith(action))
    )
    began = (since is None or record.at >= since) and (until is None or record.at <= until)
    return by and named and began


def spooled_actions(folder: Path) -> list[AuditAction]:
    """Return the actions waiting in the spool in `folder`, oldest first. Raises `StoreError` on failure."""
    found: dict[str, AuditAction] = {}
    for entry in spooled_entries(folder):
        intended = found.get(entry.act or "")
        ended = entry.phase != INTENT
        found[entry.act or ""] = AuditAction(
            seq=None,
            result_seq=None,
            at=intended.at if intended else entry.at,
            ended_at=entry.at if ended else None,
            actor=entry.actor,
            host=entry.host,
            action=entry.action,
            params=_value(entry.params),
            result=entry.result if ended else None,
            before=_value(entry.before),
            after=_value(entry.after),
            note="waiting in the spool",
        )
    return list(found.values())


def _action(row: tuple[Any, ...]) -> AuditAction:
    """Return the action in a row that `_ACTIONS` selects."""
    fields = dict(zip(AuditAction.__struct_fields__, row, strict=True))
    return AuditAction(**fields | {name: _value(fields[name]) for name in ("params", "before", "after")})


def _value(text: str | None) -> Any:
    try:
        return json.loads(text or "null")
    except ValueError:
        return text  # A row that was tampered with may contain invalid JSON.


def read_audit_head(path: Path) -> Head:
    """Return the audit chain's head, to be recorded outside the database. Raises `StoreError` on failure."""
    with reading(path, CONTROL) as connection:
        return audit.head(connection)


def verify_audit(path: Path, recorded: Iterable[Head] = ()) -> Verdict:
    """Verify the audit chain in the database at `path`, through a read-only connection. Raises `StoreError`
    on failure."""
    with reading(path, CONTROL) as connection:
        return audit.verify(connection, recorded)


def spooled_entries(folder: Path) -> list[Entry]:
    """Return the audit entries waiting in the spool in `folder`. Raises `StoreError` on failure."""
    try:
        return read_spool(folder / SPOOL_FILE).entries
    except OSError as error:
        raise explain_os(folder / SPOOL_FILE, error) from error


def read_heads(path: Path) -> list[Recorded]:
    """Return the chain heads found in a file of any format. Raises `StoreError` on failure."""
    try:
        with path.open(encoding="utf-8", errors="replace") as lines:
            return recorded_in(lines, str(path))
    except OSError as error:
        raise explain_os(path, error) from error


def recorded_in(lines: Iterable[str], source: str) -> list[Recorded]:
    """Return the chain heads found in lines of text."""
    return [Recorded(signed.head, source, signed) for signed in heads_in(lines)]


def examine_folder(folder: Path, recorded: Iterable[Recorded] = ()) -> Findings:
    """Check the audit chain in the state directory `folder` against the heads recorded there and those in
    `recorded`.

    Raises `StoreError` if the files cannot be read at all.
    """
    problems: list[str] = []
    notes: list[str] = []
    known = list(recorded)
    has_rows = read_audit_head(folder / "control.db").seq > 0
    try:
        known += read_heads(folder / HEADS_FILE)
    except StoreError as error:
        if has_rows:
            problems.append(f"the recorded heads of the audit chain cannot be read: {error}")
    key = None
    try:
        key = read_key(folder / KEY_FILE)
    except StoreError as error:
        unchecked = f"the signatures of recorded heads were not checked: {error}"
        # An auditor may not be able to read the key file, but the file must exist.
        kept_from_us = (folder / KEY_FILE).exists() and not os.access(
            folder / KEY_FILE, os.R_OK, effective_ids=True
        )
        (problems if has_rows and not kept_from_us else notes).append(unchecked)
    waiting = spooled_entries(folder)
    if waiting:
        first = waiting[0].at
        entries = (
            f"1 entry from {first} is" if len(waiting) == 1 else f"{len(waiting)} entries since {first} are"
        )
        notes.append(f"{entries} waiting in {folder / SPOOL_FILE} and not in the chain yet")
    found = examine(folder / "control.db", known, key)
    newest = found.verdict.head.seq
    newer = newest - max(found.confirmed_seq, _recorded_by_now(folder, newest))
    if found.verdict.ok and newer > ROWS_BETWEEN_HEADS and not waiting:
        problems.append(
            f"no recorded head confirms the last {newer} rows, although the service records a head at "
            f"least every {ROWS_BETWEEN_HEADS} rows: lines were removed from {folder / HEADS_FILE} "
            "or never written to it"
        )
    return found._replace(problems=found.problems + problems, notes=found.notes + notes, spooled=len(waiting))


def _recorded_by_now(folder: Path, seq: int) -> int:
    """Return the seq of the newest recorded head at or before row `seq`. The heads file is reread, because a
    running service may have added heads."""
    try:
        return max((head.seq for head, _, _ in read_heads(folder / HEADS_FILE) if head.seq <= seq), default=0)
    except StoreError:
        return 0


def examine(path: Path, recorded: Iterable[Recorded] = (), key: SigningKey | None = None) -> Findings:
    """Check the audit chain in the database or export at `path` against recorded heads. If `key` is given,
    signatures are also checked, and heads with a wrong signature are ignored. Raises `StoreError` on
    failure."""
    known = list(recorded)
    exported = exports.is_export(path)
    trailer = None
    if exported:
        rows, trailer = exports.read(path)
        highest = trailer.head.seq if trailer else 0
        since = 0 if key is None else audit.key_named(rows, key.id)

        def checked(heads: list[Recorded]) -> Verdict:
            return audit.check(rows, [one.head for one in heads], highest)
    else:
        since = 0 if key is None else _key_named(path, key.id)

        def checked(heads: list[Recorded]) -> Verdict:
            return verify_audit(path, [one.head for one in heads])

    signed, replaced, forged = _by_signature(known, key, since)
    verdict = checked(signed)
    problems = [
        f"the head of row {one.head.seq} in {one.source} is not signed by this service: it was signed "
        "with another key, or it was forged"
        for one in forged
    ]
    notes = []
    if exported:
        problems += exports.problems_of(trailer, verdict.head, key)
    if verdict.problem is not None:
        problems.insert(0, f"row {verdict.broken_seq}: {verdict.problem}")
    elif replaced:
        # These heads' signatures can no longer be checked, but their hashes must still match.
        older = checked(replaced)
        if older.problem is not None:
            problems.insert(
                0,
                f"row {older.broken_seq}: {older.problem} (according to a head signed with the key used "
                f"before row {since})",
            )
        else:
            notes.append(
                f"1 recorded head was signed with an earlier key, which was replaced in row {since}: "
                "its hash matches, but its signature cannot be checked"
                if len(replaced) == 1
                else f"{len(replaced)} recorded heads were signed with an earlier key, which was replaced in "
                f"row {since}: their hashes match, but their signatures cannot be checked"
            )
    heads = [one.head for one in signed]
    confirmed = max([head.seq for head in heads if head.seq <= verdict.head.seq], default=0)
    if verdict.ok and confirmed < verdict.head.seq:
        newer = verdict.head.seq - confirmed
        notes.append(
            f"the last {newer} rows are newer than any recorded head, so their removal would not be detected"
            if newer > 1
            else "the last row is newer than any recorded head, so its removal would not be detected"
        )
    sources = dict(Counter(one.source for one in (*signed, *replaced)))
    return Findings(verdict, problems, notes, sources, confirmed, 0)


def _by_signature(
    known: list[Recorded], key: SigningKey | None, since: int
) -> tuple[list[Recorded], list[Recorded], list[Recorded]]:
    """Sort heads into three lists:

    - heads signed with this key, and heads that need no signature,
    - heads of rows before `since`, which were signed with an earlier key (row `since` records the replacement
      of that key),
    - heads with a wrong signature."""
    signed, replaced, forged = [], [], []
    for one in known:
        if key is None or one.signed is None or key.signed_head(one.signed):
            signed.append(one)
        elif one.signed.key != key.id and one.head.seq < since:
            replaced.append(one)
        else:
            forged.append(one)
    return signed, replaced, forged


def _key_named(path: Path, key: str) -> int:
    with reading(path, CONTROL) as connection:
        try:
            return audit.key_named(audit.rows_of(connection, audit.KEY_ACTION), key)
        except sqlite3.DatabaseError:
            return 0  # `verify` names the damaged row
