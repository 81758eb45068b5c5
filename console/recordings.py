"""Sources of recorded history: a running service, an incident file, or the demo's memory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from appliance.history.pages import PastSnapshot
from console.history import History
from console.source import ListName, Row

HISTORY_POINTS = 480
"""Maximum number of points in charts. Even wide terminals show fewer."""
NOT_RECORDED = (
    "the history does not include findings, settings, versions, keys or silences: Audit (9) shows when "
    "settings, versions, keys and silences changed"
)
USAGE_NOT_RECORDED = (
    "the history does not include usage, which is counted per day: return to live (N) to see it"
)


class Mark(NamedTuple):
    """An event on the timeline."""

    at: float
    is_alert: bool
    """Whether an alert was raised. If not, the event is an operator action."""
    text: str


class PastTimeline(NamedTuple):
    """A period of recorded history around the displayed time."""

    since: float
    until: float
    values: list[tuple[float, float | None]]
    """Pairs of a time and the output tokens per second."""
    marks: list[Mark]
    """Events, oldest first."""
    note: str = ""
    """Why the period's events could not be read, or an empty string."""


class RecordedPast(Protocol):
    """Delivers recorded history. All methods raise SourceError if the history cannot be read."""

    label: str
    """Description of the recording for the console's header."""
    begin: float | None
    """For a recording in a file, the time to show first, in unix seconds; otherwise None."""

    async def instant(self, at: float | None) -> PastSnapshot:
        """Return the service's state at the time `at` (unix seconds), or the newest state if `at` is None."""
        ...

    async def extend(self, history: History, until: float, resolution_s: int) -> None:
        """Update the chart points in `history` so that they end at the time `until`."""
        ...

    async def timeline(self, since: float, until: float) -> PastTimeline:
        """Return the output token rates and events of a recorded period."""
        ...

    async def rows(self, name: ListName, until: float) -> Sequence[Row]:
        """Return the rows of a list as of a given time, newest first."""
        ...

    async def export(self, since: float, until: float, path: Path) -> str:
        """Write a period of the history to an incident file and return a description of the file."""
        ...

    async def close(self) -> None:
        """Release resources such as temporary files."""
        ...
