"""Cumulative totals for each kind of step that a replica runs."""

from __future__ import annotations

import time

from appliance.stalls import LongestSteps
from engine.rank_messages import Report


class StepTotal:
    """Totals for one kind of step, kept across a replica's restarts."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.idle_s = 0.0
        """Time that the device spent waiting for the host before steps of this kind."""

    def add(self, steps: int, mean_ms: float, mean_idle_us: float) -> None:
        """Add steps, given their number, mean duration and mean waiting time."""
        self.steps += steps
        self.seconds += steps * mean_ms / 1e3
        self.idle_s += steps * mean_idle_us / 1e6

    def since(self, before: StepTotal) -> StepTotal:
        """Return the totals of the steps added since `before`, an earlier copy of these totals."""
        steps = StepTotal()
        steps.steps = self.steps - before.steps
        steps.seconds = self.seconds - before.seconds
        steps.idle_s = self.idle_s - before.idle_s
        return steps

    @property
    def mean_ms(self) -> float | None:
        """Mean duration of a step in milliseconds, or None if there are no steps."""
        return 1e3 * self.seconds / self.steps if self.steps else None

    @property
    def mean_idle_us(self) -> float | None:
        """Mean waiting time before a step in microseconds, or None if there are no steps."""
        return 1e6 * self.idle_s / self.steps if self.steps else None


class StepTotals:
    """Separate totals for decode steps and for steps that process prompts."""

    def __init__(self) -> None:
        self.decode, self.mixed = StepTotal(), StepTotal()
        self.longest = LongestSteps()

    def add(self, report: Report) -> None:
        """Add the steps since the previous report."""
        self.decode.add(report.decode_steps, report.step_ms, report.idle_us)
        self.mixed.add(report.mixed_steps, report.mixed_step_ms, report.mixed_idle_us)
        if report.longest_step is not None:
            self.longest.add(time.monotonic(), report.longest_step)
