"""Formats and parses measured values, byte counts, time spans and times."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}
_SPAN = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*(s|m|min|h|d|w)")
MAX_SPAN_S = 36525 * 86400.0
"""Maximum time span: one hundred years. Times this far from now can still be stored and displayed."""
_FIRST_YEAR, _LAST_YEAR = 1971, 2999
_MAX_QUOTED = 40
_CLOCK = re.compile(r"([0-9]{1,2}):([0-9]{2})(?::([0-9]{2}))?")


def of_bytes(count: float) -> str:
    """Format a byte count in binary units, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def percent(fraction: float, digits: int = 0) -> str:
    """Format a fraction as a percentage. Only 0 is shown as 0%, and only 1 or more as 100%; values close to
    them are shown as "<1%" and "99%"."""
    text = f"{fraction * 100:.{digits}f}"
    step = 10.0**-digits
    if fraction > 0 and float(text) == 0:
        return f"<{step:.{digits}f}%"
    return f"{100 - step:.{digits}f}%" if fraction < 1 and float(text) == 100 else f"{text}%"


def of_measure(value: float | None, unit: str) -> str:
    """Format a measured value with its unit (`AlertRule.unit`). If the unit is "%", the value is a
    fraction."""
    if value is None:
        return "unknown"
    if math.isinf(value):
        return "never"
    match unit:
        case "%":
            return percent(value)
        case "bytes":
            return of_bytes(int(value))
        case "s":
            return of_duration(value)
        case "/s":
            return f"{value:.3g}/s"
        case _:
            number = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
            return f"{number} {unit}".rstrip()


def of_duration(seconds: float) -> str:
    """Round a duration and format it in a suitable unit, such as "75 s", "12 min" or "2.5 h"."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


def duration(seconds: float) -> str:
    """Format a duration as OpenAI's API does, rounded up: "12ms", "8s", "6m0s", "1h0m30s"."""
    if seconds < 1.0:
        milliseconds = math.ceil(seconds * 1000.0)
        return f"{milliseconds}ms" if 0 < milliseconds < 1000 else f"{milliseconds // 1000}s"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


def span_seconds(text: str) -> float | None:
    """Convert a duration such as 90s, 30m, 12h or 7d to seconds. Returns None if the text is not a
    duration."""
    found = _SPAN.fullmatch(text.strip())
    return None if found is None else float(found[1]) * _SECONDS[found[2]]


def span_text(seconds: float) -> str:
    """Format a duration in the largest unit that divides it evenly. `span_seconds` can parse the result."""
    for unit in ("w", "d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:g}s"


def clock_time(text: str, now: float) -> float | None:
    """Return the unix time at which a local time of day, such as 14:03 or 14:03:20, last occurred at or
    before `now`. Return None if the text is not a time of day."""
    found = _CLOCK.fullmatch(text.strip())
    if found is None:
        return None
    hour, minute, second = (int(part or 0) for part in found.groups())
    if hour > 23 or minute > 59 or second > 59:
        return None
    today = datetime.fromtimestamp(now).replace(hour=hour, minute=minute, second=second, microsecond=0)
    if today.timestamp() > now:
        today -= timedelta(days=1)
    return today.timestamp()


def past_time(text: str, now: float) -> float:
    """Convert a past time to unix time. Accepts 14:03, 14:03:20, 20m or -20m (both mean 20 minutes ago), and
    ISO 8601 dates. Times are local unless they include a UTC offset. Raises ValueError with a message that
    says how to fix the input."""
    if (at := clock_time(text, now)) is not None:
        return at
    if (seconds := span_seconds(text.strip().removeprefix("-"))) is not None:
        return now - _allowed(text, seconds, min(now, MAX_SPAN_S))
    return _date(text, "a time such as 14:03, 14:03:20, -20m or 2026-11-20T14:03")


def future_time(text: str, now: float) -> float:
    """Convert a future time to unix time. Accepts a time span from now, such as 90d, and ISO 8601 dates.
    Times are local unless they include a UTC offset. Raises ValueError with a message that says how to fix
    the input."""
    if (seconds := span_seconds(text)) is not None:
        return now + _allowed(text, seconds, MAX_SPAN_S)
    at = _date(text, "a time span such as 90d, or a date such as 2026-11-20 or 2026-11-20T14:30")
    if at <= now:
        raise ValueError(
            f"{quoted(text)} is in the past: use a future date, or a time span from now such as 90d"
        )
    return at


def quoted(text: str) -> str:
    """Put a text in quotation marks for use in a message. A long text is truncated."""
    return repr(text if len(text) <= _MAX_QUOTED else f"{text[:_MAX_QUOTED]}…")


def not_valid(text: str, expected: str) -> str:
    """Return an error message to append to a field's name. The message says that the field's text is empty or
    not valid and what to enter instead."""
    return f"{quoted(text)} is not valid: use {expected}" if text.strip() else f"is empty: enter {expected}"


def _allowed(text: str, seconds: float, max_s: float) -> float:
    """Return the length of a time span in seconds. Raises ValueError if it exceeds `max_s`."""
    if seconds > max_s:
        days = span_text(max_s // 86400 * 86400)
        raise ValueError(f"{quoted(text)} is too long: use at most {days}")
    return seconds


def _date(text: str, expected: str) -> float:
    """Parse an ISO 8601 date. `expected` describes valid input, for the error message. Raises ValueError if
    the text is not valid."""
    try:
        date = datetime.fromisoformat(text.strip())
        if _FIRST_YEAR <= date.year <= _LAST_YEAR:
            return date.timestamp()
    except (ValueError, OverflowError, OSError):
        raise ValueError(not_valid(text, expected)) from None
    raise ValueError(f"{quoted(text)} is out of range: use a date from {_FIRST_YEAR} to {_LAST_YEAR}")
