"""What is left to do of the requests in flight: what a drain waits for, and for how long."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from appliance.traffic.forecast import Forecast
from appliance.traffic.request import Request

_MAX_VOID = 1024
"""Entries of requests that wait no more, before they are dropped."""


class Remaining(NamedTuple):
    """The work of some requests."""

    running: int = 0
    queued: int = 0
    tokens: int = 0
    """Output tokens that they are expected to take yet."""
    seconds: float | None = 0.0
    """Until they have ended, by the measured rates; None while nothing was measured."""

    def beside(self, other: Remaining) -> Remaining:
        """Both together, on replicas of their own."""
        unknown = self.seconds is None or other.seconds is None
        return Remaining(
            self.running + other.running,
            self.queued + other.queued,
            self.tokens + other.tokens,
            None if unknown else max(self.seconds or 0.0, other.seconds or 0.0),
        )


class Outstanding:
    """The unfinished requests of one model, counted as they come and go. What waits is known by its sums:
    what is left of all costs only those that had a turn, however many wait."""

    def __init__(self) -> None:
        self._begun: dict[str, Request] = {}
        """Those that wait no more and have not ended."""
        self._waiting: dict[str, _Work] = {}
        self._prompts = 0
        self._outputs = 0.0
        self._longest: list[tuple[float, str]] = []
        """A heap of (−output of a sample, request id) of those that wait; entries of others are void."""

    def wait(self, request: Request) -> None:
        """It begins to wait for a turn: its first, or to go on."""
        self._begun.pop(request.request_id, None)
        outputs = request.expected_tokens
        work = _Work(request.admit.prompt_tokens, outputs, outputs / max(1, request.admit.rows))
        self._waiting[request.request_id] = work
        self._prompts += work.prompt_tokens
        self._outputs += work.outputs
        heapq.heappush(self._longest, (-work.each, request.request_id))
        if len(self._longest) > 2 * len(self._waiting) + _MAX_VOID:
            self._longest = [(-work.each, name) for name, work in self._waiting.items()]
            heapq.heapify(self._longest)

    def begin(self, request: Request) -> None:
        """It waits no more: it runs, or is ending."""
        work = self._waiting.pop(request.request_id)
        self._begun[request.request_id] = request
        self._prompts -= work.prompt_tokens
        # What rounding has left over the hours goes where nothing waits.
        self._outputs = self._outputs - work.outputs if self._waiting else 0.0

    def end(self, request: Request) -> None:
        """It has ended; nothing happens if it never waited here."""
        self._begun.pop(request.request_id, None)

    def remaining(self, forecast: Forecast, now: float) -> Remaining:
        """Return the work of all at `now`. Those that run end by themselves; those that wait follow, all
        replicas serving them together."""
        tokens = seconds = 0.0
        for request in self._begun.values():
            rows = max(1, request.admit.rows)
            left = _left_each(request, forecast.step_s, now)
            tokens += left * rows
            seconds = max(seconds, left * forecast.step_s)
        running, queued = len(self._begun), len(self._waiting)
        if queued and forecast.known:
            seconds += forecast.serving_s(self._prompts, self._outputs) + self._most_each() * forecast.step_s
        known = forecast.known or not (running or queued)
        return Remaining(running, queued, round(tokens + self._outputs), seconds if known else None)

    def _most_each(self) -> float:
        """The longest that a sample of those that wait is expected to be."""
        while self._longest:
            each, name = -self._longest[0][0], self._longest[0][1]
            if (work := self._waiting.get(name)) is not None and work.each == each:
                return each
            heapq.heappop(self._longest)
        return 0.0


def _left_each(request: Request, step_s: float, now: float) -> float:
    """Return the output tokens that each sample of a running request is expected to take yet.

    A request that has outlived its expected length is expected to run as long again as it has run so far, at
    most to the length that it may have.
    """
    made = request.generated_each
    if not made and request.began_at is not None and step_s > 0:
        made = (now - request.began_at) / step_s
    expected = request.expected_tokens / max(1, request.admit.rows)
    left = expected - made if made < expected else made
    return max(1.0, min(left, request.most_each - made))


class _Work(NamedTuple):
    """What a request that waits is expected to take."""

    prompt_tokens: int
    outputs: float
    each: float
    """Output tokens of each sample."""
