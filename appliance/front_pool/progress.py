"""Reads the progress of running requests from the fronts, since the core itself does not see their tokens.
Fronts are queried once per second for the telemetry history, and more often while an operator is watching.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence

from appliance.channel.core_messages import AskProgress
from appliance.channel.front_messages import FrontProgress, RequestProgress
from appliance.front_pool.front import Front

_WAIT_S = 0.25
"""Maximum time, in seconds, to wait for fronts to report progress. If a front takes longer, its previous
report is reused."""


class ProgressReader:
    """Reads the progress of all requests. Must be used on the event loop thread."""

    def __init__(self, fronts: Sequence[Front]) -> None:
        self._fronts = fronts
        self._numbers = itertools.count(1)
        self._latest: dict[str, list[RequestProgress]] = {}
        """Each front process's latest report of its requests' progress."""
        self._waiting_for: set[str] = set()
        self._number = 0
        self._complete = asyncio.Event()
        self._asking: asyncio.Task[None] | None = None

    async def read(self) -> Mapping[str, RequestProgress]:
        """Query all fronts and return each request's progress by request id. Concurrent calls share one
        query."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask())
        await asyncio.shield(self._asking)
        return {one.request_id: one for requests in self._latest.values() for one in requests}

    async def _ask(self) -> None:
        self._number = next(self._numbers)
        self._complete.clear()
        ready = [front for front in self._fronts if front.state in ("ready", "stopping")]
        self._waiting_for = {front.name for front in ready}
        for front in ready:
            front.send(AskProgress(self._number))
        if self._waiting_for:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._complete.wait(), _WAIT_S)

    def take(self, front: str, message: FrontProgress) -> None:
        """Store a front's reply to a progress query, even if the query is not the latest one."""
        self._latest[front] = message.requests
        if message.number == self._number:
            self._replied(front)

    def lose_front(self, front: str) -> None:
        """Discard the progress reported by a front process that has exited."""
        self._latest.pop(front, None)
        self._replied(front)

    def _replied(self, front: str) -> None:
        self._waiting_for.discard(front)
        if not self._waiting_for:
            self._complete.set()
