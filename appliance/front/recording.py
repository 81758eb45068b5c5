"""Records the answer of a run, so that any number of clients can read it, each at its own pace.

A recording takes the place of a client's connection: the run writes its response into the recording. The
first client and each retry follow the recording from its beginning.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from starlette.types import Message

from appliance.front.request_context import ResponseSink

MAX_LAG_BYTES = 4 << 20
"""If an answer is too long to be kept, this much of it is held for clients that read slowly."""
_PIECE_BYTES = 64 << 10
"""Maximum number of bytes given to a connection at once, so that the whole answer is not copied for a late
follower."""
_CHUNK_OVERHEAD_BYTES = 96
"""Memory overhead in Python of one chunk, in bytes."""


class TokenCounter(Protocol):
    """The part of a generation that counts the tokens that its client received."""

    delivered_tokens: int
    """Number of output tokens written so far."""


class Recording:
    """A response in memory. `grew` is called with the bytes of each addition; `orphaned` is called when the
    last follower leaves before the end."""

    writable = True
    lost = False

    def __init__(self, grew: Callable[[int], None], orphaned: Callable[[], None]) -> None:
        self.head: Message | None = None
        """Status and headers, once the response has begun."""
        self.ended = False
        self.broken = False
        """Whether the response is incomplete; its followers' connections are then closed."""
        self.counter: TokenCounter | None = None
        """The generation, while it runs. It is not kept with the answer."""
        self.on_writable: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self.last_chunk_at = 0.0
        self.followers: dict[Follower, None] = {}
        self._chunks: list[tuple[bytes, int]] = []
        """The chunks, each with the number of output tokens up to its end."""
        self._dropped = 0
        """Number of chunks that were removed from the beginning."""
        self._held_bytes = 0
        self._is_kept = True
        self._read_tokens = 0
        """Output tokens in the chunks that at least one follower has read."""
        self._grew = grew
        self._orphaned = orphaned

    @property
    def streamed(self) -> bool:
        """Whether the response is written while it is generated, without a length."""
        return self.head is not None and not any(
            name == b"content-length" for name, _ in self.head["headers"]
        )

    # ── methods that the run calls, for which the recording is the client ──

    async def send(self, message: Message) -> None:
        """Record a part of the response (ASGI)."""
        if message["type"] == "http.response.start":
            self.head = message
            self._wake()
            return
        body = message.get("body", b"")
        for start in range(0, len(body), _PIECE_BYTES):
            self.write_chunk(body[start : start + _PIECE_BYTES])
        if not message.get("more_body", False):
            self.end()

    def write_chunk(self, data: bytes) -> None:
        """Record a part of the body."""
        self.last_chunk_at = time.monotonic()
        self._chunks.append((data, self.counter.delivered_tokens if self.counter is not None else 0))
        size = len(data) + _CHUNK_OVERHEAD_BYTES
        self._held_bytes += size
        self._grew(size)
        self._wake()
        if not self._is_kept:
            self._trim()

    def release(self) -> None:
        """Remove the callbacks, because the run has ended."""
        self.on_writable = self.on_lost = None

    def abort(self) -> None:
        """End an incomplete response."""
        self.broken = not self.ended
        self.end()

    def cut_off(self) -> None:
        """Do nothing: a recording is never too slow."""

    def end(self) -> None:
        """Record that the response is complete, unless it ended before."""
        self.ended, self.counter = True, None
        self._wake()

    def give_up(self) -> None:
        """End the run, because no client waits for it. Tokens that no client has read are not billed."""
        if self.counter is not None:
            self.counter.delivered_tokens = self._read_tokens
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def stop_keeping(self) -> None:
        """From now on, drop the chunks that all followers have read, because no follower can join any
        more."""
        self._is_kept = False
        self._trim()

    def _wake(self) -> None:
        for follower in self.followers:
            follower.wake.set()

    def _trim(self) -> None:
        """Drop the chunks that all followers have read, and cut off followers that are too far behind."""
        positions = [follower.position for follower in self.followers]
        count = min(positions, default=self._dropped) - self._dropped
        self._held_bytes -= sum(len(data) + _CHUNK_OVERHEAD_BYTES for data, _ in self._chunks[:count])
        del self._chunks[:count]
        self._dropped += count
        if self._held_bytes > MAX_LAG_BYTES and self.streamed:
            for follower in [one for one in self.followers if one.position == self._dropped]:
                follower.connection.cut_off()

    # ── methods for followers ──

    def read(self, position: int) -> tuple[bytes, int]:
        """Return about `_PIECE_BYTES` from chunk `position` on, and the position after them; no bytes at the
        end."""
        start = end = position - self._dropped
        size = 0
        while end < len(self._chunks) and size < _PIECE_BYTES:
            size += len(self._chunks[end][0])
            end += 1
        if end > start:
            self._read_tokens = max(self._read_tokens, self._chunks[end - 1][1])
        return b"".join(data for data, _ in self._chunks[start:end]), self._dropped + end

    def remove(self, follower: Follower) -> None:
        """Remove a follower."""
        if self.followers.pop(follower, self) is None and not self.followers and not self.ended:
            self._orphaned()


class Follower:
    """One client's place in a recording, from its creation until `close`."""

    def __init__(self, recording: Recording, connection: ResponseSink) -> None:
        self.connection = connection
        self.position = 0
        self.left = connection.lost
        """Whether the client's connection is closed."""
        self.wake = asyncio.Event()
        """Set when the recording, or `left`, has changed."""
        self.first_bytes_at: float | None = None
        """Seconds of the monotonic clock."""
        self._recording = recording
        recording.followers[self] = None
        connection.on_lost = self._lost

    async def changed(self, timeout_s: float | None = None) -> bool:
        """Wait until the recording changes. Return False if it does not change in time."""
        try:
            await asyncio.wait_for(self.wake.wait(), timeout_s)
        except TimeoutError:
            return False
        self.wake.clear()
        return True

    def read(self) -> bytes:
        """Return the next bytes of the response; none at the end of what is recorded."""
        data, self.position = self._recording.read(self.position)
        if data and self.first_bytes_at is None:
            self.first_bytes_at = time.monotonic()
        return data

    def close(self) -> None:
        """Stop following the recording."""
        self.connection.release()
        self._recording.remove(self)

    def _lost(self) -> None:
        self.left = True
        self.wake.set()
        self._recording.remove(self)
