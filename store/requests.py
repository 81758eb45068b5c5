"""The request log in `history.db`: one row a request, opened when it is admitted and ended exactly once.

`RequestLog` writes, through the writer thread, and never blocks. `RequestReader` reads in any process.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from store.database import reading
from store.schemas import HISTORY
from store.writer import Writer

log = logging.getLogger(__name__)

# A client chooses some of the texts (model, error). More than this tells nobody more, and memory holds the
# spool.
_TEXT_LIMIT_CHARS = 2000


class RequestRow(msgspec.Struct, frozen=True, kw_only=True, rename={"request_class": "class"}):
    """What is kept of one request. Times in unix seconds; no prompt and no answer.

    A row is open while `finished_at` is None; the fields of the end are known then. Fields are columns of the
    table (`request_class` is the column `class`).
    """

    request_id: str
    created_at: float
    finished_at: float | None = None
    tenant: str | None = None
    key_id: str | None = None
    peer: str | None = None
    """`uid 1000` on the Unix socket, else the address."""
    endpoint: str
    model: str | None = None
    version: str | None = None
    request_class: str = "P1"
    """P0 (real-time) to P3 (background)."""
    stream: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache; part of `prompt_tokens`."""
    generated_tokens: int = 0
    billed_tokens: int = 0
    queue_ms: float | None = None
    ttft_ms: float | None = None
    itl_ms: float | None = None
    """Mean time between tokens after the first."""
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
    """Held by token quotas: reserved while it is open, taken when it has ended. 0: it never ran, and was no
    request to a quota either."""
    retry: str | None = None
    """With an `Idempotency-Key` that was known: "joined" (it was answered from a run under way), "repeated"
    (from its kept answer) or "anew" (it ran: the answer of the run before was lost). None: no retry."""
    retry_of: str | None = None
    """The request whose run that was."""
    user: str | None = None
    """The field `user` of the request's body: the client's own name for its end user."""


class LoggedRequest(RequestRow, frozen=True, kw_only=True):
    """A row as read back."""

    sequence: int
    """Order of the row's last change; `RequestReader.changes` goes by it."""
    state: Literal["open", "ended"]
    double_ends: int
    """How often the request was ended again after its end; 0 in a correct service."""


_COLUMNS = RequestRow.__struct_encode_fields__
_LOGGED_COLUMNS = ", ".join(LoggedRequest.__struct_encode_fields__)
_INSERT = (
    f"INSERT INTO requests ({', '.join(_COLUMNS)}, sequence) VALUES ({', '.join('?' * (len(_COLUMNS) + 1))}) "
    f"ON CONFLICT (request_id) "
)
_OPEN = _INSERT + "DO NOTHING"
# The first end stands: a row that has one is left alone, and the changed-row count of 0 tells.
_END = (
    _INSERT
    + "DO UPDATE SET "
    + ", ".join(f"{column} = excluded.{column}" for column in (*_COLUMNS[1:], "sequence"))
    + " WHERE requests.finished_at IS NULL"
)


class RequestLog:
    """Writes request rows through `writer`, which must have `store.schemas.HISTORY` as its schema."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._last_sequence: int | None = None  # the writer thread's alone

    def open(self, row: RequestRow) -> bool:
        """Log an admitted request. Never blocks; False if the row was dropped (counted in the writer's
        state).

        Raises `ValueError` for a row that has its end already.
        """
        if row.finished_at is not None:
            raise ValueError(
                f"request {row.request_id} has finished_at {row.finished_at}: end() takes ended rows"
            )
        return self._writer.submit(partial(self._write_open, row))

    def end(self, row: RequestRow) -> bool:
        """Log the end of a request: `row` replaces the open one, or is inserted where there is none. Never
        blocks; False if the row was dropped. Of two ends the first stands, and the row counts the other in
        `double_ends`.

        Raises `ValueError` for a row without `finished_at`.
        """
        if row.finished_at is None:
            raise ValueError(
                f"request {row.request_id} has no finished_at: set it to the unix time of its end"
            )
        return self._writer.submit(partial(self._write_end, row))

    def seal_open_rows(self, reason: str) -> Future[int]:
        """End every row that is open now, with status 500 and finish reason `interrupted`: for the start
        after a crash, before the first `open`. The future has their number; they are sealed in order with
        what is submitted later even if the disk refuses at first, so nobody need wait for it.
        """
        return self._writer.submit_for_result(partial(self._write_seals, reason, time.time()))

    def _write_open(self, row: RequestRow, connection: sqlite3.Connection) -> None:
        if self._execute(connection, _OPEN, row) == 0:
            log.error("request %s was opened twice: the first row stands", row.request_id)

    def _write_end(self, row: RequestRow, connection: sqlite3.Connection) -> None:
        if self._execute(connection, _END, row) == 0:
            log.error("request %s was ended twice: the first end stands", row.request_id)
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
            # A lone surrogate from a client's JSON must not cost the row.
            return connection.execute(sql, [_storable(value) for value in values]).rowcount

    def _next_sequence(self, connection: sqlite3.Connection) -> int:
        # Numbers of a transaction that was rolled back are not used again; gaps mean nothing.
        if self._last_sequence is None:
            found = connection.execute("SELECT max(sequence) FROM requests").fetchone()[0]
            self._last_sequence = 0 if found is None else int(found)
        self._last_sequence += 1
        return self._last_sequence


class RequestFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests to find; None asks nothing of a field. Times in unix seconds, of `created_at`."""

    since: float | None = None
    until: float | None = None
    """The first moment that is too late."""
    request_id: str | None = None
    tenant: str | None = None
    key_id: str | None = None
    peer: str | None = None
    model: str | None = None
    request_class: str | None = None
    state: Literal["open", "ended"] | None = None
    status: int | None = None
    finish_reason: str | None = None
    failed: bool | None = None
    """True: those with a status of 400 or more, or an error; False: the other ended ones."""


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


