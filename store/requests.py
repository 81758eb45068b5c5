"""The request log in `history.db`. It has one row per request, which is opened at admission and closed
exactly once. `RequestLog` writes through the writer thread and never blocks. `RequestReader` can read from
any process."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from store.database import insert_sql, reading
from store.fields import ClassName
from store.schemas import HISTORY
from store.usage import add_ended
from store.writer import Writer

log = logging.getLogger(__name__)

# Clients control the text of some fields (model, error). Truncate long texts so that rows waiting in memory
# stay small.
_TEXT_LIMIT_CHARS = 2000
MAX_EXAMINED = 20_000
"""Maximum number of requests that `RequestReader.unfinished` examines."""

Time = Annotated[float, msgspec.Meta(ge=-1e11, le=1e11)]
Text = Annotated[str, msgspec.Meta(max_length=400)]
RowState = Literal["open", "ended"]


class RequestRow(msgspec.Struct, frozen=True, kw_only=True, rename={"request_class": "class"}):
    """A request's record, without its prompt and answer. Times are in unix seconds. A row is open while
    `finished_at` is None; fields such as `finish_reason` are set when the row is closed. Each field is a
    column of the `requests` table; `request_class` is stored in the `class` column."""

    request_id: str
    created_at: float
    finished_at: float | None = None
    tenant: str | None = None
    key_id: str | None = None
    peer: str | None = None
    """The connected client: a user such as `uid 1000` on the Unix socket, otherwise an address."""
    endpoint: str
    model: str | None = None
    version: str | None = None
    request_class: ClassName = "P1"
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Number of prompt tokens found in the prefix cache. `prompt_tokens` includes them."""
    generated_tokens: int = 0
    billed_tokens: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Mean time between output tokens, starting at the first."""
    e2e_ms: float | None = None
    finish_reason: str | None = None
    status: int | None = None
    """HTTP status code."""
    error: str | None = None
    batch_size_at_start: int | None = None
    replica: str | None = None
    devices: str | None = None
    preemptions: int = 0
    resubmissions: int = 0
    quota_tokens: int = 0
    """Number of tokens charged to quotas. While the row is open, this is the number reserved; once the row is
    closed, it is the number used. 0 for a request that never ran; such a request does not count towards
    request quotas either."""
    retry: Literal["joined", "repeated", "anew"] | None = None
    """How a retry with a known `Idempotency-Key` was answered; None if the request is not a retry.

    - "joined": the retry waited for the first run to finish and got its response.
    - "repeated": the retry got the stored response of a finished run.
    - "anew": the request was run again, because the first run's response was not kept."""
    retry_of: str | None = None
    """Id of the earlier request whose response was returned to the retry."""
    user: str | None = None
    """The request body's `user` field, in which the client identifies its end user."""
    unit: str | None = None
    """The model that answered the request: its name in the settings, or NAME@VERSION for a version in the
    registry. It differs from `model` if `model` is an alias, a name with a split, or a model in the
    registry."""
    fallback_of: str | None = None
    """The model that was requested, if its fallback answered instead. `model` is then the fallback."""

    @property
    def failed(self) -> bool:
        """Whether the request ended with an error."""
        return self.error is not None or (self.status or 0) >= 400


class LoggedRequest(RequestRow, frozen=True, kw_only=True):
    """A request log row as read from the database."""

    sequence: int
    """Sequence number of the row's last change, used by `RequestReader.changes`."""
    state: RowState
    double_ends: int
    """Number of attempts to close the row after it had already been closed. Any value other than 0 indicates
    a bug in the service."""

    def stored(self, sequence: int) -> tuple[object, ...]:
        """Return the row's values in the column order of `INSERT_LOGGED`, with the given sequence number."""
        return (*(_storable(getattr(self, name)) for name in RequestRow.__struct_fields__), sequence)


_COLUMNS = RequestRow.__struct_encode_fields__
_LOGGED_COLUMNS = ", ".join(LoggedRequest.__struct_encode_fields__)
_INSERT = insert_sql("requests", (*_COLUMNS, "sequence")) + " ON CONFLICT (request_id) "
_OPEN = INSERT_LOGGED = _INSERT + "DO NOTHING"
# Only the first call closes a row. Closing it again changes no rows.
_END = (
    _INSERT
    + "DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in (*_COLUMNS[1:], "sequence"))
    + " WHERE requests.finished_at IS NULL"
)


