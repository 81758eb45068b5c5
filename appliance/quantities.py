"""Formats byte counts and durations as text."""

from __future__ import annotations

import math


def of_bytes(count: float) -> str:
    """Return a number of bytes in binary units, such as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 100 else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


def duration(seconds: float) -> str:
    """Return a duration in the format of OpenAI's API, rounded up: "12ms", "8s", "6m0s", "1h0m30s"."""
    if seconds < 1.0:
        milliseconds = math.ceil(seconds * 1000.0)
        return f"{milliseconds}ms" if 0 < milliseconds < 1000 else f"{milliseconds // 1000}s"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
