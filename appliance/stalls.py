"""Tracks each replica's longest steps and the stalls on all replicas. A stall is a step that noticeably
delays decodes."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from appliance.snapshot import STALL_FACTOR, Stall
from engine.rank_messages import LongestStep, Report

MAX_STALLS = 32
"""Maximum number of stalls in a snapshot. The newest stalls are kept."""
_WINDOW_S = 10.0
"""How long a replica's longest steps are remembered, in seconds."""
_MAX_STEPS = 64
_MEAN_STEPS = 32
"""A step is compared with the mean duration of this many recent decode-only steps. A single report may
contain only one step, and the duration of one step is not representative."""


class LongestSteps:
    """A replica's longest steps in the last `_WINDOW_S` seconds. A step is kept only if it is longer than all
    later steps."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, LongestStep]] = deque()

    def add(self, at: float, step: LongestStep) -> None:
        """Add a step reported at monotonic time `at`."""
        steps = self._steps
        while steps and steps[0][0] < at - _WINDOW_S:
            steps.popleft()
        while steps and steps[-1][1].ms <= step.ms:
            steps.pop()
        if len(steps) < _MAX_STEPS:
            steps.append((at, step))

    def since(self, at: float) -> LongestStep | None:
        """Return the longest step reported after monotonic time `at`, or None."""
        return next((step for time, step in self._steps if time > at), None)


class StallLog:
    """The most recent stalls of all replicas."""

    def __init__(self) -> None:
        self._stalls: list[Stall] = []
        self._means: dict[str, float] = {}
        """The mean duration of each replica's recent decode-only steps, in milliseconds."""

    def list(self) -> list[Stall]:
        """Return the most recent stalls, oldest first."""
        return self._stalls

    def add(self, replica: str, at: float, report: Report, tenant: str) -> None:
        """Record a report's longest step if it is a stall. `tenant` is the tenant of the request named in the
        report. The step is compared with the mean of earlier reports, if any, because it may be the only step
        in its report.
        """
        mean_ms = self._means.get(replica) or report.step_ms
        if report.step_ms:
            share = min(1.0, report.decode_steps / _MEAN_STEPS)
            self._means[replica] = mean_ms + share * (report.step_ms - mean_ms)
        step = report.longest_step
        if step is None or not mean_ms or step.ms <= STALL_FACTOR * mean_ms:
            return
        stall = Stall(
            replica=replica,
            at=at,
            ms=step.ms,
            mean_ms=mean_ms,
            decodes=step.decodes,
            prompt_tokens=step.prompt_tokens,
            request=step.request_id,
            tenant=tenant,
        )
        self._stalls = merged(self._stalls, [stall])

    def forget(self, replica: str) -> None:
        """Discard the mean step duration of a replica that has exited. Its stalls are kept."""
        self._means.pop(replica, None)


def merged(known: Iterable[Stall], new: Iterable[Stall]) -> list[Stall]:
    """Merge new stalls with those already known and return the most recent ones in chronological order. If a
    replica has several stalls within a second, only the longest is kept."""
    found = {(one.replica, int(one.at)): one for one in known}
    for one in new:
        key = one.replica, int(one.at)
        if key not in found or one.ms > found[key].ms:
            found[key] = one
    return sorted(found.values(), key=lambda one: one.at)[-MAX_STALLS:]
