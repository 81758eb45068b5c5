"""Spreads client work over several event loop iterations and divides the event loop's time fairly between
clients."""

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
"""Time, in seconds, allowed per turn. Most turns take less. The number of turns in an event loop iteration is
the previous iteration's duration divided by this time, but at least 1 and at most `MAX_TURNS_PER_PASS`."""
MAX_TURNS_PER_PASS = 8
MAX_SHARE = 1 / 3
"""Maximum share of the event loop's time, on average, that the turns charged to one budget may take."""
BURST_S = 0.1
"""Event loop time, in seconds, that a budget may use before its first pause once it has been idle for a
while."""
MAX_CHARGE_S = 0.004
"""Maximum time, in seconds, charged for one turn. An event loop iteration can take much longer than its
turns: it also delivers tokens, and the process may have to wait for a CPU."""
_MIN_REST_S = 0.001
"""Resolution of the event loop's timers, in seconds."""


class Source(NamedTuple):
    """The origin of work: a tenant, an address or a local user."""

    name: str
    """Name of the tenant, address or local user."""
    budget: str
    """Name of the budget. Sources with the same budget share one allotment of event loop time."""


def source_of_request(tenant: str, peer: Peer) -> Source:
    """Return a request's source. `tenant` is empty if the request has no valid identity. Among such requests,
    each local user has a separate budget, but all TCP clients share one, because one client can use many
    addresses.
    """
    if tenant:
        return Source(f"tenant {tenant}", f"tenant {tenant}")
    return Source(peer.source, peer.source if peer.kind == "unix" else "tcp")


class Turns:
    """Queues the connections' next operations: beginning a request, or reading more of a large body. Usually
    only one operation gets its turn per event loop iteration, so other clients' events are handled in
    between. Sources take turns. Among a source's operations, the lowest rank goes first; among equal ranks,
    the longest-waiting operation.

    Once a budget has used its share of the event loop's time, its sources must pause, even if nothing else is
    waiting. This leaves the event loop free for other clients' requests, and the CPU free for the service's
    other processes.
    """

    def __init__(self) -> None:
        self._waiting: dict[Source, list[tuple[int, int, Callable[[], None]]]] = {}
        """A heap of waiting operations for each source. The dict's first source gets the next turn."""
        self._budgets = TimeBudgets(MAX_SHARE, BURST_S)
        self._used: list[str] = []
        """For each turn taken in this event loop iteration, the budget that is charged for it."""
        self._serial = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._last_pass = 0.0
        self._scheduled = False
        """Whether `_take` is scheduled for the next event loop iteration."""
        self._rest: asyncio.TimerHandle | None = None
        """Timer for the next turn while all sources with waiting operations must pause."""

    def add(self, source: Source, rank: int, work: Callable[[], None]) -> None:
        """Call `work` when its source's turn comes. If no turn has been taken in this event loop iteration
        and the source does not have to pause, call `work` immediately."""
        now = time.monotonic()
        if self._scheduled or self._rest_s(source, now):
            heapq.heappush(self._waiting.setdefault(source, []), (rank, next(self._serial), work))
            if not self._scheduled:
                self._pause(now)
            return
        self._scheduled = True
        self._last_pass = now
        self._used.append(source.budget)
        work()
        self._loop.call_soon(self._take)

    def _pause(self, now: float) -> None:
        """Schedule the next turn for the end of the shortest pause. All sources with waiting operations must
        be pausing."""
        if self._rest is not None:
            self._rest.cancel()
        rest_s = min(self._rest_s(source, now) for source in self._waiting)
        self._rest = self._loop.call_later(rest_s, self._take_after_rest)

    def _take_after_rest(self) -> None:
        self._rest = None
        if not self._scheduled:
            self._scheduled = True
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
            # Before calling `_take` again, the event loop runs the tasks started by these turns, and
            # processes the bytes it has read.
            self._loop.call_soon(self._take)
            return
        self._scheduled = False
        if self._waiting:
            self._pause(now)

    def _rest_s(self, source: Source, now: float) -> float:
        """Return how many seconds the source must pause, or 0 if it may take its turn immediately."""
        rest_s = self._budgets.rest_s(source.budget, now)
        return max(rest_s, _MIN_REST_S) if rest_s else 0.0

    def _charge(self, passed_s: float, now: float) -> None:
        """Charge the last event loop iteration's duration to the budgets whose turns ran in it."""
        for budget in self._used:
            self._budgets.charge(budget, min(passed_s / len(self._used), MAX_CHARGE_S), now)
        self._used.clear()
        if not self._waiting:
            self._budgets.forget_unused(now)