class RequestReader:
    """Reads the request log at `path`, from any process and without write rights, while the service runs or
    not.

    Each call opens and closes its own connection, so that a reader never keeps the file in WAL mode over a
    stop of the service. Calls block for milliseconds, and raise a `StoreError`. All lists have the oldest row
    first.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def tail(self, limit: int) -> list[LoggedRequest]:
        """The `limit` rows that changed last."""
        return self._read("ORDER BY sequence DESC LIMIT ?", (_checked(limit),))[::-1]

    def query(self, wanted: RequestFilter, limit: int) -> list[LoggedRequest]:
        """The `limit` youngest requests that match every field of `wanted`, by `created_at`."""
        conditions, values = ["true"], []
        for field, value in msgspec.structs.asdict(wanted).items():
            if value is not None:
                conditions.append(_CONDITIONS[field])
                values.append(_storable(value))
        where = f"WHERE {' AND '.join(conditions)} ORDER BY created_at DESC, sequence DESC LIMIT ?"
        return self._read(where, (*values, _checked(limit)))[::-1]

    def changes(self, after: int, limit: int = 1000) -> list[LoggedRequest]:
        """The first `limit` rows that were opened or ended after the change with sequence `after`, in that
        order.

        A row appears with its latest state: one that was opened and ended since appears once, ended.
        """
        return self._read("WHERE sequence > ? ORDER BY sequence LIMIT ?", (after, _checked(limit)))

    def follow(self, after: int | None = None, poll_s: float = 0.25) -> Iterator[LoggedRequest]:
        """`changes` for ever: yields rows as they are committed, sleeping in between. None: from now on."""
        last = self.last_sequence() if after is None else after
        while True:
            for row in self.changes(last):
                last = row.sequence
                yield row
            time.sleep(poll_s)

    def last_sequence(self) -> int:
        """The sequence of the latest change; 0 in an empty log."""
        return int(self._fetch("SELECT ifnull(max(sequence), 0) FROM requests", ())[0][0])

    def double_ends(self) -> int:
        """How many ends came after a request's end, over all rows. Anything but 0 is a fault of the
        service."""
        return int(
            self._fetch("SELECT ifnull(sum(double_ends), 0) FROM requests WHERE double_ends > 0", ())[0][0]
        )

    def _read(self, clauses: str, values: tuple[object, ...]) -> list[LoggedRequest]:
        return [
            _logged(row) for row in self._fetch(f"SELECT {_LOGGED_COLUMNS} FROM requests {clauses}", values)
        ]

    def _fetch(self, sql: str, values: tuple[object, ...]) -> list[Any]:
        with reading(self.path, HISTORY) as connection:
            return connection.execute(sql, values).fetchall()


def _logged(values: tuple[Any, ...]) -> LoggedRequest:
    fields = dict(zip(LoggedRequest.__struct_fields__, values, strict=True))
    fields["stream"] = bool(fields["stream"])
    return LoggedRequest(**fields)


def _storable(value: Any) -> Any:
    """`value` with code points that UTF-8 cannot carry written as escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def _checked(limit: int) -> int:
    if limit < 1:
        raise ValueError(f"limit is {limit}, and must be at least 1")
    return limit
