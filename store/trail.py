"""The running service's audit trail. Entries are appended to the chain, whose heads are recorded regularly.
While the database refuses writes, entries are stored in the spool and moved to the chain later.

    acting, recorded = trail.intend(actor, action, params)   before anything is done
    trail.append(connection, entry)                          within the transaction of a change, or
    trail.conclude(acting, action, …)                        if nothing changed in the database

Entries reach the chain in the order in which they were submitted, whether spooled or not.
"""

from __future__ import annotations

import contextlib
import logging
import sqlite3
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import NamedTuple

from store import audit
from store.audit import Actor, Entry, Head
from store.heads import HeadKeeper
from store.spool import Spool, SpoolState
from store.writer import Writer

log = logging.getLogger(__name__)

WITHIN_S = 5.0
"""Maximum time, in seconds, that a write to the control database waits before it starts. A change that has
waited longer fails with an error; an audit entry that has waited longer is spooled."""
_LOOKED_THROUGH = 10_000
"""Number of newest rows searched at startup for intents without a result."""


_SERVICE = "service"


class TrailState(NamedTuple):
    """The state of the audit trail."""

    head: Head
    """The newest row of the chain."""
    recorded_seq: int
    """Seq of the newest row whose head is recorded outside the database."""
    spool: SpoolState
    last_error: str | None
    """Why entries are being spooled, why heads cannot be recorded, or which rows are missing from the chain;
    None if there is no problem."""


class Appended(NamedTuple):
    """The entries that a transaction appended to the chain. Pass this to `AuditTrail.committed` after the
    commit."""

    head: Head
    from_spool: int


