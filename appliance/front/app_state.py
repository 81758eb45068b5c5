"""A front process's shared state."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from appliance.background import Background
from appliance.channel.front_messages import FrontToCore, HandOver, Keep, Rejected, Worked
from appliance.channel.front_settings import Limits
from appliance.front.body_budget import BodyBudget
from appliance.front.errors import ApiError
from appliance.front.identity import IdentityTable
from appliance.front.keeping import Keeper
from appliance.front.models import Catalog
from appliance.front.replicas import ReplicaChannels
from appliance.front.retries import Retries
from appliance.front.shadows import ShadowTraffic
from appliance.http import CountedLog
from appliance.text.fair_queue import TextMemory, WorkPool

if TYPE_CHECKING:
    from appliance.front.generation import Generation
    from appliance.front.request_context import RequestContext
    from appliance.front.stream import EventStream

MAX_TEXT_BYTES = 16 << 20
"""Maximum total size, in bytes, of prompts waiting to be encoded. Tenants with waiting prompts get equal
shares of this memory."""
MAX_TEXT_WAIT_S = 30.0
"""Time limit, in seconds, for encoding one request's prompts."""


class AppState:
    """The state of one front process. Use it only on the event loop thread."""

    def __init__(
        self,
        to_core: Callable[[FrontToCore], None],
        hand_over: Callable[[HandOver | Keep, tuple[int, ...]], None],
        report: Callable[[], None] = lambda: None,
    ) -> None:
        """`report` sends the core a `FrontReport`."""
        self.to_core = to_core
        self.hand_over = hand_over
        """Sends a message with file descriptors to the core. The caller must still close its own copies."""
        self.keeper = Keeper(hand_over)
        self.limits = Limits()
        """Limits on what clients may send. May be reassigned at any time."""
        self.bodies = BodyBudget()
        self.denials = CountedLog("requests without a valid key or permitted user were denied")
        self.catalog = Catalog(report)
        self.identities = IdentityTable()
        self.replicas = ReplicaChannels()
        self.retries = Retries(to_core)
        self.text_memory = TextMemory(MAX_TEXT_BYTES)
        self.work = WorkPool(MAX_TEXT_WAIT_S)
        self.shadows = ShadowTraffic(self)
        self.active: dict[str, Generation] = {}
        """Requests that are waiting for admission or running, by request id."""
        self.ready = False
        self.not_ready_reason = "this front process has not received its configuration yet; retry in a moment"
        self.silent_models: dict[str, str] = {}
        """Models that cannot answer requests, each with the reason."""
        self.refused_prompts = 0
        self.requests = 0
        self.tokens = 0
        self.streams = 0
        self._unflushed: dict[EventStream, None] = {}
        """Streams with output to write, in order of their oldest output."""
        self.background = Background()

    def reject(self, context: RequestContext, error: ApiError) -> None:
        """Log a request refused by this front."""
        self.to_core(
            Rejected(
                **context.logged_fields(),
                status=error.status,
                error=error.message[:500],
                prompt_tokens=context.prompt_tokens,
                work_tokens=context.work_tokens,
                e2e_ms=context.elapsed_ms(),
            )
        )

    def charge(self, context: RequestContext, tokens: int) -> None:
        """Deduct `tokens` from the caller's token limits, because they were encoded or decoded without
        producing an answer."""
        if tokens > 0:
            self.to_core(Worked(context.identity, tokens))

    def flush_soon(self, stream: EventStream) -> None:
        """Flush the stream once all messages waiting in the channels have been processed, so that its new
        outputs are sent as one chunk."""
        if not self._unflushed:
            asyncio.get_running_loop().call_soon(self._flush)
        self._unflushed[stream] = None

    def _flush(self) -> None:
        streams, self._unflushed = self._unflushed, {}
        for stream in streams:
            stream.flush()
