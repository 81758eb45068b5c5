"""Stores prompts and answers in `contents.db`. The tenant's log policy determines whether they are stored as
text with secrets removed, as hashes, or not at all. Prompts and answers are more sensitive than the request
log, so they are kept in a separate file that only the service's user can open. Operators can read them only
through an audited action."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path

import msgspec

from store.database import insert_sql, reading
from store.schemas import CONTENTS
from store.structs import KeptText
from store.writer import Writer

MAX_WAITING_BYTES = 32 << 20
"""Maximum total size of texts waiting in memory to be committed. Texts beyond this limit are dropped and
counted."""


class Content(KeptText, frozen=True, kw_only=True):
    """A request's prompt or answer: a row of the `contents` table, with one field per column."""

    request_id: str
    tenant: str
    created_at: float
    """When the request was created, in unix seconds. The retention period starts at this time."""


_COLUMNS = Content.__struct_fields__
_INSERT = insert_sql("contents", _COLUMNS, "INSERT OR IGNORE")


class ContentLog:
    """Writes contents through `writer`, which must have the schema `store.schemas.CONTENTS`. Safe to call
    from any thread."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._waiting_bytes = 0
        self._dropped = 0

    @property
    def dropped(self) -> int:
        """Number of requests whose contents were dropped because too many texts were waiting or the database
        could not store them."""
        return self._dropped

    def keep(self, contents: Iterable[Content]) -> bool:
        """Queue a request's contents for writing. Never blocks. Returns False if the contents were
        dropped."""
        rows = [msgspec.structs.astuple(content) for content in contents]
        size = sum(len(value) for row in rows for value in row if isinstance(value, str))
        with self._lock:
            fits = self._waiting_bytes + size <= MAX_WAITING_BYTES
            self._waiting_bytes += size if fits else 0
            self._dropped += not fits
        if not fits:
            self._writer.count_dropped(len(rows))
            return False
        written = self._writer.submit_for_result(partial(_insert, rows))
        written.add_done_callback(partial(self._done, size))
        return True

    def _done(self, size: int, written: Future[None]) -> None:
        with self._lock:
            self._waiting_bytes -= size
            self._dropped += written.exception() is not None


def _insert(rows: list[tuple[object, ...]], connection: sqlite3.Connection) -> None:
    connection.executemany(_INSERT, rows)


def read_contents(path: Path, request_id: str) -> list[Content]:
    """Read a request's stored contents, prompts first, through a read-only connection. Raises `StoreError` on
    failure."""
    with reading(path, CONTENTS) as connection:
        rows = connection.execute(
            f"SELECT {', '.join(_COLUMNS)} FROM contents WHERE request_id = ? ORDER BY part DESC, number",
            (request_id,),
        ).fetchall()
    return [_content(row) for row in rows]


def _content(row: tuple[object, ...]) -> Content:
    fields = dict(zip(_COLUMNS, row, strict=True))
    return msgspec.convert({**fields, "truncated": bool(fields["truncated"])}, Content)
