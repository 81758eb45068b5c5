"""Schedules the timeout and deadline checks of waiting requests."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from appliance.traffic.request import Request

_CHECK_EVERY_S = 0.05
_MAX_VOID = 64
"""Void entries are not removed while there are fewer than this many. An entry is void once its request is no
longer waiting. The number is small because each entry keeps about 2 KB of its request in memory."""


class Checks:
    """Waiting requests, ordered by the time of their next check."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._serial = 0
        self._waited = 0
        """Number of waiting requests at the last removal of void entries."""

    def push(self, request: Request, timeout_s: float, now: float) -> None:
        """Schedule the check of a waiting request. The check is due at the request's timeout, or earlier if
        the request may miss its deadline before that."""
        due = (request.queued_at or now) + timeout_s
        if request.deadline_at is not None:
            due = min(due, max(request.begin_by or request.deadline_at, now + _CHECK_EVERY_S))
        self._serial += 1
        heapq.heappush(self._heap, (due, self._serial, request))
        if len(self._heap) > 2 * self._waited + _MAX_VOID:
            self._heap = [check for check in self._heap if check[2].queued_at is not None]
            heapq.heapify(self._heap)
            self._waited = len(self._heap)

    def due(self, now: float) -> Iterator[Request]:
        """Remove and yield the waiting requests whose check is due."""
        while self._heap and self._heap[0][0] <= now:
            request = heapq.heappop(self._heap)[2]
            if request.queued_at is not None:
                yield request
