"""Reads the request log, the audit trail and usage for the admin API. SQLite is read in two threads, never on
the event loop. Each page is read through a new database connection, with limits on rows, bytes and time, so
that no caller can monopolise the disk or memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec

from appliance.admin.query import QueryError
from appliance.admin.streams import Streams, lines_of
from appliance.admin.usage import UsageReader
from appliance.core.log_lines import LogLines
from appliance.pages import (
    AuditPage,
    AuditQuery,
    LogPage,
    LogQuery,
    NamedRequest,
    RequestLogQuery,
    RequestPage,
    UsageQuery,
    UsageReport,
)
from appliance.settings import ModelPrices
from store.control import ControlStore
from store.evidence import matches_action, read_actions, read_changed_actions, spooled_actions
from store.requests import LoggedRequest, RequestPosition, RequestReader
from store.writer import Writer

Result = TypeVar("Result")

MAX_READ_S = 2.0
"""Time limit for reading one page, in seconds."""
MAX_PAGE_BYTES = 1 << 20
"""A request log page ends once its texts exceed this total size, in bytes."""
_FOLLOWED_ROWS = 200
_THREADS = 2


class LogReading:
    """Reads the logs page by page and follows them. Must be used on the event loop thread."""

    def __init__(
        self,
        history: Writer,
        control: ControlStore,
        lines: LogLines,
        streams: Streams,
        prices: Callable[[], Mapping[str, ModelPrices]],
    ) -> None:
        """`prices` returns each model's prices."""
        self._usage = UsageReader(history.path, prices, lambda: control.policies, MAX_READ_S)
        self._history = history
        self._control = control
        self._lines = lines
        self._streams = streams
        self._requests = RequestReader(history.path, limit_s=MAX_READ_S, limit_bytes=MAX_PAGE_BYTES)
        self.threads = ThreadPoolExecutor(_THREADS, "admin-reads")
        """Thread pool for reading the databases and, for snapshots, the machine's load."""

    def close(self) -> None:
        """Stop the threads once the reads in progress have finished."""
        self.threads.shutdown()

    # ── pages ──

    async def request_page(self, query: RequestLogQuery) -> RequestPage:
        """Return a page of the request log. Raises QueryError if the query is invalid, and StoreError if the
        database fails."""
        before = None if query.before is None else _position(query.before)

        def read() -> RequestPage:
            sequence = self._requests.last_sequence()
            # Fetch one row more than the page holds, to find out whether there is a next page.
            rows = self._requests.query(query, query.limit + 1, before)[::-1]
            shown = rows[: query.limit]
            size = sum(_size(row) for row in shown)
            more = len(rows) > query.limit or size > MAX_PAGE_BYTES
            return RequestPage(
                rows=self._named(shown),
                next=_cursor(shown[-1]) if more else None,
                sequence=sequence,
            )

        return await self._in_thread(read)

    async def audit_page(self, query: AuditQuery) -> AuditPage:
        """Return a page of the audit trail. Raises StoreError if the database fails."""

        def read() -> AuditPage:
            sequence = self._control.trail.state().head.seq
            found = read_actions(
                self._control.path, query.filter, query.limit + 1, before=query.before, limit_s=MAX_READ_S
            )[::-1]
            waiting = spooled_actions(self._control.path.parent) if query.before is None else []
            shown = found[: query.limit]
            rows = [action for action in reversed(waiting) if matches_action(action, query.filter)] + shown
            more = len(found) > query.limit
            return AuditPage(rows=rows, next=shown[-1].seq if more else None, sequence=sequence)

        return await self._in_thread(read)

    async def usage_report(self, query: UsageQuery) -> UsageReport:
        """Return usage per day, tenant, key or model. Raises QueryError if the query is invalid, and
        StoreError if the database fails."""
        return await self._in_thread(lambda: self._usage.report(query))

    def log_page(self, query: LogQuery) -> LogPage:
        """Return lines from the service's log."""
        return self._lines.page(query)

    # ── following ──

    def follow_requests(self, query: RequestLogQuery) -> AsyncIterator[bytes]:
        """Return a stream that yields each request when it ends, or when it is admitted if the query selects
        open requests."""
        wanted = msgspec.structs.replace(query, state=query.state or "ended")
        after = query.after

        def read() -> tuple[list[NamedRequest], bool]:
            nonlocal after
            if after is None:
                after = self._requests.last_sequence()
                return [], False
            # Also advance past rows that do not match the query, so that they are not read again.
            latest = self._requests.last_sequence()
            rows = self._requests.changes(after, _FOLLOWED_ROWS, wanted)
            more = len(rows) == _FOLLOWED_ROWS or sum(map(_size, rows)) > MAX_PAGE_BYTES
            after = rows[-1].sequence if more else max(latest, *(row.sequence for row in rows[-1:]), after)
            return self._named(rows), more

        return self._follow(lambda: self._history.state().committed_rows, read)

    def follow_audit(self, query: AuditQuery) -> AsyncIterator[bytes]:
        """Return a stream that yields each action twice: when it starts and when it ends."""
        after = query.after

        def head() -> int:
            return self._control.trail.state().head.seq

        def read() -> tuple[list[msgspec.Struct], bool]:
            nonlocal after
            if after is None:
                after = head()
                return [], False
            found = read_changed_actions(self._control.path, after, _FOLLOWED_ROWS, limit_s=MAX_READ_S)
            if found:
                after = max(found[-1].result_seq or 0, found[-1].seq or 0)
            shown = [action for action in found if matches_action(action, query.filter)]
            return list(shown), len(found) == _FOLLOWED_ROWS

        return self._follow(head, read)

    def follow_log(self, query: LogQuery) -> AsyncIterator[bytes]:
        """Return a stream that yields new lines from the service's log."""
        after = self._lines.number if query.after is None else query.after

        async def read() -> tuple[list[bytes], bool]:
            nonlocal after
            page = self._lines.page(msgspec.structs.replace(query, after=after, limit=_FOLLOWED_ROWS))
            more = len(page.lines) == _FOLLOWED_ROWS
            after = page.lines[-1].number if more else page.number
            return lines_of(page.lines), more

        return self._streams.follow(lambda: self._lines.number, read)

    def _follow(
        self, version: Callable[[], object], read: Callable[[], tuple[list[Result], bool]]
    ) -> AsyncIterator[bytes]:
        def encoded() -> tuple[list[bytes], bool]:
            rows, more = read()
            return lines_of(rows), more

        return self._streams.follow(version, lambda: self._in_thread(encoded))

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self.threads, work)

    def _named(self, rows: list[LoggedRequest]) -> list[NamedRequest]:
        keys = self._control.policies.keys
        named = []
        for row in rows:
            key = keys.get(row.key_id or "")
            named.append(
                NamedRequest(**msgspec.structs.asdict(row), key_name=None if key is None else key.name)
            )
        return named


def _size(row: LoggedRequest) -> int:
    return sum(len(value) for value in msgspec.structs.astuple(row) if type(value) is str)


def _cursor(row: LoggedRequest) -> str:
    return f"{row.created_at!r}:{row.request_id}"


def _position(cursor: str) -> RequestPosition:
    at, _, request_id = cursor.partition(":")
    try:
        return RequestPosition(float(at), request_id)
    except ValueError:
        raise QueryError(
            f"before={cursor!r} is not valid: use the 'next' field of the previous page"
        ) from None
