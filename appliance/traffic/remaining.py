"""What is left to do of the requests in flight: what a drain waits for, and for how long."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from appliance.traffic.forecast import Forecast
from appliance.traffic.request import Request


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


def remaining(requests: Iterable[Request], forecast: Forecast, now: float) -> Remaining:
    """The work of one model's requests at `now`. Those that run end by themselves; those that wait
    follow, all replicas serving them together."""
    running = queued = 0
    tokens = prompts = outputs = 0.0
    last_running_s = last_queued_s = 0.0
    for request in requests:
        rows = max(1, request.admit.rows)
        expected = request.expected_tokens / rows
        if request.queued_at is not None:
            queued += 1
            prompts += request.admit.prompt_tokens
            outputs += request.expected_tokens
            last_queued_s = max(last_queued_s, expected * forecast.step_s)
            continue
        running += 1
        made = 0.0
        if request.began_at is not None and forecast.step_s > 0:
            made = (now - request.began_at) / forecast.step_s
        # One that should have ended will, with its next token for all we know.
        left = max(1.0, expected - made)
        tokens += left * rows
        last_running_s = max(last_running_s, left * forecast.step_s)
    seconds = last_running_s
    if queued and forecast.known:
        seconds += forecast.serving_s(prompts, outputs) + last_queued_s
    known = forecast.known or not (running or queued)
    return Remaining(running, queued, round(tokens + outputs), seconds if known else None)
