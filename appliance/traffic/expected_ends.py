"""Expected end times of one model's running requests."""

from __future__ import annotations

import heapq

from appliance.traffic.request import Request

MIN_RUN_S = 0.1
"""Minimum expected run time, in seconds."""


class ExpectedEnds:
    """The running requests, ordered by their expected end times."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        """A heap of running requests. It may also contain finished requests and outdated end times."""
        self._pushed = 0

    def expect(self, request: Request, end: float) -> None:
        """Set a running request's expected end time."""
        request.ends_at = end
        self._pushed += 1
        heapq.heappush(self._heap, (end, self._pushed, request))

    def postpone(self, now: float) -> None:
        """Double the expected run time of each request whose expected end time has passed."""
        while (end := self.first()) is not None and end <= now:
            request = heapq.heappop(self._heap)[2]
            self.expect(request, now + max(MIN_RUN_S, now - (request.began_at or now)))

    def first(self) -> float | None:
        """Return the earliest expected end time, or None if no request is running."""
        while self._heap:
            end, _, request = self._heap[0]
            if request.dispatched and request.ends_at == end:
                return end
            heapq.heappop(self._heap)
        return None
