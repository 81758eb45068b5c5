"""What one run answers, recorded, so that a client's retry can have it too.

A recording takes the connection's place: the response of a run is written into it as into a client's socket.
Each client that asked for the run, the first one included, follows the recording at its own pace.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from starlette.types import Message

from appliance.front.call import Client

_PIECE_BYTES = 64 << 10
"""Handed to a client's socket at once: a late follower must not have its whole answer copied."""
_CHUNK_OVERHEAD_BYTES = 96
"""What Python needs to keep one chunk."""
MOST_LAG_BYTES = 4 << 20
"""Held for a client that reads slower than an answer grows that is too long to be kept."""


class Counts(Protocol):
    """What a run counts."""

    delivered_tokens: int
    """Output tokens in all that was written so far."""


class Recording:
    """A response: its head, its body so far, and whether it has ended.

    `grew` is told of each addition in bytes; `orphaned` is called when the last follower leaves before the
    end.
    """

    writable = True
    """To whoever writes the answer, this is a client that takes everything."""
    lost = False

    def __init__(self, grew: Callable[[int], None], orphaned: Callable[[], None]) -> None:
        self.head: Message | None = None
        """Status and headers of the response, once it has begun."""
        self.ended = False
        self.broken = False
        """It ended before the answer was complete: its followers' connections are cut."""
        self.delivered_tokens = 0
        """Output tokens in what the follower that got most of it was handed."""
        self.counts: Counts | None = None
        """Of the run, while it runs."""
        self.on_writable: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        """Called when nobody waits for the answer any more."""
        self.followers: dict[Follower, None] = {}
        self._chunks: list[bytes] = []
        self._tokens: list[int] = []
        """With each chunk, the output tokens up to its end."""
        self._base = 0
        """Chunks that were dropped because everybody has them and nobody else will ask."""
        self._held = 0
        self._kept = True
        self._grew = grew
        self._orphaned = orphaned

    @property
    def status(self) -> int:
        """HTTP status code; 500 while there is none."""
        return 500 if self.head is None else int(self.head["status"])

    @property
    def streamed(self) -> bool:
        """Whether it is written as it comes about."""
        return self.head is not None and not any(
            name == b"content-length" for name, _ in self.head["headers"]
        )

    # ── as the client of a run ──

    def write_chunk(self, data: bytes) -> None:
        """More of a stream."""
        self._append(data)
        for follower in list(self.followers):
            follower.flush()
        if not self._kept:
            self._trim()

    def release(self) -> None:
        """Forget the callbacks: the response is over."""
        self.on_writable = self.on_lost = None

    def abort(self) -> None:
        """The answer cannot be completed."""
        self.broken = True
        self.end()

    def cut_off(self) -> None:
        """A recording takes everything at once, so it is never cut off."""

    async def send(self, message: Message) -> None:
        """Take a part of the response, as ASGI's `send`."""
        if message["type"] == "http.response.start":
            self.head = message
            for follower in list(self.followers):
                follower.begun.set()
            return
        body = message.get("body", b"")
        for start in range(0, len(body), _PIECE_BYTES):
            self._append(body[start : start + _PIECE_BYTES])
        if not message.get("more_body", False):
            self.end()

    def end(self) -> None:
        """Nothing follows."""
        if self.ended:
            return
        self.ended = True
        # What is kept is the answer: not the run behind it, with its prompts and its samples.
        self.counts = None
        for follower in list(self.followers):
            follower.finish()

    def give_up(self) -> None:
        """Nobody waits for it any more: end the run."""
        if self.counts is not None:
            # What was recorded for nobody is not billed.
            self.counts.delivered_tokens = self.delivered_tokens
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    # ── for those who follow ──

    def join(self, follower: Follower) -> None:
        """Follow from the beginning."""
        self.followers[follower] = None
        if self.head is not None:
            follower.begun.set()
        if self.ended:
            follower.finish()

    def leave(self, follower: Follower) -> None:
        """Follow no more."""
        if follower in self.followers:
            del self.followers[follower]
            if not self.followers and not self.ended:
                self._orphaned()

    def read(self, position: int) -> tuple[bytes, int]:
        """About `_PIECE_BYTES` from chunk `position` on, and the position after them; empty at the end."""
        start = end = position - self._base
        size = 0
        while end < len(self._chunks) and size < _PIECE_BYTES:
            size += len(self._chunks[end])
            end += 1
        if end > start:
            self.delivered_tokens = max(self.delivered_tokens, self._tokens[end - 1])
        return b"".join(self._chunks[start:end]), self._base + end

    def stop_keeping(self) -> None:
        """It has grown too long: those who follow get it to its end, nobody can join."""
        self._kept = False
        self._trim()

    def _append(self, data: bytes) -> None:
        self._chunks.append(data)
        self._tokens.append(self.counts.delivered_tokens if self.counts is not None else 0)
        size = len(data) + _CHUNK_OVERHEAD_BYTES
        self._held += size
        self._grew(size)

    def _trim(self) -> None:
        """Drop what all followers have; a follower that keeps too much from being dropped is cut off."""
        done = min((follower.position for follower in self.followers), default=self._base) - self._base
        if done > 0:
            self._held -= sum(map(len, self._chunks[:done])) + done * _CHUNK_OVERHEAD_BYTES
            del self._chunks[:done], self._tokens[:done]
            self._base += done
        if self._held > MOST_LAG_BYTES and self.streamed:
            for follower in [f for f in self.followers if f.position == self._base]:
                follower.cut_off()


class Follower:
    """One client that gets a recording. `begun` is set when there is a head, `done` when all of the answer
    was handed to its transport; both also when the client has `left`."""

    def __init__(self, recording: Recording, connection: Client) -> None:
        self.recording = recording
        self.connection = connection
        self.position = 0
        self.begun = asyncio.Event()
        self.started = asyncio.Event()
        """Something of the answer's body was read, or there is none."""
        self.done = asyncio.Event()
        self.left = False
        self.first_bytes_at: float | None = None
        """Seconds of the monotonic clock."""
        self._open = False
        connection.on_lost = self._lost
        recording.join(self)
        if connection.lost:
            self._lost()

    def open(self) -> None:
        """The response's header is out: write what there is of a stream, and go on."""
        self._open = True
        self.connection.on_writable = self.flush
        self.flush()

    def flush(self) -> None:
        """Write what there is, as far as the socket takes it."""
        if not self._open or self.left:
            return
        while self.connection.writable:
            data = self.read()
            if not data:
                if self.recording.ended:
                    self._complete()
                return
            self.connection.write_chunk(data)

    def read(self) -> bytes:
        """The next bytes of the answer; none at the end of what is recorded."""
        data, self.position = self.recording.read(self.position)
        if data and self.first_bytes_at is None:
            self.first_bytes_at = time.monotonic()
            self.started.set()
        return data

    def finish(self) -> None:
        """Nothing more is recorded."""
        self.begun.set()
        if self.recording.streamed:
            self.flush()
        else:
            self.done.set()

    def close(self) -> None:
        """The answer is out, or the client gone."""
        self.connection.release()
        self.recording.leave(self)

    def cut_off(self) -> None:
        """Close the connection: the client reads too slowly."""
        self.connection.cut_off()
        self._lost()

    def _complete(self) -> None:
        if self.recording.broken:
            self.connection.abort()
        self.started.set()
        self.done.set()

    def _lost(self) -> None:
        self.left = True
        self.begun.set()
        self.started.set()
        self.done.set()
        self.recording.leave(self)
