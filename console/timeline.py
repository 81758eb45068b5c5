"""The timeline above the screens while viewing history: a one-row chart of output tokens per second, the
period's events, and a marker at the displayed time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise

from appliance.history.pages import PastSnapshot
from console import units
from console.glyphs import GlyphSet
from console.lines import Line, Span, clip, line, span, spread
from console.recordings import Mark, PastTimeline
from console.roles import Role

WINDOW_POINTS = 600
"""Number of points on the timeline: 10 minutes at a resolution of one second."""
_SHORT_S = 900.0
"""Timelines shorter than this many seconds include seconds in their start and end times."""
_BARS: dict[GlyphSet, str] = {"braille": "▁▂▃▄▅▆▇█", "block": "▁▂▃▄▅▆▇█", "ascii": "_.:-=+*#"}


@dataclass
class PastState:
    """The displayed state while viewing history."""

    instant: PastSnapshot
    timeline: PastTimeline | None = None
    playing: bool = False
    speed: int = 1

    @property
    def restarted(self) -> bool:
        """Whether the service restarted within the minute before the displayed time."""
        snapshot = self.instant.snapshot
        return snapshot.uptime_s < 60.0 and self.instant.first < snapshot.started_at - 1.0


def resolution_text(seconds: int) -> str:
    """Format a resolution."""
    return "1 s" if seconds == 1 else f"{seconds} s mean"


def badge_text(past: PastState) -> str:
    """Return the badge text with the displayed time."""
    at = past.instant.snapshot.at
    return f"HISTORY {units.date(at)} · {resolution_text(past.instant.resolution_s)}"


def timeline_lines(past: PastState, width: int, glyphs: GlyphSet) -> list[Line]:
    """Return the timeline as two lines."""
    timeline = past.timeline
    if timeline is None:
        return [clip([span(" loading the timeline…", "dim")], width), clip([], width)]
    digits = 8 if timeline.until - timeline.since < _SHORT_S else 5
    left, right = (f" {units.clock(at)[:digits]} " for at in (timeline.since, timeline.until))
    size = max(1, width - len(left) - len(right))
    chart = _chart(timeline, past.instant.at, size, glyphs)
    first = clip([span(left, "dim"), *chart, span(right, "dim")], width)
    return [first, _legend(past, timeline, size, width, glyphs)]


def event_at(past: PastState, size: int = 100) -> Mark | None:
    """Return the event closest to the displayed time on a timeline of `size` columns."""
    if past.timeline is None:
        return None
    begin = past.instant.at
    column_s = (past.timeline.until - past.timeline.since) / size
    reach = max(past.instant.resolution_s, column_s / 2)
    near = [mark for mark in past.timeline.marks if begin - reach <= mark.at < begin + reach]
    return min(near, key=lambda mark: abs(mark.at - begin), default=None)


def _chart(timeline: PastTimeline, at: float, size: int, glyphs: GlyphSet) -> Line:
    column_s = (timeline.until - timeline.since) / size
    values = _values(timeline, size, column_s)
    peak = max((value for value in values if value is not None), default=0.0)
    bars = _BARS[glyphs]
    cells: list[tuple[str, Role]] = [
        (" " if value is None else bars[round(value / peak * (len(bars) - 1)) if peak else 0], "output")
        for value in values
    ]
    for mark in timeline.marks:
        column = min(size - 1, int((mark.at - timeline.since) / column_s))
        letter = "!" if mark.is_alert else "^" if glyphs == "ascii" else "▲"
        cells[column] = (letter, "bad" if mark.is_alert else "accent")
    cursor = max(0, min(size - 1, int((at - timeline.since) / column_s)))
    letter, role = cells[cursor]
    cells[cursor] = ("|" if role == "output" else letter, "tab")
    row: Line = []
    for letter, role in cells:
        if row and row[-1].role == role:
            row[-1] = Span(row[-1].text + letter, role)
        else:
            row.append(Span(letter, role))
    return row


def _values(timeline: PastTimeline, size: int, column_s: float) -> list[float | None]:
    """Return the largest value in each column of the timeline. Columns between two samples get the value of
    the preceding sample."""
    times = [at for at, _ in timeline.values]
    gaps = sorted(after - before for before, after in pairwise(times))
    step = gaps[len(gaps) // 2] if gaps else column_s
    found: list[float | None] = []
    for column in range(size):
        begin = timeline.since + column * column_s
        first, last = bisect_right(times, begin), bisect_right(times, begin + column_s)
        if first == last and first and times[first - 1] > begin - 1.5 * step:
            first -= 1
        known = [value for _, value in timeline.values[first:last] if value is not None]
        found.append(max(known, default=None))
    return found


def _legend(past: PastState, timeline: PastTimeline, size: int, width: int, glyphs: GlyphSet) -> Line:
    peak = max((value for _, value in timeline.values if value is not None), default=None)
    right = line(span(f" output peak {units.rate(peak)}/s ", "dim"))
    action = "^" if glyphs == "ascii" else "▲"
    event = event_at(past, size)
    if event is not None:
        sign = span(" ! ", "bad") if event.is_alert else span(f" {action} ", "accent")
        left = line(sign, span(f"{units.clock(event.at)} ", "bold"), span(event.text))
    else:
        actions = sum(not mark.is_alert for mark in timeline.marks)
        alerts = len(timeline.marks) - actions
        known = units.UNKNOWN if timeline.note else actions
        left = line(span(f" {action} ", "accent"), span(f"operator actions: {known}  ", "dim"))
        left += line(span("! ", "bad"), span(f"alerts raised: {alerts}", "dim"))
    return spread(left, right, width)
