"""Progress reports from a starting rank."""

from __future__ import annotations

import time
from collections.abc import Callable

from engine.rank_messages import Progress

ProgressCallback = Callable[[Progress], None]


def no_progress(progress: Progress) -> None:
    """A `ProgressCallback` that ignores all reports."""


class StageTimes:
    """A `ProgressCallback` that measures the duration of each startup stage and passes the reports on."""

    def __init__(self, progress: ProgressCallback, now: Callable[[], float] = time.monotonic) -> None:
        self._progress = progress
        self._now = now
        self._label, self._since = "start", now()
        self._begun = True
        """Whether the last report announced a new stage instead of counting finished work."""
        self._seconds: dict[str, float] = {}

    def __call__(self, report: Progress) -> None:
        """Assign the time since the previous report to a stage: the new report's stage if both reports count
        finished work, otherwise the previous report's stage."""
        detail = report.detail if report.unit != "bytes" else ""
        label = f"{report.stage} ({detail})" if detail else report.stage
        worked = label if report.done and not self._begun else self._label
        now = self._now()
        self._seconds[worked] = self._seconds.get(worked, 0.0) + now - self._since
        self._label, self._since, self._begun = label, now, not report.done
        self._progress(report)

    def __str__(self) -> str:
        """Return the durations of all stages, in seconds."""
        return ", ".join(f"{label} {seconds:.1f} s" for label, seconds in self._seconds.items())
