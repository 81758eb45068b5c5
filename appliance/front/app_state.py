"""What the parts of a front share."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from appliance.background import Background
from appliance.front.body_budget import BodyBudget
from appliance.front.errors import ApiError
from appliance.front.identity import IdentityTable
from appliance.front.keeping import Keeper
from appliance.front.models import Catalog
from appliance.front.replicas import ReplicaChannels
from appliance.front.retries import Retries
from appliance.http import CountedLog
from appliance.messages import Admitted, FrontToCore, HandOver, Keep, Limits, Refused, Rejected, Worked
from appliance.text.fair_queue import TextMemory, WorkPool

if TYPE_CHECKING:
    from appliance.front.request_context import RequestContext

MAX_TEXT_BYTES = 16 << 20
"""Prompts of all requests that wait to be encoded, shared equally by the tenants that have any."""
MAX_TEXT_WAIT_S = 30.0
"""For the tokens of one request's prompts."""


class Running(Protocol):
    """A request that the core was asked to admit, and what the core may say of it."""

    def admitted(self, message: Admitted) -> None: ...
    def refused(self, message: Refused) -> None: ...
    def abort(self, message: str) -> None: ...


class AppState:
    """The state of one front. Everything happens on its event loop's thread."""

    def __init__(
        self,
        to_core: Callable[[FrontToCore], None],
        hand_over: Callable[[HandOver | Keep, tuple[int, ...]], None],
    ) -> None:
        self.to_core = to_core
        self.hand_over = hand_over
        """With the descriptors that belong to the message, which stay the caller's."""
        self.keeper = Keeper(hand_over)
        self.bodies = BodyBudget()
        self.denials = CountedLog("requests without a valid key or user were denied")
        self.catalog = Catalog()
        self.identities = IdentityTable()
        self.replicas = ReplicaChannels()
        self.retries = Retries(to_core)
        self.text_memory = TextMemory(MAX_TEXT_BYTES)
        self.work = WorkPool(MAX_TEXT_WAIT_S)
        self.active: dict[str, Running] = {}
        """Admitted or waiting for it, by request id."""
        self.ready = False
        self.not_ready_reason = "the front has not been configured yet"
        self.silent_models: dict[str, str] = {}
        """Models that do not answer, and why."""
        self.requests = 0
        self.tokens = 0
        self.streams = 0
        self._unflushed: list[Callable[[], None]] = []
        self.background = Background()

    @property
    def limits(self) -> Limits:
        """What the front takes from a client; may be replaced at any time."""
        return self.bodies.limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self.bodies.limits = limits

    def reject(self, context: RequestContext, error: ApiError) -> None:
        """Log a request that the front refused by itself."""
        self.to_core(
            Rejected(
                request_id=context.request_id,
                identity=context.identity,
                peer=context.peer,
                endpoint=context.endpoint,
                model=context.model,
                stream=context.stream,
                status=error.status,
                error=error.message[:500],
                prompt_tokens=context.prompt_tokens,
                work_tokens=context.work_tokens,
                arrived_at=context.arrived_at,
                e2e_ms=context.elapsed_ms(),
                user=context.user,
            )
        )

    def charge(self, context: RequestContext, tokens: int) -> None:
        """Count tokens that were encoded or decoded, and that no request pays for, against the sender's token
        limits."""
        if tokens > 0:
            self.to_core(Worked(context.identity, tokens))

    def flush_soon(self, flush: Callable[[], None]) -> None:
        """Call `flush` once everything that lies in the channels has been taken: what piled up for a stream
        leaves as one chunk."""
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unflushed.append(flush)

    def _flush(self) -> None:
        flushes, self._unflushed = self._unflushed, []
        for flush in flushes:
            flush()
