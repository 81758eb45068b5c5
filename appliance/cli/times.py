"""Times as people type and read them: spans (90s, 30m, 12h, 7d) and dates, local time."""

from __future__ import annotations

import re
import time
from datetime import datetime

from appliance.cli.failure import Failure

_SECONDS = {"s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400, "w": 604800}


def moment(text: str, option: str, *, ahead: bool, now: float | None = None) -> float:
    """Unix seconds of a span before (`ahead`: after) now, or of a date. Raises Failure, naming `option`."""
    now = time.time() if now is None else now
    seconds = _span(text)
    if seconds is not None:
        return now + seconds if ahead else now - seconds
    try:
        at = datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError, OSError):
        raise Failure(
            f"{option} {text!r} is neither a span nor a date: write for example 90s, 30m, 12h, 7d, "
            f"2026-11-20 or 2026-11-20T14:30"
        ) from None
    if ahead and at <= now:
        raise Failure(f"{option} {text!r} is past: write a later date, or a span from now such as 90d")
    return at


def span_s(text: str, option: str) -> float:
    """Seconds of a span. Raises Failure, naming `option`."""
    seconds = _span(text)
    if seconds is None:
        raise Failure(f"{option} {text!r} is no span of time: write for example 90s, 30m, 12h or 7d")
    return seconds


def of_span(seconds: float) -> str:
    """A span as `span_s` takes it, in the largest unit that fits."""
    for unit in ("w", "d", "h", "m"):
        if seconds and seconds % _SECONDS[unit] == 0:
            return f"{seconds / _SECONDS[unit]:g}{unit}"
    return f"{seconds:g}s"


def _span(text: str) -> float | None:
    span = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)", text.strip())
    return float(span[1]) * _SECONDS[span[2]] if span else None


def local(seconds: float | None) -> str:
    """Unix seconds as local date and time; empty for None."""
    return "" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def local_short(seconds: float) -> str:
    """The same without the year."""
    return time.strftime("%m-%d %H:%M:%S", time.localtime(seconds))
