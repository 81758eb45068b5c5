"""Progress reports of a rank that is starting."""

from __future__ import annotations

from collections.abc import Callable

from engine.messages import Progress

ProgressCallback = Callable[[Progress], None]


def no_progress(progress: Progress) -> None:
    """A `ProgressCallback` that ignores all reports."""
