"""Formats values with units. None means unknown and is shown as "--"."""

from __future__ import annotations

import time

from appliance import quantities

UNKNOWN = "--"
NOT_SUPPORTED = "n/a"
"""Shown instead of values that a device does not support."""


def count(value: float | None) -> str:
    """Format a number with thousands separators."""
    return UNKNOWN if value is None else f"{value:,.0f}"


def counted(value: float | None, noun: str) -> str:
    """Format a count with its noun, such as "1 request" or "2 requests"."""
    return f"{count(value)} {noun}{'' if value == 1 else 's'}"


def short(value: float | None) -> str:
    """Format a number with up to three digits and a decimal prefix, such as "12.3k"."""
    if value is None:
        return UNKNOWN
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "G"), (1e15, "T")):
        if abs(value) < limit * 0.9995:
            scaled = value / (limit / 1e3)
            if unit == "" and float(value).is_integer():
                return f"{value:.0f}"
            return f"{scaled:.0f}{unit}" if abs(scaled) >= 99.95 else f"{scaled:.1f}{unit}"
    return f"{value:.1e}"


def rate(value: float | None) -> str:
    """Format a rate per second. Nonzero rates are never shown as 0."""
    if value is None or value == 0 or value >= 99.95:
        return short(value)
    return "<0.1" if value < 0.1 else f"{value:.1f}"


def percent(fraction: float | None, digits: int = 0) -> str:
    """Format a fraction as a percentage. Fractions between 0 and 1 are never shown as 0% or 100%."""
    return UNKNOWN if fraction is None else quantities.percent(fraction, digits)


def ms(value: float | None) -> str:
    """Format a duration in milliseconds to three significant digits, switching to seconds at 1 s. Nonzero
    values are never shown as 0."""
    if value is None:
        return UNKNOWN
    if value >= 999.5:
        digits = 2 if value < 10_000 else 1 if value < 100_000 else 0
        return f"{value / 1000:.{digits}f}s"
    if 0 < value < 0.05:
        return "<0.1ms"
    return f"{value:.0f}ms" if value >= 100 else f"{value:.1f}ms"


def us(value: float | None) -> str:
    """Format a duration in microseconds, switching to milliseconds at 1 ms. Nonzero values are never shown as
    0."""
    if value is None:
        return UNKNOWN
    if value >= 999.5:
        return ms(value / 1000)
    return "<1µs" if 0 < value < 0.5 else f"{value:.0f}µs"


def seconds(value: float | None) -> str:
    """Format a duration in seconds, with up to two units. Nonzero durations are never shown as 0."""
    if value is None:
        return UNKNOWN
    if 0 < value < 0.05:
        return "<0.1s"
    if value < 10:
        return f"{value:.1f}s"
    whole = int(value)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def size(value: float | None) -> str:
    """Format a number of bytes in binary units."""
    if value is None:
        return UNKNOWN
    for unit in ("B", "K", "M", "G"):
        if abs(value) < 1000:
            return f"{value:.0f}{unit}" if unit == "B" or value >= 99.95 else f"{value:.1f}{unit}"
        value /= 1024
    return f"{value:.1f}T"


def about(where: str, description: str) -> str:
    """Return the description of an alert, adding the subject's name unless the description contains it."""
    return description if where in description else f"{where}: {description}"


def clock(at: float | None) -> str:
    """Format a time of day."""
    return _local(at, "%H:%M:%S")


def date(at: float | None) -> str:
    """Format a date and time."""
    return _local(at, "%Y-%m-%d %H:%M:%S")


def short_date(at: float | None) -> str:
    """Format a date and time without the year."""
    return _local(at, "%m-%d %H:%M:%S")


def _local(at: float | None, form: str) -> str:
    if at is None:
        return UNKNOWN
    try:
        return time.strftime(form, time.localtime(at))
    except (OverflowError, ValueError, OSError):  # The time is outside the calendar's range.
        return f"{at:g}"


def ratio(part: float | None, whole: float | None) -> float | None:
    """Return part / whole, or None if either is unknown or the whole is 0."""
    return None if part is None or not whole else part / whole