class AuditTrail:
    """Records audit entries in the chain or the spool. Its methods may be called from any thread, except
    `append` and `committed`, which may only be called from `writer` operations."""

    def __init__(self, writer: Writer, spool: Spool, heads: HeadKeeper) -> None:
        self._writer = writer
        self._spool = spool
        self._heads = heads
        self._refused: str | None = None
        self._shorter: str | None = None

    def start(self) -> None:
        """Append the entries that an earlier run left in the spool, add results for its unfinished intents,
        and record the head. If the database refuses writes, all of this is postponed."""
        self._heads.start()
        self._call(self._begin).exception()

    def close(self, timeout_s: float) -> None:
        """Try one last time to empty the spool and record the head. A disk that does not respond is given
        `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            self._call(self.append).exception(timeout_s)
        self._heads.record()
        self._spool.close()

    def intend(
        self, actor: Actor | str, action: str, params: Mapping[str, object]
    ) -> tuple[Actor, Future[None]]:
        """Record the intent of an action. Returns the actor with this action's id (`act`), and a future that
        resolves when the intent is recorded. The future never fails. If the database refuses the entry, the
        entry is spooled. If the spool file cannot be written either, the entry is kept in memory and logged.

        Raises `ValueError` or `TypeError` if JSON cannot represent a value in `params`.
        """
        acting = audit.as_actor(actor)._replace(act=audit.new_act())
        return acting, self._record(audit.intent(acting, action, params))

    def conclude(
        self,
        actor: Actor | str,
        action: str,
        params: Mapping[str, object],
        result: str,
        before: object = None,
        after: object = None,
    ) -> Future[None]:
        """Record an action's result, in the same way as `intend` records its intent. Does nothing if a
        change's transaction has already recorded the result.

        Raises `ValueError` or `TypeError` if JSON cannot represent a value.
        """
        return self._record(audit.outcome(actor, action, params, result, before, after))

    def retry(self) -> None:
        """Move spooled entries into the chain if the database accepts writes. Call this every few seconds."""
        if self._spool.state().rows:
            self._spool.retry()
            self._call(self.append)

    def record_head(self) -> None:
        """Record the newest head unless it is already recorded. Call this about once a minute."""
        self._writer.call(lambda connection: None, lambda _: self._heads.record())

    def state(self) -> TrailState:
        """Return the current state of the audit trail."""
        recorded = self._heads.recorded
        return TrailState(
            head=self._heads.newest,
            recorded_seq=0 if recorded is None else recorded.seq,
            spool=self._spool.state(),
            last_error=self._refused or self._shorter or self._heads.last_error,
        )

    # ── methods for the writer's thread ──

    def append(self, connection: sqlite3.Connection, entry: Entry | None = None) -> Appended:
        """Append the spooled entries, followed by `entry`, within the open transaction."""
        waiting = self._spool.waiting()
        late = audit.utc_now()
        for spooled in waiting:
            if not audit.holds(connection, spooled):
                note = f"spooled; written to the chain at {late}" + (
                    f"; {spooled.note}" if spooled.note else ""
                )
                audit.append(connection, spooled._replace(note=note))
        if entry is not None:
            audit.append(connection, entry)
        return Appended(audit.head(connection), len(waiting))

    def committed(self, appended: Appended) -> None:
        """Record the new head and remove the appended entries from the spool. Call this after the transaction
        has been committed."""
        # Record the head before removing entries from the spool. Otherwise, a crash in between would leave
        # rows with neither a recorded head nor a spooled entry, as if heads had been removed.
        self._heads.saw(appended.head)
        if appended.from_spool:
            self._spool.drop(appended.from_spool)
            log.warning("%d audit entries were moved from the spool to the audit chain", appended.from_spool)
        self._refused = None

    def refused(self, entry: Entry, error: BaseException) -> None:
        """Spool an entry whose transaction was refused by the database."""
        news, self._refused = self._refused is None, str(error)
        self._spool.put(entry)
        if news:
            place = self._spool.state().path or "memory only"
            log.error(
                "%s; until control.db accepts writes again, audit entries will be kept in %s", error, place
            )

    def _begin(self, connection: sqlite3.Connection) -> Appended:
        appended = self.append(connection)
        key, newest = self._heads.key_id, appended.head.seq
        if (beyond := self._heads.beyond(newest)) is not None:
            self._shorter = (
                f"the audit chain ends at row {newest}, but {self._heads.path} contains the head of row "
                f"{beyond.seq}, so control.db lacks all changes after row {newest}: stop the service, "
                "keep the files, and restore a backup (details: appliance audit verify)"
            )
            log.error("%s", self._shorter)
        named = audit.key_named(audit.rows_of(connection, audit.KEY_ACTION), key)
        if newest and self._heads.replaced_another(named, newest):
            log.warning("a new key now signs the heads of the audit chain: %s", key)
            audit.append(connection, audit.outcome(_SERVICE, audit.KEY_ACTION, {"key": key}, "ok"))
        for row in audit.unfinished(connection, _LOOKED_THROUGH):
            log.warning(
                "audit row %d: the result of %s by %s is unknown, because the service stopped before "
                "recording it",
                row.seq,
                row.action,
                row.actor,
            )
            audit.append(
                connection,
                Entry(
                    at=audit.utc_now(),
                    actor=row.actor,
                    action=row.action,
                    params=row.params,
                    result="unknown: the service stopped before the result was recorded",
                    host=row.host,
                    act=row.act,
                    phase=audit.RESULT,
                ),
            )
        return appended._replace(head=audit.head(connection))

    def _record(self, entry: Entry) -> Future[None]:
        recorded: Future[None] = Future()

        def settle(done: Future[Appended]) -> None:
            error = done.exception()
            if error is not None:
                self.refused(entry, error)
            recorded.set_result(None)

        def append_once(connection: sqlite3.Connection) -> Appended:
            return self.append(connection, None if audit.holds(connection, entry) else entry)

        self._writer.call(append_once, self.committed, within_s=WITHIN_S).add_done_callback(settle)
        return recorded

    def _call(self, operation: Callable[[sqlite3.Connection], Appended]) -> Future[Appended]:
        def note(done: Future[Appended]) -> None:
            error = done.exception()
            if error is not None:
                self._refused = str(error)

        future = self._writer.call(operation, self.committed)
        future.add_done_callback(note)
        return future
