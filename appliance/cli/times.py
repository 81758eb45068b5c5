"""Parses and formats times and durations for people: durations (90s, 30m, 7d), times of day, and dates in
local time."""

from __future__ import annotations

import time
from datetime import datetime

from appliance.cli.failure import CommandLineError
from appliance.quantities import clock_time, span_seconds, span_text

MAX_SPAN_S = 36525 * 86400.0
"""One hundred years. A time that differs from the current time by at most this much can be stored and
displayed."""
_FIRST_YEAR, _LAST_YEAR = 1971, 2999


def moment(text: str, option: str, *, ahead: bool, now: float | None = None) -> float:
    """Parse a date or a duration, and return unix seconds. A duration is subtracted from `now`, or added to
    `now` if `ahead` is set. If `ahead` is not set, a time of day such as 14:03 means the latest such time
    before `now`. Raises CommandLineError with a message that names `option`."""
    now = time.time() if now is None else now
    if span_seconds(text) is not None:
        seconds = span_s(text, option)
        return now + seconds if ahead else now - seconds
    if not ahead and (at := clock_time(text, now)) is not None:
        return at
    try:
        date = datetime.fromisoformat(text.strip())
        if not _FIRST_YEAR <= date.year <= _LAST_YEAR:
            raise CommandLineError(
                f"{option} {_shown(text)} is out of range: use a date from {_FIRST_YEAR} to {_LAST_YEAR}"
            )
        at = date.timestamp()
    except (ValueError, OverflowError, OSError):
        raise CommandLineError(
            f"{option} {_shown(text)} is neither a time span nor a date: use a span such as 90s, 30m, "
            "12h or 7d, or a date such as 2026-11-20 or 2026-11-20T14:30"
        ) from None
    if ahead and at <= now:
        raise CommandLineError(
            f"{option} {_shown(text)} is in the past: use a future date, or a time span from now such as 90d"
        )
    return at


def span_s(text: str, option: str, max_s: float = MAX_SPAN_S) -> float:
    """Parse a duration and return it in seconds. Raises CommandLineError with a message that names
    `option`."""
    seconds = span_seconds(text)
    if seconds is None:
        raise CommandLineError(
            f"{option} {_shown(text)} is not a time span: use a value such as 90s, 30m, 12h or 7d"
        )
    if seconds > max_s:
        raise CommandLineError(f"{option} {_shown(text)} is too long: use at most {span_text(max_s)}")
    return seconds


def local(seconds: float | None) -> str:
    """Return unix seconds as a local date and time, or an empty string for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def local_short(seconds: float) -> str:
    """Return unix seconds as a local date and time without the year."""
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:40]}…")
