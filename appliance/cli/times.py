"""Parses and formats human-readable durations (90s, 30m, 7d), times of day, and dates in local time."""

from __future__ import annotations

import time

from appliance.cli.failure import CommandLineError
from appliance.quantities import (
    MAX_SPAN_S,
    future_time,
    not_valid,
    past_time,
    quoted,
    span_seconds,
    span_text,
)


def moment(text: str, option: str, *, ahead: bool, now: float | None = None) -> float:
    """Parse a date or duration and return a Unix time. A duration is subtracted from `now`, or added to `now`
    if `ahead` is set. If `ahead` is not set, a time of day such as 14:03 means the latest such time before
    `now`. Raises CommandLineError with a message that names `option`."""
    parse = future_time if ahead else past_time
    try:
        return parse(text, time.time() if now is None else now)
    except ValueError as error:
        raise CommandLineError(f"{option} {error}") from None


def span_s(text: str, option: str, max_s: float = MAX_SPAN_S) -> float:
    """Parse a duration and return it in seconds. Raises CommandLineError with a message that names
    `option`."""
    seconds = span_seconds(text)
    if seconds is None:
        raise CommandLineError(f"{option} {not_valid(text, 'a time span such as 90s, 30m, 12h or 7d')}")
    if seconds > max_s:
        raise CommandLineError(f"{option} {quoted(text)} is too long: use at most {span_text(max_s)}")
    return seconds


def local(seconds: float | None) -> str:
    """Format a Unix time as a local date and time. Returns an empty string for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def local_short(seconds: float) -> str:
    """Format a Unix time as a local date and time, without the year."""
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
