"""Spans of time as clients of OpenAI's API read them."""

from __future__ import annotations

import math


def duration(seconds: float) -> str:
    """As OpenAI writes it, never too short: "12ms", "8s", "6m0s", "1h0m30s"."""
    if seconds < 1.0:
        milliseconds = math.ceil(seconds * 1000.0)
        return f"{milliseconds}ms" if 0 < milliseconds < 1000 else f"{milliseconds // 1000}s"
    whole = math.ceil(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"
