"""Reads the request log for `appliance requests` from one of two sources: the running service or the files in
a state directory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

from appliance import calls
from appliance.cli.failure import Failure
from appliance.cli.following import following
from appliance.client import AdminClient
from appliance.pages import MAX_PAGE_ROWS, NamedRequest, RequestLogQuery
from store.errors import CorruptDatabaseError, MissingDatabaseError, SchemaVersionError, StoreError
from store.requests import LoggedRequest, RequestReader

_POLL_S = 0.25
_UNREADABLE_FOR_S = 10.0
"""Time in seconds for which `--follow` tolerates an unreadable file. The service locks the file briefly when
starting and stopping."""


class Found(NamedTuple):
    """The request log rows that match a query, oldest first, and the log position at which they were read."""

    rows: list[NamedRequest]
    sequence: int


class RequestSource(Protocol):
    """A source from which the request log can be read."""

    name: str
    """Name of the request log's source, as shown in messages."""

    def newest(self, query: RequestLogQuery, limit: int) -> Found:
        """Return the newest `limit` requests that match the query."""

    def follow(self, query: RequestLogQuery, after: int) -> Iterator[NamedRequest]:
        """Yield each matching request when it ends, or when it is admitted if the query selects open
        requests. Never returns."""


class ServiceLog:
    """Reads the request log through the admin API."""

    def __init__(self, client: AdminClient) -> None:
        self.name = str(client.socket)
        self._client = client

    def newest(self, query: RequestLogQuery, limit: int) -> Found:
        """Return the newest `limit` requests that match the query."""
        rows: list[NamedRequest] = []
        before, sequence = None, None
        while len(rows) < limit:
            size = min(limit - len(rows), MAX_PAGE_ROWS)
            asked = msgspec.structs.replace(query, limit=size, before=before)
            page = self._client.call(calls.request_log(asked))
            rows += page.rows
            before, sequence = page.next, page.sequence if sequence is None else sequence
            if before is None:
                break
        return Found(rows[::-1], sequence or 0)

    def follow(self, query: RequestLogQuery, after: int) -> Iterator[NamedRequest]:
        """Yield matching requests when they end or are admitted."""

        def stream() -> Iterator[NamedRequest]:
            nonlocal after
            call = calls.follow_request_log(msgspec.structs.replace(query, after=after))
            for row in self._client.follow(call):
                after = row.sequence
                yield row

        return following(stream)


class FileLog:
    """Reads the request log from `history.db` in a state directory."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        self._reader = RequestReader(path)

    def newest(self, query: RequestLogQuery, limit: int) -> Found:
        """Return the newest `limit` requests that match the query."""
        try:
            sequence = self._reader.last_sequence()
            return Found([named(row) for row in self._reader.query(query, limit)], sequence)
        except StoreError as error:
            raise Failure(str(error)) from error

    def follow(self, query: RequestLogQuery, after: int) -> Iterator[NamedRequest]:
        """Yield matching requests when they end or are admitted."""
        wanted = msgspec.structs.replace(query, state=query.state or "ended")
        failing_since: float | None = None
        while True:
            try:
                changes = self._reader.changes(after, wanted=wanted)
                failing_since = None
            except (MissingDatabaseError, CorruptDatabaseError, SchemaVersionError) as error:
                raise Failure(str(error)) from error
            except StoreError as error:
                failing_since = failing_since or time.monotonic()
                if time.monotonic() - failing_since > _UNREADABLE_FOR_S:
                    raise Failure(str(error)) from error
                changes = []
            for row in changes:
                after = row.sequence
                yield named(row)
            if not changes:
                time.sleep(_POLL_S)


def named(row: LoggedRequest) -> NamedRequest:
    """Convert a row of `history.db` to a request. The key's name is left empty, because the file contains no
    key names."""
    return NamedRequest(**msgspec.structs.asdict(row))
