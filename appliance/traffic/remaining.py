"""Estimates how much work remains for the requests in flight and how long it will take, to predict when a
drain will complete."""

from __future__ import annotations

import heapq
from typing import NamedTuple

from appliance.traffic.checks import MAX_VOID
from appliance.traffic.forecast import Forecast
from appliance.traffic.request import Request


class Remaining(NamedTuple):
    """The remaining work of a set of requests."""

    running: int = 0
    queued: int = 0
    tokens: int = 0
    """Output tokens still expected to be generated."""
    seconds: float | None = 0.0
    """Predicted time until the requests finish; None until the replicas' rates have been measured."""

    def beside(self, other: Remaining) -> Remaining:
        """Return the combined remaining work of two sets of requests that run concurrently on different
        replicas."""
        unknown = self.seconds is None or other.seconds is None
        return Remaining(
            self.running + other.running,
            self.queued + other.queued,
            self.tokens + other.tokens,
            None if unknown else max(self.seconds or 0.0, other.seconds or 0.0),
        )


class Outstanding:
    """One model's unfinished requests. Only totals are kept for waiting requests, so that the cost of
    `remaining` does not depend on their number."""

    def __init__(self) -> None:
        self._begun: dict[str, Request] = {}
        """Requests that have started but not finished."""
        self._waiting: dict[str, _Work] = {}
        self._prompts = 0
        self._outputs = 0.0
        self._longest: list[tuple[float, str]] = []
        """A heap of waiting requests: (negated output tokens per sample, request id). An entry becomes stale
        when its request is no longer waiting."""

    def wait(self, request: Request) -> None:
        """Count a request that begins to wait for its first dispatch or for its next attempt."""
        self._begun.pop(request.request_id, None)
        outputs = request.expected_tokens
        work = _Work(request.admit.prompt_tokens, outputs, outputs / max(1, request.admit.num_seqs))
        self._waiting[request.request_id] = work
        self._prompts += work.prompt_tokens
        self._outputs += work.outputs
        heapq.heappush(self._longest, (-work.each, request.request_id))
        if len(self._longest) > 2 * len(self._waiting) + MAX_VOID:
            self._longest = [(-work.each, name) for name, work in self._waiting.items()]
            heapq.heapify(self._longest)

    def begin(self, request: Request) -> None:
        """Stop counting a request as waiting, because it is running or is being closed."""
        work = self._waiting.pop(request.request_id)
        self._begun[request.request_id] = request
        self._prompts -= work.prompt_tokens
        # Reset the totals when no requests are waiting, to remove accumulated rounding errors.
        self._outputs = self._outputs - work.outputs if self._waiting else 0.0

    def end(self, request: Request) -> None:
        """Remove a finished request, or do nothing if it was never counted."""
        self._begun.pop(request.request_id, None)

    def remaining(self, forecast: Forecast, now: float) -> Remaining:
        """Return the remaining work of all requests at `now`, assuming that the running requests finish first
        and that all replicas then serve the waiting ones."""
        tokens = seconds = 0.0
        for request in self._begun.values():
            seqs = max(1, request.admit.num_seqs)
            left = _left_each(request, forecast.step_s, now)
            tokens += left * seqs
            seconds = max(seconds, left * forecast.step_s)
        running, queued = len(self._begun), len(self._waiting)
        if queued and forecast.known:
            seconds += forecast.serving_s(self._prompts, self._outputs) + self._most_each() * forecast.step_s
        known = forecast.known or not (running or queued)
        return Remaining(running, queued, round(tokens + self._outputs), seconds if known else None)

    def _most_each(self) -> float:
        """Return the expected length of the longest sample among the waiting requests."""
        while self._longest:
            each, name = -self._longest[0][0], self._longest[0][1]
            if (work := self._waiting.get(name)) is not None and work.each == each:
                return each
            heapq.heappop(self._longest)
        return 0.0


def _left_each(request: Request, step_s: float, now: float) -> float:
    """Return the number of output tokens that each sample of a running request is still expected to generate.
    A request that has exceeded its expected length is expected to double its current length, up to its
    limit."""
    made = request.generated_each
    if not made and request.began_at is not None and step_s > 0:
        made = (now - request.began_at) / step_s
    expected = request.expected_tokens / max(1, request.admit.num_seqs)
    left = expected - made if made < expected else made
    return max(1.0, min(left, request.most_each - made))


class _Work(NamedTuple):
    """A waiting request's expected work."""

    prompt_tokens: int
    outputs: float
    each: float
    """Expected number of output tokens per sample."""
