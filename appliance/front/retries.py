"""The runs of requests with an `Idempotency-Key`, and the answers kept for retries. A run goes through these
states:

    claimed ──► running ──► kept ──► dropped: expired, or memory needed
                   └──► dropped: failed, or its answer took too much memory

A run continues after its client has disconnected, because a retry may follow. The core records which front
owns which key (`appliance.front_pool.claims`), and the front stores the answers. When a front process exits,
its answers are lost, and a retry reruns the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from starlette.responses import Response

from appliance.background import Timer
from appliance.channel.core_messages import Claimed
from appliance.channel.front_messages import Claim, FrontToCore, Release
from appliance.channel.front_settings import RetryRules

if TYPE_CHECKING:
    from appliance.front.generation import Generation

_RUN_BYTES = 1024
"""Memory, in bytes, used by a run in addition to its answer."""


@dataclass(slots=True, eq=False)
class KeyedRun:
    """One run of a request with an `Idempotency-Key`, including the answer kept for retries. A finished run
    must not refer to connections or prompts, because `kept_bytes` does not count their memory."""

    claim: Claim
    fingerprint: bytes
    """A hash of the request's body."""
    claimed: asyncio.Future[Claimed] = field(default_factory=asyncio.Future)
    """The core's reply to the claim."""
    body: bytearray | bytes = field(default_factory=bytearray)
    """The part of the answer's body that has been generated so far."""
    answer: asyncio.Future[Response | None] = field(default_factory=asyncio.Future)
    """The response for retries, set when the run has ended. None if a retry must run the request again."""
    log_fields: dict[str, Any] = field(default_factory=dict)
    """Fields of `Retried` that describe the answer."""
    expiry: Timer = field(default_factory=Timer)


class Retries:
    """All of this front's runs, by scope: a combination of caller, endpoint and idempotency key."""

    def __init__(self, to_core: Callable[[FrontToCore], None]) -> None:
        self.rules = RetryRules()
        self.kept_bytes = 0
        self.runs: dict[bytes, KeyedRun] = {}
        self._to_core = to_core

    def claim(self, claim: Claim, fingerprint: bytes) -> KeyedRun:
        """Add a run, and ask the core whether this front may run the request."""
        run = self.runs[claim.scope] = KeyedRun(claim, fingerprint)
        self._to_core(claim)
        return run

    def take(self, message: Claimed) -> None:
        """Receive the core's reply to a claim."""
        run = self.runs[message.scope]
        run.claimed.set_result(message)
        if message.hand_over:
            del self.runs[message.scope]
        else:
            self.kept_bytes += _RUN_BYTES

    def record(self, run: KeyedRun, generation: Generation, data: bytes) -> None:
        """Add part of the body to a run's answer. If the memory limit is exceeded, drop the oldest answers of
        finished runs. If no finished runs are left, stop recording this answer."""
        run.body += data
        self.kept_bytes += len(data)
        while self.kept_bytes > self.rules.max_bytes and generation.record is not None:
            oldest = next((known for known in self.runs.values() if known.answer.done()), None)
            if oldest is not None:
                self.drop(oldest)
                continue
            self.kept_bytes -= len(run.body)
            run.body = b""
            generation.record = None
            if generation.context.connection.disconnected:
                generation.client_disconnected()

    def end(self, run: KeyedRun, generation: Generation, status: int) -> None:
        """Give the answer to the waiting retries. If `status` is 200, also keep it for later retries."""
        run.log_fields = {
            "retry_of": run.claim.request_id,
            "request_class": generation.context.request_class,
            "status": status,
            "finish_reason": generation.finish_reason(status),
        }
        headers = {"idempotent-replayed": "true", "x-appliance-retry-of": run.claim.request_id}
        if status == 200 and generation.record is not None:
            run.body = bytes(run.body)
            media_type = "text/event-stream" if generation.task.stream else "application/json"
            run.answer.set_result(Response(run.body, headers=headers, media_type=media_type))
            run.expiry.start(self.rules.keep_s, partial(self.drop, run))
            return
        if generation.failure is not None:
            generation.failure.headers.update(headers)
            run.answer.set_result(generation.failure.response())
        self.drop(run)

    def drop(self, run: KeyedRun) -> None:
        """Remove a run that has ended and release its claim. The next retry runs the request again."""
        if not run.answer.done():
            run.answer.set_result(None)
        run.expiry.stop()
        del self.runs[run.claim.scope]
        self.kept_bytes -= _RUN_BYTES + len(run.body)
        self._to_core(Release(run.claim.scope))
