"""Spreads the work that clients cause over passes of the event loop, and shares it fairly between them."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

from appliance.background import TimeBudgets
from appliance.http.peers import Peer

TURN_S = 0.002
"""One turn is taken for each such interval since the last pass; a turn usually costs less."""
MAX_TURNS_PER_PASS = 8
MAX_SHARE = 1 / 3
"""The part of the event loop's time that the turns of one budget take in the long run."""
BURST_S = 0.1
"""A budget that was not used for this time may use its share of it at once."""
MAX_CHARGE_S = 0.004
"""The most that one turn is charged. A pass takes longer if it also delivers many tokens, or if the process
waited for a processor."""
_MIN_REST_S = 0.001
"""The resolution of the event loop's timers."""


class Source(NamedTuple):
    """Where work comes from."""

    name: str
    """A tenant, an address or a local user. Sources take turns."""
    budget: str
    """Sources with the same budget use one share of the event loop's time."""


def source_of_request(tenant: str, peer: Peer) -> Source:
    """Return the source of a request of a tenant, empty if it has no valid identity. Then each local user has
    a budget; all clients over TCP share one, because anybody can have many addresses."""
    if tenant:
        return Source(f"tenant {tenant}", f"tenant {tenant}")
    return Source(peer.source, peer.source if peer.kind == "unix" else "tcp")


class Turns:
    """Queues what connections do next: begin a request, or read more of a large body. A pass of the event
    loop usually takes one turn, so that events of other clients are handled after each turn. Sources take
    turns; of one source, the work with the lowest rank comes first, then the one that has waited longest.

    A budget that has used its share of the event loop's time rests, even if nothing else waits: another
    client's request, which takes several passes, then finds the loop idle, and the processor is free for the
    other processes of the service.
    """

    def __init__(self) -> None:
        self._waiting: dict[Source, list[tuple[int, int, Callable[[], None]]]] = {}
        """A heap for each source; the source whose turn it is comes first."""
        self._budgets = TimeBudgets(MAX_SHARE, BURST_S)
        self._used: list[str] = []
        """The budget of each turn that was taken in this pass."""
        self._serial = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._last_pass = 0.0
        self._scheduled = False

    def add(self, source: Source, rank: int, work: Callable[[], None]) -> None:
        """Do `work` when its turn comes: at once if no turn was taken in this pass of the event loop and the
        source's budget is not used up."""
        if not self._scheduled:
            self._scheduled = True
            now = self._last_pass = time.monotonic()
            rest_s = self._rest_s(source, now)
            if not rest_s:
                self._used.append(source.budget)
                work()
                self._loop.call_soon(self._take)
                return
            self._loop.call_later(rest_s, self._take_after_rest)
        heapq.heappush(self._waiting.setdefault(source, []), (rank, next(self._serial), work))

    def _take_after_rest(self) -> None:
        self._last_pass = time.monotonic()
        self._take()

    def _take(self) -> None:
        now = time.monotonic()
        passed_s = now - self._last_pass
        self._last_pass = now
        self._charge(passed_s, now)
        for _ in range(min(max(int(passed_s / TURN_S), 1), MAX_TURNS_PER_PASS)):
            source = next((one for one in self._waiting if not self._rest_s(one, now)), None)
            if source is None:
                break
            heap = self._waiting.pop(source)
            _, _, work = heapq.heappop(heap)
            if heap:
                self._waiting[source] = heap
            self._used.append(source.budget)
            work()
        if self._used:
            # The event loop runs this after the tasks that the turns have started, and after what was read.
            self._loop.call_soon(self._take)
        elif self._waiting:
            rest_s = min(self._rest_s(source, now) for source in self._waiting)
            self._loop.call_later(rest_s, self._take_after_rest)
        else:
            self._scheduled = False

    def _rest_s(self, source: Source, now: float) -> float:
        """Return for how long the source must rest; 0 if its turn may be taken now."""
        rest_s = self._budgets.rest_s(source.budget, now)
        return max(rest_s, _MIN_REST_S) if rest_s else 0.0

    def _charge(self, passed_s: float, now: float) -> None:
        """Charge the turns of the last pass with its time."""
        for budget in self._used:
            self._budgets.charge(budget, min(passed_s / len(self._used), MAX_CHARGE_S), now)
        self._used.clear()
        if not self._waiting:
            self._budgets.forget_unused(now)
