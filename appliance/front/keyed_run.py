"""A run of a request with an `Idempotency-Key`, and its answer, which any number of clients can read.

A run takes the place of a client connection: the response is written into the run. The first client and each
retry follow the run from the beginning of its answer, each at its own pace.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from starlette.types import Message

from appliance.front.comments import happens_within
from appliance.front.request_context import ResponseSink
from appliance.messages import Claimed

if TYPE_CHECKING:
    from appliance.front.generation import Generation

MAX_LAG_BYTES = 4 << 20
"""If an answer is too long to be kept, at most this many bytes are held for clients that read slowly."""
_PIECE_BYTES = 64 << 10
"""Maximum number of bytes passed to a connection in one call, so that the whole answer is never copied for a
follower that joins late."""
_CHUNK_OVERHEAD_BYTES = 96
"""Memory that Python needs to keep track of one chunk, in bytes."""


@dataclass(eq=False, slots=True)
class Follower:
    """A client that is reading a run's answer."""

    connection: ResponseSink
    left: bool
    """Whether the client has disconnected."""
    position: int = 0
    """Number of bytes of the body that the client has read."""
    first_bytes_at: float | None = None
    """When the first bytes were written, in seconds of the monotonic clock."""


class KeyedRun:
    """One run and its answer. A run holds neither the prompt nor the connection of its request, because
    `held_bytes` does not include them."""

    writable, lost = True, False

    def __init__(
        self,
        scope: bytes,
        fingerprint: bytes,
        request_id: str,
        grew: Callable[[KeyedRun, int], None],
        orphaned: Callable[[KeyedRun], None],
    ) -> None:
        """Create a run that has not been claimed yet.

        - `scope` is a hash of the caller, the endpoint and the key.
        - `fingerprint` is a hash of the body.
        - `grew` is called with the size of each addition.
        - `orphaned` is called when the last follower leaves before the run has ended.
        """
        self.scope = scope
        self.fingerprint = fingerprint
        self.request_id = request_id
        self.claimed: asyncio.Future[Claimed] = asyncio.get_running_loop().create_future()
        """The core's answer, which says whether this front has the run."""
        self.request_class: int | None = None
        self.status = 500
        self.finish_reason = ""
        self.head: Message | None = None
        """Status and headers of the response, once it has begun."""
        self.ended = self.broken = False
        """`ended`: whether the response has ended. `broken`: whether it ended incomplete, in which case the
        connection closes."""
        self.is_kept = True
        """Whether retries can still join the run, so that the whole answer must be kept."""
        self.held_bytes = 0
        """Memory in bytes that counts against `RetryRules.max_bytes`."""
        self.generation: Generation | None = None
        """The generation while it is running. It is not kept with the answer."""
        self.on_writable: Callable[[], None] | None = None
        self.on_lost: Callable[[], None] | None = None
        self.last_chunk_at = 0.0
        self.followers: set[Follower] = set()
        self._body = bytearray()
        self._dropped = 0
        """Number of bytes that have been removed from the beginning of the body."""
        self._unread_tokens: deque[tuple[int, int]] = deque()
        """For each chunk that no follower has read yet: its end, and the number of output tokens up to that
        end."""
        self._read_tokens = 0
        """Number of output tokens in the chunks that at least one follower has read."""
        self._changed = asyncio.Event()
        self.timer: asyncio.TimerHandle | None = None
        """Timer that runs while a running request has no followers, and while an answer is kept."""
        self._grew = grew
        self._orphaned = orphaned

    @property
    def streamed(self) -> bool:
        """Whether the response is written as it is generated, without a length."""
        return self.head is not None and all(name != b"content-length" for name, _ in self.head["headers"])

    def set_timer(self, delay_s: float, late: Callable[[], None]) -> None:
        """Call `late` after the delay, unless `stop_timer` is called first."""
        self.stop_timer()
        self.timer = asyncio.get_running_loop().call_later(delay_s, late)

    def stop_timer(self) -> None:
        """Stop the timer if it is running."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    # ── the sink of the response (`ResponseSink`) ──

    async def send(self, message: Message) -> None:
        """Record part of the response (ASGI)."""
        if message["type"] == "http.response.start":
            self.head = message
            self._wake()
            return
        if body := message.get("body", b""):
            self.write_chunk(body)
        if not message.get("more_body", False):
            self.end()

    def write_chunk(self, data: bytes) -> None:
        """Record part of the body."""
        self.last_chunk_at = time.monotonic()
        self._body += data
        if self.generation is not None:
            self._unread_tokens.append((self._dropped + len(self._body), self.generation.delivered_tokens))
        self._grew(self, len(data) + _CHUNK_OVERHEAD_BYTES)
        self._wake()
        if not self.is_kept:
            self._trim()

    def release(self) -> None:
        """Remove the callbacks, because the run has ended."""
        self.on_writable = self.on_lost = None

    def abort(self) -> None:
        """End an incomplete response."""
        self.broken = not self.ended
        self.end()

    def cut_off(self) -> None:
        """Do nothing, because a run accepts its response at any speed."""

    def end(self) -> None:
        """Record that the response is complete, unless it has already ended."""
        self.ended, self.generation = True, None
        self._unread_tokens.clear()
        self._wake()

    def give_up(self) -> None:
        """End the run, because no client is waiting for it. Tokens that no client has read are not billed."""
        if self.generation is not None:
            self.generation.delivered_tokens = self._read_tokens
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _trim(self) -> None:
        """Drop the bytes that all followers have read, and cut off followers that are too far behind."""
        slowest = min((follower.position for follower in self.followers), default=self._dropped)
        del self._body[: slowest - self._dropped]
        self._dropped = slowest
        if len(self._body) > MAX_LAG_BYTES and self.streamed:
            for follower in self.followers:
                if follower.position == slowest:
                    follower.connection.cut_off()

    # ── followers ──

    def follow(self, connection: ResponseSink) -> Follower:
        """Add a client as a follower. `leave` removes it."""
        follower = Follower(connection, connection.lost)
        self.followers.add(follower)
        connection.on_lost = lambda: self._lost(follower)
        if not self.ended:
            self.stop_timer()
        return follower

    def leave(self, follower: Follower) -> None:
        """Remove a client."""
        follower.connection.release()
        if follower in self.followers:
            self.followers.remove(follower)
            if not self.followers and not self.ended:
                self._orphaned(self)

    async def changed(self, timeout_s: float | None = None) -> bool:
        """Wait until the run or a follower changes. Return False if nothing changes within the timeout."""
        return await happens_within(self._changed, timeout_s)

    def read(self, follower: Follower) -> bytes:
        """Return the next bytes of the body, or no bytes if the follower has read everything recorded so
        far."""
        start = follower.position - self._dropped
        data = bytes(self._body[start : start + _PIECE_BYTES])
        follower.position += len(data)
        if data and follower.first_bytes_at is None:
            follower.first_bytes_at = time.monotonic()
        while self._unread_tokens and self._unread_tokens[0][0] <= follower.position:
            _, self._read_tokens = self._unread_tokens.popleft()
        return data

    def _lost(self, follower: Follower) -> None:
        follower.left = True
        self._wake()
        self.leave(follower)
