"""Totals over the steps that a replica has executed."""

from __future__ import annotations

import time

from appliance.stalls import LongestSteps
from engine.rank_messages import Report


class StepTotal:
    """Totals for one kind of step, over all starts of a replica."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.idle_s = 0.0
        """Time that the GPU or CPU device spent waiting for the host before steps of this kind."""

    def add(self, steps: int, mean_ms: float, mean_idle_us: float) -> None:
        """Add a number of steps, given their mean duration and mean waiting time."""
        self.steps += steps
        self.seconds += steps * mean_ms / 1e3
        self.idle_s += steps * mean_idle_us / 1e6


class StepTotals:
    """Totals for decode steps and for steps that computed prompts."""

    def __init__(self) -> None:
        self.decode, self.mixed = StepTotal(), StepTotal()
        self.longest = LongestSteps()

    def add(self, report: Report) -> None:
        """Add the steps of a report. A report covers the steps since the previous report."""
        self.decode.add(report.decode_steps, report.step_ms, report.idle_us)
        self.mixed.add(report.mixed_steps, report.mixed_step_ms, report.mixed_idle_us)
        if report.longest_step is not None:
            self.longest.add(time.monotonic(), report.longest_step)