class RequestLog:
    """Writes request rows through `writer`, which must have the schema `store.schemas.HISTORY`."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._last_sequence: int | None = None  # Used only by the writer thread.

    def open(self, row: RequestRow) -> bool:
        """Log an admitted request. Never blocks; returns False if the row was dropped (counted in the
        writer's state).

        Raises `ValueError` for a row that has `finished_at`.
        """
        if row.finished_at is not None:
            raise ValueError(
                f"request {row.request_id} has finished_at {row.finished_at}: pass the row of a "
                "finished request to end()"
            )
        return self._writer.submit(partial(self._write_open, row))

    def end(self, row: RequestRow) -> bool:
        """Log the end of a request. `row` replaces the open row, or is inserted if there is none. Never
        blocks; returns False if the row was dropped. If this is called more than once for a request, only the
        first call's row is kept, and `double_ends` counts the later calls.

        Raises `ValueError` for a row without `finished_at`.
        """
        if row.finished_at is None:
            raise ValueError(
                f"request {row.request_id} has no finished_at: set it to the unix time at which "
                "the request ended"
            )
        return self._writer.submit(partial(self._write_end, row))

    def seal_open_rows(self, reason: str) -> Future[int]:
        """Close all open rows, with status 500 and finish reason `interrupted`. Called at startup after a
        crash, before the first `open`. The future returns the number of closed rows. Callers need not wait
        for the future, because the open rows are always closed before any later row is written, even if the
        disk refuses writes at first."""
        return self._writer.submit_for_result(partial(self._write_seals, reason, time.time()))

    def _write_open(self, row: RequestRow, connection: sqlite3.Connection) -> None:
        if self._execute(connection, _OPEN, row) == 0:
            log.error("request %s was opened twice: only the first row is kept", row.request_id)

    def _write_end(self, row: RequestRow, connection: sqlite3.Connection) -> None:
        if self._execute(connection, _END, row):
            add_ended(connection, _storable(row.request_id))
        else:
            log.error("request %s was ended twice: only the first result is kept", row.request_id)
            connection.execute(
                "UPDATE requests SET double_ends = double_ends + 1 WHERE request_id = ?",
                (_storable(row.request_id),),
            )

    def _write_seals(self, reason: str, now: float, connection: sqlite3.Connection) -> int:
        open_ids = [
            row[0] for row in connection.execute("SELECT request_id FROM requests WHERE finished_at IS NULL")
        ]
        connection.executemany(
            "UPDATE requests SET finished_at = max(?, created_at), status = 500, "
            "finish_reason = 'interrupted', error = ?, sequence = ? WHERE request_id = ?",
            [(now, reason, self._next_sequence(connection), request_id) for request_id in open_ids],
        )
        for request_id in open_ids:
            add_ended(connection, request_id)
        return len(open_ids)

    def _execute(self, connection: sqlite3.Connection, sql: str, row: RequestRow) -> int:
        values = [
            value[:_TEXT_LIMIT_CHARS] if type(value) is str else value
            for value in msgspec.structs.astuple(row)
        ]
        values.append(self._next_sequence(connection))
        try:
            return connection.execute(sql, values).rowcount
        except UnicodeEncodeError:
            # A lone surrogate in a client's JSON must not prevent the row from being stored.
            return connection.execute(sql, [_storable(value) for value in values]).rowcount

    def _next_sequence(self, connection: sqlite3.Connection) -> int:
        # A rolled-back transaction's sequence numbers are not reused, so a gap does not mean that a row is
        # missing.
        if self._last_sequence is None:
            found = connection.execute("SELECT max(sequence) FROM requests").fetchone()[0]
            self._last_sequence = 0 if found is None else int(found)
        self._last_sequence += 1
        return self._last_sequence


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Conditions that select requests; None matches any value. Times are in unix seconds and are compared
    with `created_at`. Whether the values are within their limits is checked only when a client's query is
    parsed."""

    since: Time | None = None
    until: Time | None = None
    """Exclusive upper bound."""
    request_id: Text | None = None
    tenant: Text | None = None
    key_id: Text | None = None
    peer: Text | None = None
    """A client, such as "uid 1000"."""
    model: Text | None = None
    request_class: ClassName | None = msgspec.field(default=None, name="class")
    state: RowState | None = None
    status: Annotated[int, msgspec.Meta(ge=100, le=599)] | None = None
    """HTTP status code."""
    finish_reason: Text | None = None
    failed: bool | None = None
    """True selects requests with a status of 400 or more, or with an error. False selects all other closed
    requests."""


_FAILED = "(status >= 400 OR error IS NOT NULL)"
_CONDITIONS = {
    "since": "created_at >= ?",
    "until": "created_at < ?",
    "request_id": "request_id = ?",
    "tenant": "tenant = ?",
    "key_id": "key_id = ?",
    "peer": "peer = ?",
    "model": "model = ?",
    "request_class": "class = ?",
    "state": "state = ?",
    "status": "status = ?",
    "finish_reason": "finish_reason = ?",
    "failed": f"finished_at IS NOT NULL AND ifnull({_FAILED}, 0) = ?",
}


class RequestPosition(NamedTuple):
    """A request's position in the log, by order of arrival. A page contains the rows before a position."""

    created_at: float
    request_id: str


class RequestReader:
    """Reads the request log at `path` from any process, without write permission, whether or not the service
    is running.

    Each call opens and closes a connection, because an open connection would keep the file in WAL mode when
    the service stops. Each call blocks for a few milliseconds and raises `StoreError` if the log cannot be
    read. All lists are ordered oldest first.
    """

    def __init__(self, path: Path, *, limit_s: float | None = None, limit_bytes: int | None = None) -> None:
        """`limit_s` is the time limit per call; slower calls raise `SlowQueryError`. `limit_bytes` limits the
        total size of a list's texts: the list ends with the row that exceeds it."""
        self.path = path
        self._limit_s = limit_s
        self._limit_bytes = limit_bytes

    def query(
        self, wanted: RequestFilter, limit: int, before: RequestPosition | None = None
    ) -> list[LoggedRequest]:
        """Return the newest `limit` requests (by `created_at`) that match `wanted`. If `before` is given,
        return only requests before this position."""
        conditions, values = _where(wanted)
        if before is not None:
            conditions.append("(created_at, request_id) < (?, ?)")
            values += [before.created_at, _storable(before.request_id)]
        where = f"WHERE {' AND '.join(conditions)} ORDER BY created_at DESC, request_id DESC LIMIT ?"
        return self._read(where, (*values, _checked(limit)))[::-1]

    def changes(
        self, after: int, limit: int = 1000, wanted: RequestFilter | None = None
    ) -> list[LoggedRequest]:
        """Return the first `limit` rows that match `wanted` and have changed since sequence number `after`,
        ordered by their last change. Each row is returned once, in its latest state, so a row that was opened
        and then closed is returned as closed.
        """
        conditions, values = _where(wanted or RequestFilter())
        where = f"WHERE sequence > ? AND {' AND '.join(conditions)} ORDER BY sequence LIMIT ?"
        return self._read(where, (after, *values, _checked(limit)))

    def unfinished(self, at: float, limit: int) -> list[LoggedRequest]:
        """Return the oldest `limit` requests that were unfinished at the given time (unix seconds). Examines
        only the last `MAX_EXAMINED` requests that arrived before that time."""
        where = (
            "WHERE request_id IN (SELECT request_id FROM (SELECT request_id, finished_at FROM requests "
            "WHERE created_at <= ? ORDER BY created_at DESC LIMIT ?) WHERE finished_at IS NULL OR "
            "finished_at > ?) ORDER BY created_at, request_id LIMIT ?"
        )
        return self._read(where, (at, MAX_EXAMINED, at, _checked(limit)))

    def last_sequence(self) -> int:
        """Return the sequence number of the latest change; 0 for an empty log."""
        return int(self._fetch("SELECT ifnull(max(sequence), 0) FROM requests", ())[0][0])

    def double_ends(self) -> int:
        """Return the sum of `double_ends` over all rows. A value above 0 indicates a bug in the service."""
        return int(
            self._fetch("SELECT ifnull(sum(double_ends), 0) FROM requests WHERE double_ends > 0", ())[0][0]
        )

    def _read(self, clauses: str, values: tuple[object, ...]) -> list[LoggedRequest]:
        return [
            _logged(row) for row in self._fetch(f"SELECT {_LOGGED_COLUMNS} FROM requests {clauses}", values)
        ]

    def _fetch(self, sql: str, values: tuple[object, ...]) -> list[Any]:
        with reading(self.path, HISTORY, self._limit_s) as connection:
            cursor = connection.execute(sql, values)
            return cursor.fetchall() if self._limit_bytes is None else _within(cursor, self._limit_bytes)


def _where(wanted: RequestFilter) -> tuple[list[str], list[Any]]:
    """Return a filter's SQL conditions and the values for their placeholders."""
    conditions, values = ["true"], []
    for field in RequestFilter.__struct_fields__:
        value = getattr(wanted, field)
        if value is not None:
            conditions.append(_CONDITIONS[field])
            values.append(_storable(value))
    return conditions, values


def _within(rows: Iterable[tuple[Any, ...]], limit_bytes: int) -> list[Any]:
    """Return rows until the total size of their texts exceeds the limit. The row that exceeds the limit is
    included."""
    found, size = [], 0
    for row in rows:
        found.append(row)
        size += sum(len(value) for value in row if type(value) is str)
        if size > limit_bytes:
            break
    return found


def _logged(values: tuple[Any, ...]) -> LoggedRequest:
    fields = dict(zip(LoggedRequest.__struct_fields__, values, strict=True))
    fields["stream"] = bool(fields["stream"])
    return LoggedRequest(**fields)


def _storable(value: Any) -> Any:
    """Escape code points that UTF-8 cannot encode."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _checked(limit: int) -> int:
    if limit < 1:
        raise ValueError(f"limit is {limit}, but must be at least 1")
    return limit
