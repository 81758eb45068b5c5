"""The thread that writes to a database. Each database has exactly one. Operations are functions that take the
connection. They run in the order of submission. Two methods submit operations:

- `submit` never blocks and never raises. Operations share commits: a commit follows after at most 200 ms or
  500 operations. While the disk refuses writes, operations wait in memory, up to a limit. A full disk
  therefore does not stop the service from answering requests.
- `call` returns a future. The operation runs in a separate transaction, and the future resolves once it is
  committed.

An operation submitted with `submit` may run again after a rollback, so it must change nothing outside the
database.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from store.database import Synchronous, WritableDatabase
from store.errors import StorageFaultError, StoreError, WriterClosedError, explain, is_own_fault, primary_code
from store.migrations import Schema
from store.structs import WriterState

log = logging.getLogger(__name__)

T = TypeVar("T")
Operation = Callable[[sqlite3.Connection], T]

_FIRST_RETRY_S = 0.2
_LAST_RETRY_S = 2.0
COMMIT_INTERVAL_S = 0.2
_BATCH_ROWS = 500
_LOOK_EVERY_S = 2.0
"""Interval at which an idle writer checks whether its file has been deleted or replaced on disk."""
_PROGRESS_EVERY_S = 0.1
"""Interval at which `close` checks whether the writer is making progress."""

# After these errors, the connection can be kept: it works again once the cause is gone.
_KEEP_CONNECTION = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED})


class _Item(NamedTuple):
    operation: Operation[Any]
    submitted_at: float
    """When the operation was submitted, from `time.monotonic()`."""
    future: Future[Any] | None
    """Future for the operation's result. If set, a caller is waiting, so the item is committed
    immediately."""
    once: bool
    """Whether the operation runs in a separate transaction and only once. If it fails, it is not retried, and
    the future raises the error."""
    after_commit: Callable[[Any], None] | None
    begin_by: float | None = None
    """Latest time at which the operation may start, from `time.monotonic()`. If it has not started by then,
    it fails."""


class Writer:
    """Owns the only connection that writes to the database at `path`, and the thread that uses it from
    `start()` to `close()`. All methods may be called from any thread. `submit` holds a lock only for
    microseconds, so it may be called on an event loop.
    """

    def __init__(
        self,
        path: Path,
        schema: Schema,
        *,
        synchronous: Synchronous,
        spool_rows: int = 50_000,
    ) -> None:
        """`spool_rows` limits the number of operations that wait in memory. At about 1 KB per operation, the
        default allows 50 MB."""
        self.path = path
        self._schema = schema
        self._synchronous = synchronous
        self._spool_rows = spool_rows
        self._thread = threading.Thread(target=self._run, name=f"write {path.name}", daemon=True)
        self._opened: Future[None] = Future()
        # Only the writer thread uses the next two attributes.
        self._database: WritableDatabase | None = None
        self._refused = False  # Whether the disk refused the latest write.

        # The condition's lock guards all attributes below.
        self._condition = threading.Condition()
        self._queue: deque[_Item] = deque()
        self._urgent = 0  # Number of queued items with a future.
        self._close_within_s = 0.0
        self._close_by: float | None = None
        self._last_error: str | None = None
        self._failing_since: float | None = None
        self._retry_at = 0.0
        self._retry_s = _FIRST_RETRY_S
        self._busy_since: float | None = None
        self._committed_rows = 0
        self._dropped_rows = 0
        self._rejected_rows = 0
        self._restored = ""
        self._look_at = 0.0

    # ── methods for any thread ─────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        """Open the database, creating or migrating it if necessary, and start writing.

        Raises `StoreError` for a problem that an operator must fix. A full or failing disk raises no error:
        the writer keeps operations in memory, reports the fault in `state()` and in the log, and opens the
        database as soon as the disk allows.
        """
        self._thread.start()
        self._opened.result()

    def submit(self, operation: Operation[object]) -> bool:
        """Submit an operation to be committed soon. Returns False if it was dropped (spool full, or writer
        closed)."""
        return self._enqueue(_Item(operation, time.monotonic(), None, False, None))

    def call(
        self,
        operation: Operation[T],
        after_commit: Callable[[T], None] | None = None,
        *,
        within_s: float | None = None,
    ) -> Future[T]:
        """Run `operation` in a separate transaction. After the commit, the future resolves to the operation's
        result. An operation that has not begun within `within_s` seconds never runs, and its future raises a
        `StorageFaultError`.

        An exception in the operation rolls the transaction back and is raised by the future; disk faults are
        raised as a `StoreError`. `after_commit` runs on the writer thread before the future resolves.
        """
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        now = time.monotonic()
        begin_by = None if within_s is None else now + within_s
        self._enqueue(_Item(operation, now, future, True, after_commit, begin_by))
        return future

    def submit_for_result(self, operation: Operation[T]) -> Future[T]:
        """Submit an operation to be committed immediately and return a future for its result. As with
        `submit`, the operation shares its commit and is retried while the disk refuses writes."""
        future: Future[T] = Future()
        future.set_running_or_notify_cancel()
        self._enqueue(_Item(operation, time.monotonic(), future, False, None))
        return future

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until all operations submitted before this call are committed. Returns False if that takes
        longer than `timeout_s`."""
        try:
            self.submit_for_result(_nothing).result(timeout_s)
        except (TimeoutError, StoreError):
            return False
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Commit the waiting operations, leave the file complete and readable without write permission, and
        stop the thread.

        Operations that the disk still refuses `timeout_s` seconds after the latest commit are lost; they are
        counted and logged. Calling this method again does nothing.
        """
        with self._condition:
            if self._close_by is None:
                self._close_within_s, self._close_by = timeout_s, time.monotonic() + timeout_s
            self._condition.notify_all()
        if self._thread.ident is None:
            return
        # Besides the next commit, allow time for a checkpoint and for readers to close the file. Time during
        # which this thread is not scheduled is not counted.
        limit_s = left_s = timeout_s + 10.0
        while self._thread.is_alive() and left_s > 0:
            before = self._busy_since, self._committed_rows
            self._thread.join(_PROGRESS_EVERY_S)
            has_progressed = before != (self._busy_since, self._committed_rows)
            left_s = limit_s if has_progressed else left_s - _PROGRESS_EVERY_S
        if self._thread.is_alive():
            log.error(
                "%s was not closed cleanly, because the disk did not respond within %.0f s",
                self.path,
                limit_s,
            )

    def count_dropped(self, rows: int) -> None:
        """Count rows that the caller dropped to limit memory use."""
        with self._condition:
            self._dropped_rows += rows

    def state(self) -> WriterState:
        """Return the writer's current state."""
        with self._condition:
            now = time.monotonic()
            return WriterState(
                lag_rows=len(self._queue),
                lag_ms=(now - self._queue[0].submitted_at) * 1000 if self._queue else 0.0,
                last_error=self._last_error,
                failing_s=0.0 if self._failing_since is None else now - self._failing_since,
                committed_rows=self._committed_rows,
                dropped_rows=self._dropped_rows,
                rejected_rows=self._rejected_rows,
                restored=self._restored,
            )

    @property
    def stalled_s(self) -> float:
        """How long the thread has spent on its current operation, in seconds; 0 while it waits for work. A
        high value means that the disk is not responding but has not reported an error."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def _enqueue(self, item: _Item) -> bool:
        with self._condition:
            closed = self._close_by is not None
            if not closed and len(self._queue) < self._spool_rows:
                self._queue.append(item)
                if item.future is not None:
                    self._urgent += 1
                # The thread sleeps until the first item's commit is due. Wake it only if this item makes the
                # commit due earlier.
                if item.future is not None or len(self._queue) in (1, _BATCH_ROWS):
                    self._condition.notify()
                return True
            self._dropped_rows += 1
            dropped = self._dropped_rows
        reason = (
            "is closed"
            if closed
            else f"has reached its limit of {self._spool_rows} waiting rows ({self._last_error})"
        )
        if item.future is not None:
            error = WriterClosedError if closed else StorageFaultError
            item.future.set_exception(error(f"{self.path}: the writer {reason}; the change was not made"))
        if dropped == 1 or dropped % 1000 == 0:
            log.error("%s: a row was dropped (%d so far): the writer %s", self.path, dropped, reason)
        return False

    # ── methods of the writer thread ───────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        try:
            self._open()
        except StorageFaultError as error:
            self._note_failure(str(error))
        except BaseException as error:
            self._opened.set_exception(error)
            self._give_up_the_rest()
            return
        self._opened.set_result(None)
        while (batch := self._wait_for_batch()) is not None:
            self._busy_since = time.monotonic()
            self._write(batch)
            self._busy_since = None
        self._give_up_the_rest()
        if self._database is not None:
            try:
                self._open()
            except StoreError as error:
                log.error("%s", error)
        if self._database is not None:
            self._database.close()

    def _wait_for_batch(self) -> list[_Item] | None:
        """Return the operations to commit next, oldest first. An empty list means that there is nothing to
        commit but the file must be checked or reopened. None means that the thread must exit."""
        with self._condition:
            while True:
                now = time.monotonic()
                # While closing, the writer gives up only if the disk refuses writes.
                give_up_at = self._close_by if self._refused else None
                if give_up_at is not None and now >= give_up_at:
                    return None
                if self._close_by is not None and not self._queue:
                    return None
                due = self._due()
                if now >= due:
                    self._look_at = now + _LOOK_EVERY_S
                    return self._next_batch()
                self._condition.wait((due if give_up_at is None else min(due, give_up_at)) - now)

    def _due(self) -> float:
        if self._failing_since is not None:
            return self._retry_at
        if not self._queue:
            return self._look_at
        if self._urgent or self._close_by is not None or len(self._queue) >= _BATCH_ROWS:
            return 0.0
        return self._queue[0].submitted_at + COMMIT_INTERVAL_S

    def _next_batch(self) -> list[_Item]:
        batch: list[_Item] = []
        for item in islice(self._queue, _BATCH_ROWS):
            if item.once:
                return batch or [item]
            batch.append(item)
        return batch

    def _write(self, batch: list[_Item]) -> None:
        if batch and (begin_by := batch[0].begin_by) is not None and time.monotonic() > begin_by:
            waited_s = time.monotonic() - batch[0].submitted_at
            reason = self._last_error or "another program may have locked the file, or the disk is slow"
            error = StorageFaultError(
                f"{self.path} could not be written for {waited_s:.0f} s ({reason}); the change was not made"
            )
            self._fail(batch[0], error)
            return
        try:
            database = self._open()
        except StoreError as error:
            self._note_failure(str(error))
            if batch and batch[0].once:
                self._fail(batch[0], error)
            return
        try:
            self._commit(database, batch)
        except Exception as error:
            if batch[0].once:
                self._fail(batch[0], error if is_own_fault(error) else self._explained(error))
            elif is_own_fault(error):
                self._write_one_by_one(database, batch)
            else:
                self._note_failure(str(self._explained(error)))

    def _write_one_by_one(self, database: WritableDatabase, batch: list[_Item]) -> None:
        # One operation in the batch can never be written. Write each separately, so that the faulty one does
        # not block the rest.
        for item in batch:
            try:
                self._commit(database, [item])
            except Exception as error:
                if not is_own_fault(error):
                    self._note_failure(str(self._explained(error)))
                    return
                log.error("%s: a row was rejected and discarded: %r", self.path, error)
                self._fail(item, error)

    def _open(self) -> WritableDatabase:
        if self._database is not None and (description := self._database.displaced()):
            self._write_back(self._database, description)
        if self._database is None:
            self._database = WritableDatabase(self.path, self._schema, self._synchronous)
        return self._database

    def _write_back(self, database: WritableDatabase, description: str) -> None:
        began = time.monotonic()
        aside = database.write_back(self._note_progress)
        done = "the service restored it from the open file, so no rows are missing"
        other = f"; the file found in its place was renamed to {aside}" if aside else ""
        self._restored = f"{description}: {done}{other}"
        log.warning("%s (restored in %.1f s)", self._restored, time.monotonic() - began)
        database.abandon()
        self._database = None

    def _note_progress(self) -> None:
        self._busy_since = time.monotonic()

    def _commit(self, database: WritableDatabase, batch: list[_Item]) -> None:
        if not batch:
            self._note_success([])
            return
        connection = database.connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            results = [item.operation(connection) for item in batch]
            connection.execute("COMMIT")
        except BaseException as error:
            self._refused = not is_own_fault(error)
            self._roll_back(database, error)
            raise
        self._note_success(batch)
        for item, result in zip(batch, results, strict=True):
            _deliver(item, result)

    def _roll_back(self, database: WritableDatabase, error: BaseException) -> None:
        keep = is_own_fault(error) or (
            isinstance(error, sqlite3.Error) and primary_code(error) in _KEEP_CONNECTION
        )
        try:
            # SQLite has already rolled back after some errors; rollback() then does nothing.
            database.connection.rollback()
        except sqlite3.Error:
            keep = False
        if not keep:
            database.abandon()
            self._database = None

    def _explained(self, error: Exception) -> Exception:
        return explain(self.path, error) if isinstance(error, sqlite3.Error) else error

    def _pop(self, count: int) -> None:
        for _ in range(count):
            if self._queue.popleft().future is not None:
                self._urgent -= 1

    def _fail(self, item: _Item, error: Exception) -> None:
        """Remove the oldest item from the queue without writing it."""
        with self._condition:
            self._pop(1)
            if not item.once:
                self._rejected_rows += 1
        if item.future is not None:
            item.future.set_exception(error)

    def _note_success(self, batch: list[_Item]) -> None:
        with self._condition:
            self._pop(len(batch))
            self._refused = False
            if batch and self._close_by is not None:
                self._close_by = time.monotonic() + self._close_within_s
            self._committed_rows += sum(item.operation is not _nothing for item in batch)
            failing_since, self._failing_since, self._last_error = self._failing_since, None, None
            self._retry_s = _FIRST_RETRY_S
            waiting = len(self._queue)
        if failing_since is not None:
            seconds = time.monotonic() - failing_since
            log.warning(
                "%s can be written again after %.1f s; %d rows are still waiting", self.path, seconds, waiting
            )

    def _note_failure(self, message: str) -> None:
        with self._condition:
            news = message != self._last_error
            self._last_error, self._refused = message, True
            now = time.monotonic()
            if self._failing_since is None:
                self._failing_since = now
            self._retry_at = now + self._retry_s
            self._retry_s = min(self._retry_s * 2, _LAST_RETRY_S)
            waiting = len(self._queue)
        if news:
            log.error("%s; %d rows are waiting in memory, and writing will be retried", message, waiting)

    def _give_up_the_rest(self) -> None:
        with self._condition:
            if self._close_by is None:
                self._close_by = time.monotonic()  # Stop processing the queue.
            rest = list(self._queue)
            self._pop(len(rest))
            self._dropped_rows += len(rest)
            reason = self._last_error or "the writer closed"
        if rest:
            log.error("%s: %d rows dropped (%s)", self.path, len(rest), reason)
        message = f"{self.path}: the change was not made before the writer closed ({reason})"
        for item in rest:
            if item.future is not None:
                item.future.set_exception(WriterClosedError(message))


def _nothing(connection: sqlite3.Connection) -> None:
    """Do nothing. `flush` submits this operation and waits until it has been committed."""


def _deliver(item: _Item, result: object) -> None:
    """Resolve the future of a committed item. Never raises, because a committed item must not be run
    again."""
    try:
        if item.after_commit is not None:
            item.after_commit(result)
    except Exception as error:
        log.exception("the callback for a committed change failed")
        if item.future is not None:
            item.future.set_exception(error)
        return
    if item.future is not None:
        item.future.set_result(result)
