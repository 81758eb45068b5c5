"""Spreads the work that clients cause over passes of the event loop, and shares it fairly between them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable

TURN_S = 0.002
"""One turn is taken for each such interval since the last pass; a turn usually costs less."""
MAX_TURNS_PER_PASS = 8


class Turns:
    """Queues what connections do next: begin a request, or read more of a large body. A pass of the event
    loop usually takes one turn, so that events of other clients are handled after each turn. Sources (a
    tenant, an address) take turns; of one source, the work with the lowest rank comes first, then the one
    that has waited longest.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, list[tuple[int, int, Callable[[], None]]]] = {}
        """A heap for each source; the source whose turn it is comes first."""
        self._serial = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._last_pass = 0.0
        self._scheduled = False

    def add(self, source: str, rank: int, work: Callable[[], None]) -> None:
        """Do `work` when its turn comes: at once if no turn was taken in this pass of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            self._last_pass = time.monotonic()
            self._loop.call_soon(self._take)
            work()
            return
        heapq.heappush(self._waiting.setdefault(source, []), (rank, next(self._serial), work))

    def _take(self) -> None:
        if not self._waiting:
            self._scheduled = False
            return
        now = time.monotonic()
        count = int((now - self._last_pass) / TURN_S)
        self._last_pass = now
        self._loop.call_soon(self._take)
        for _ in range(min(max(count, 1), MAX_TURNS_PER_PASS)):
            if not self._waiting:
                return
            source, heap = next(iter(self._waiting.items()))
            del self._waiting[source]
            _, _, work = heapq.heappop(heap)
            if heap:
                self._waiting[source] = heap
            work()
