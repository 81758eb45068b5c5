"""The runs of requests with an `Idempotency-Key`, and the stored answers. A run goes through these states:

    running ──► kept ──► evicted: expired, or memory needed
        └──► dropped: failed, too long, or no client reconnected in time

The core records which front owns which key (`appliance.front_pool.claims`), and the front stores the answers.
When a front process exits, its answers are lost, and a retry reruns the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from starlette.responses import Response
from starlette.types import Message, Send

from appliance.background import Timer
from appliance.channel.core_messages import Claimed
from appliance.channel.front_messages import Claim, FrontToCore, Release, join_reasons
from appliance.channel.front_settings import RetryRules
from appliance.http import Connection

if TYPE_CHECKING:
    from appliance.front.generation import Generation
    from appliance.front.respond import GenerationResponse

_NOT_REPEATED = (b"x-ratelimit-", b"content-length")
"""Prefixes of headers that are not stored, because they describe only the first response or are generated
anew for each retry."""
_RUN_BYTES = 1024
"""Memory, in bytes, used by a run in addition to its answer."""


class KeyedRun:
    """One run of a request with an `Idempotency-Key`, including the response stored for retries. A finished
    run must not refer to connections or prompts, because `held_bytes` does not count their memory."""

    def __init__(self, retries: Retries, claim: Claim, fingerprint: bytes) -> None:
        """`fingerprint` is a hash of the request's body."""
        self.scope = claim.scope
        self.request_id = claim.request_id
        self.fingerprint = fingerprint
        self.ended = asyncio.Event()
        self.answer: Response | None = None
        """The response for retries, or None if no complete response is stored."""
        self.status = 500
        self.finish_reason = join_reasons(["error"])
        self.request_class: int | None = None
        self.is_kept = True
        """Whether retries can find this run. If so, its response must be stored."""
        self.held_bytes = _RUN_BYTES
        """This run's memory in bytes, which counts toward `RetryRules.max_bytes`."""
        self.timer = Timer()
        """Timer that drops the run. While the run is in progress, it fires at the end of the grace period
        that begins when the last client disconnects. Once the answer is stored, it fires when the answer
        expires."""
        self.generation: Generation | None = None
        """The running generation, which continues after its client has disconnected."""
        self._retries = retries
        self._head: Message = {}
        self._body = bytearray()
        self._clients: set[Connection] = set()
        """Connections of the first client and of retries waiting for the answer."""
        self._billed_tokens = 0
        """Number of output tokens that had been written when the last client disconnected."""

    def follow(self, connection: Connection) -> None:
        """Add a client to an unfinished run. The client is removed when it disconnects."""
        self.timer.stop()
        self._clients.add(connection)
        connection.on_disconnect = partial(self.leave, connection)
        if connection.disconnected:
            self.leave(connection)

    async def send(self, to_client: Send, message: Message) -> None:
        """Store part of the response (an ASGI message) and send it to the first client."""
        if message["type"] == "http.response.start":
            self._head = {**message}
        else:
            self.record(message.get("body", b""))
        await to_client(message)

    def record(self, data: bytes) -> None:
        """Store part of the response body."""
        if self.is_kept:
            self._body += data
            self._retries.grew(self, len(data))

    def complete(self, response: GenerationResponse) -> None:
        """If all parts of the response have been stored, build the response for retries."""
        self.status = response.status
        self.finish_reason = response.generation.finish_reason(response.status)
        self.request_class = response.generation.context.request_class
        if self.is_kept and not response.generation.left:
            self.answer = Response(bytes(self._body), self._head["status"])
            self.answer.raw_headers += [
                *(pair for pair in self._head["headers"] if not pair[0].startswith(_NOT_REPEATED)),
                (b"idempotent-replayed", b"true"),
                (b"x-appliance-retry-of", self.request_id.encode()),
            ]

    def end(self) -> None:
        """Record that the run has ended and wake waiting retries. If the run was successful, keep its answer
        for a while."""
        self.ended.set()
        self.generation = None
        self._body.clear()
        self._clients.clear()
        if self.is_kept and self.status == 200:
            self.timer.start(self._retries.rules.keep_s, partial(self._retries.drop, self))
        elif self.is_kept:
            self._retries.drop(self)

    def give_up(self) -> None:
        """End the generation if the first client has disconnected. Tokens that were written after the last
        client disconnected are not billed."""
        generation = self.generation
        if generation is not None and generation.context.connection.disconnected:
            generation.delivered_tokens = self._billed_tokens
            generation.client_disconnected()

    @property
    def is_abandoned(self) -> bool:
        """Whether the run is in progress without a client."""
        return not self.ended.is_set() and not self._clients

    def leave(self, connection: Connection) -> None:
        """Remove a client. If none is left, end the run unless a retry arrives within the grace period."""
        self._clients.discard(connection)
        generation = self.generation
        if not self._clients and not self.ended.is_set():
            self._billed_tokens = 0 if generation is None else generation.delivered_tokens
            if not self.is_kept:
                self.give_up()
            elif self._retries.stopping:
                self._retries.drop(self)
            else:
                self.timer.start(self._retries.rules.grace_s, partial(self._retries.drop, self))
        if generation is not None and generation.on_end is not None:
            # Write the events that are being held back for a slow client, so that they are stored.
            generation.on_end()


class Retries:
    """All of this front's runs, by scope: a combination of caller, endpoint and idempotency key."""

    def __init__(self, to_core: Callable[[FrontToCore], None]) -> None:
        self.rules = RetryRules()
        self.stopping = False
        """Whether this front process is stopping. If so, each run ends when its last client disconnects."""
        self.kept_bytes = 0
        self.runs: dict[bytes, KeyedRun] = {}
        self._to_core = to_core
        self._claims: dict[str, asyncio.Future[Claimed]] = {}
        """Futures that receive the core's replies to claims, by request id."""

    async def claim(self, claim: Claim) -> Claimed:
        """Ask the core whether this front may run the request."""
        reply = self._claims[claim.request_id] = asyncio.get_running_loop().create_future()
        self._to_core(claim)
        return await reply

    def take(self, message: Claimed) -> None:
        """Receive the core's reply to a claim."""
        self._claims.pop(message.request_id).set_result(message)

    def begin(self, claim: Claim, fingerprint: bytes) -> KeyedRun:
        """Add a run that the core has assigned to this front."""
        run = self.runs[claim.scope] = KeyedRun(self, claim, fingerprint)
        self.kept_bytes += run.held_bytes
        return run

    def grew(self, run: KeyedRun, size: int) -> None:
        """Count `size` bytes added to a run's answer. If the memory limit is exceeded, drop the oldest
        answers of finished runs. If no finished runs are left, drop this run's answer."""
        run.held_bytes += size
        self.kept_bytes += size
        while self.kept_bytes > self.rules.max_bytes and run.is_kept:
            self.drop(next((known for known in self.runs.values() if known.ended.is_set()), run))

    def drop(self, run: KeyedRun) -> None:
        """Remove the run from this front and release its claim in the core. A run in progress continues only
        while its first client is connected."""
        del self.runs[run.scope]
        self.kept_bytes -= run.held_bytes
        run.is_kept = False
        run.timer.stop()
        self._to_core(Release(run.scope))
        run.give_up()

    def stop(self) -> None:
        """Drop all runs without clients, because the front is stopping. From now on, a run is dropped when
        its last client leaves."""
        self.stopping = True
        for run in [run for run in self.runs.values() if run.is_abandoned]:
            self.drop(run)
