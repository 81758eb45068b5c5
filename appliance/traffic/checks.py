"""Schedules the timeout and deadline checks of waiting requests."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from appliance.traffic.request import Request

_CHECK_EVERY_S = 0.05
MAX_VOID = 1024
"""Stale heap entries are removed only once there are more than this many. An entry is stale once its request
is no longer waiting or has a later check."""


class Checks:
    """Waiting requests, ordered by the time of their next check."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[int, Request]] = {}
        """The waiting requests, each with the serial number of its next check."""
        self._heap: list[tuple[float, int, str]] = []
        """A heap of checks: (time, serial number, request id). It stores ids rather than requests, because
        stale entries stay in it for a while, and a request takes several KB."""
        self._serial = 0

    def push(self, request: Request, timeout_s: float, now: float) -> None:
        """Schedule a waiting request's next check: when it times out, or earlier if it may miss its deadline
        before then."""
        due = (request.queued_at or now) + timeout_s
        if request.deadline_at is not None:
            due = min(due, max(request.begin_by or request.deadline_at, now + _CHECK_EVERY_S))
        self._serial += 1
        self._waiting[request.request_id] = self._serial, request
        heapq.heappush(self._heap, (due, self._serial, request.request_id))
        if len(self._heap) > 2 * len(self._waiting) + MAX_VOID:
            self._heap = [check for check in self._heap if self._request_of(check) is not None]
            heapq.heapify(self._heap)

    def remove(self, request: Request) -> None:
        """Cancel the checks of a request that is no longer waiting."""
        self._waiting.pop(request.request_id, None)

    def due(self, now: float) -> Iterator[Request]:
        """Remove and yield the waiting requests whose checks are due."""
        while self._heap and self._heap[0][0] <= now:
            request = self._request_of(heapq.heappop(self._heap))
            if request is not None:
                yield request

    def _request_of(self, check: tuple[float, int, str]) -> Request | None:
        """Return the request of a check, or None if the check is stale."""
        serial, request = self._waiting.get(check[2], (0, None))
        return request if serial == check[1] else None
