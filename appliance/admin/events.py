"""The event stream, which sends snapshots of the service several times a second, as frames
(`appliance.events.frames`). Readers that use the same rate share snapshots and their encoding, so an
additional reader costs only the time to write the bytes. Readers have no queues: each gets the newest frame
when its connection accepts bytes, and a full snapshot if it has missed frames. While there are no readers, no
snapshots are taken.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from appliance.admin.log_routes import answered
from appliance.admin.query import parse_query, query_parameters
from appliance.admin.streams import HEARTBEAT, HEARTBEAT_S, Streams
from appliance.events.frames import EventsQuery, Frame, signature
from appliance.http.openapi import Operation
from appliance.protocol import ErrorBody
from appliance.scopes import ScopedRoute
from appliance.snapshot import Snapshot, UnfinishedRequest

log = logging.getLogger(__name__)

_SNAPSHOT_FIELDS = tuple(name for name in Snapshot.__struct_fields__ if name != "requests")


ReadSnapshot = Callable[[], Awaitable[Snapshot]]


class EventFeed:
    """Encodes each frame once and shares it among all readers that use the same rate. Must be used on the
    event loop thread."""

    def __init__(self, read: ReadSnapshot, interval_s: float) -> None:
        self._read = read
        self._interval_s = interval_s
        self._encode = msgspec.json.Encoder().encode
        self._seq = 0
        self._fields: dict[str, bytes] = {}
        self._requests: list[UnfinishedRequest] = []
        self._signatures: dict[str, tuple[object, ...]] = {}
        self._tokens: dict[str, int | None] = {}
        self._at = 0.0
        self.delta = b""
        self._whole: bytes | None = None
        self._new = asyncio.Event()
        self._readers = 0
        self._task: asyncio.Task[None] | None = None

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield frames as lines of JSON until the iterator is closed."""
        # The latest snapshot may be old, because no snapshots are taken while there are no readers.
        idle = self._task is None or self._task.done()
        seen, last = self._seq if idle else self._seq - 1, -1
        self._readers += 1
        if idle:
            self._task = asyncio.create_task(self._tick_while_read())
        try:
            while True:
                while self._seq <= max(seen, 0):
                    try:
                        async with asyncio.timeout(HEARTBEAT_S):
                            await self._new.wait()
                    except TimeoutError:
                        yield HEARTBEAT
                line = self.delta if last == self._seq - 1 else self.whole_line()
                seen = last = self._seq
                yield line
        finally:
            self._readers -= 1

    async def _tick_while_read(self) -> None:
        while self._readers:
            began = time.monotonic()
            try:
                self.take(await self._read())
            except Exception:
                log.exception("a snapshot for the event stream could not be read")
            self._new.set()
            self._new = asyncio.Event()
            await asyncio.sleep(max(0.05, self._interval_s - (time.monotonic() - began)))

    def take(self, snapshot: Snapshot) -> None:
        """Build the next frame, which contains the changes since the previous snapshot."""
        self._seq += 1
        self._at, self._requests, self._whole = snapshot.at, snapshot.requests, None
        changed = {}
        for name in _SNAPSHOT_FIELDS:
            value = self._encode(getattr(snapshot, name))
            if value != self._fields.get(name):
                self._fields[name] = value
                changed[name] = msgspec.Raw(value)
        former, known_tokens = self._signatures, self._tokens
        self._signatures, self._tokens = {}, {}
        changed_requests, tokens = [], {}
        for one in snapshot.requests:
            name = one.request_id
            found = self._signatures[name] = signature(one)
            self._tokens[name] = one.generated_tokens
            if former.get(name) != found:
                changed_requests.append(one)
            elif one.generated_tokens is not None and known_tokens.get(name) != one.generated_tokens:
                tokens[name] = one.generated_tokens
        frame = Frame(
            seq=self._seq,
            at=self._at,
            fields=changed,
            requests=changed_requests,
            ended=[name for name in former if name not in self._signatures],
            generated_tokens=tokens,
        )
        self.delta = self._encode(frame) + b"\n"

    def whole_line(self) -> bytes:
        """Return a frame that contains the latest snapshot in full."""
        if self._whole is None:
            frame = Frame(
                seq=self._seq,
                whole=True,
                at=self._at,
                fields={name: msgspec.Raw(value) for name, value in self._fields.items()},
                requests=self._requests,
            )
            self._whole = self._encode(frame) + b"\n"
        return self._whole


class EventFeeds:
    """The event feeds, one per frame rate."""

    def __init__(self, reader: Callable[[int], ReadSnapshot], streams: Streams) -> None:
        """`reader` takes a feed's rate, in frames per second, and returns the function that takes snapshots
        for this feed."""
        self._reader = reader
        self._streams = streams
        self._feeds: dict[int, EventFeed] = {}

    async def follow(self, query: EventsQuery) -> AsyncGenerator[bytes, None]:
        """Yield frames until the service stops."""
        feed = self._feeds.get(query.hz)
        if feed is None:
            feed = self._feeds[query.hz] = EventFeed(self._reader(query.hz), 1.0 / query.hz)
        frames, left = feed.frames(), query.frames
        try:
            async for line in frames:
                if self._streams.closing:
                    return
                yield line
                if left is not None and line != HEARTBEAT:
                    left -= 1
                    if not left:
                        return
        finally:
            await frames.aclose()


def event_route(feeds: EventFeeds, streams: Streams) -> ScopedRoute:
    """Return the event stream's route."""

    async def events(request: HttpRequest) -> Response:
        return streams.response(feeds.follow(parse_query(request, EventsQuery)))

    operation = Operation(
        "Follow the service state",
        answer=Frame,
        description="Each line of the response is a frame (application/x-ndjson).",
        errors=dict.fromkeys((400, 401, 403, 503), ErrorBody),
        parameters=query_parameters(EventsQuery),
    )
    return ScopedRoute("GET", "/events", answered(events), wanted="read", operation=operation)
