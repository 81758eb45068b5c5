"""Keeps a model's recent times to first token, for the autoscaler."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 60.0
_MAX_KEPT = 512


class RecentTtft:
    """Times to first token of the requests that finished within the last minute (at most the 512 newest)."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, float]] = deque(maxlen=_MAX_KEPT)

    def add(self, now: float, ttft_s: float) -> None:
        """Add a finished request's time to first token."""
        self._recent.append((now, ttft_s))

    def p99_s(self, now: float) -> float | None:
        """Return the 99th percentile of the times to first token, or None if no request has finished
        recently."""
        recent = sorted(ttft_s for at, ttft_s in self._recent if at >= now - _WINDOW_S)
        return recent[min(len(recent) - 1, int(0.99 * len(recent)))] if recent else None
