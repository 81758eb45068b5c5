"""Admin API responses that stay open and send lines of JSON (`application/x-ndjson`). After a few seconds
without data, an empty line is sent so that both sides notice a broken connection. A response that cannot
continue ends with a line that contains only an `error` field.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import msgspec
from starlette.responses import Response, StreamingResponse

from appliance.protocol import StreamEnd
from store.errors import StoreError

MAX_STREAMS = 32
"""Maximum number of open streams. The limit keeps some of the admin socket's connections free for
other calls."""
HEARTBEAT_S = 5.0
HEARTBEAT = b"\n"
CONTENT_TYPE = "application/x-ndjson"
_POLL_S = 0.25
_UNREADABLE_FOR_S = 10.0
"""Time in seconds after which a stream ends if its database cannot be read."""


class TooManyStreamsError(Exception):
    """Raised if no more streams can be opened."""


class Streams:
    """Counts the open streams and ends them all when the service stops."""

    def __init__(self) -> None:
        self.open = 0
        self.closing = False

    def close(self) -> None:
        """End all streams within one polling interval."""
        self.closing = True

    def response(self, lines: AsyncIterator[bytes]) -> Response:
        """Return a response that sends these lines as they become available. Raises TooManyStreamsError if
        the maximum number of streams is already open."""
        if self.open >= MAX_STREAMS or self.closing:
            raise TooManyStreamsError(
                f"{self.open} streams are open, which is the maximum: close one, or retry later"
            )

        async def counted() -> AsyncIterator[bytes]:
            self.open += 1
            try:
                async for piece in lines:
                    yield piece
            finally:
                self.open -= 1

        return StreamingResponse(counted(), media_type=CONTENT_TYPE)

    async def follow(
        self, version: Callable[[], object], read: Callable[[], Awaitable[tuple[list[bytes], bool]]]
    ) -> AsyncIterator[bytes]:
        """Call `read` whenever the result of `version` changes and yield the lines that `read` returns.
        `read` also returns whether more lines can be read immediately."""
        seen: object = None
        sent_at = time.monotonic()
        failing_since: float | None = None
        while not self.closing:
            lines, more, current = list[bytes](), False, version()
            if current != seen:
                try:
                    lines, more = await read()
                    seen = seen if more else current
                    failing_since = None
                except StoreError as error:
                    failing_since = failing_since or time.monotonic()
                    if time.monotonic() - failing_since > _UNREADABLE_FOR_S:
                        yield end_of_stream(str(error))
                        return
            if lines or time.monotonic() - sent_at > HEARTBEAT_S:
                sent_at = time.monotonic()
                yield b"".join(lines) or HEARTBEAT
            if not more:
                await asyncio.sleep(_POLL_S)


def lines_of(values: Iterable[Any]) -> list[bytes]:
    """Encode each value as a line of JSON."""
    encode = msgspec.json.Encoder().encode
    return [encode(value) + b"\n" for value in values]


def end_of_stream(error: str) -> bytes:
    """Return the last line of a stream that cannot continue."""
    return msgspec.json.encode(StreamEnd(error=error)) + b"\n"
