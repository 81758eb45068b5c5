"""Notices that the time of day was set: what is old by a wrong clock must not be removed from the logs."""

from __future__ import annotations

import time
from collections.abc import Callable

LEAST_JUMP_S = 600.0
HOLD_S = 24 * 3600.0
"""For so long after a jump nothing is removed, unless the clock is set back to where it was."""


def _steady() -> float:
    """Return seconds that no one can set, suspended time included."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClockGuard:
    """Compares the time of day with a clock that cannot be set."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _steady) -> None:
        self._wall, self._steady = wall, steady
        self._offset_s = wall() - steady()
        self._jumped_at: float | None = None
        self._seen_s = 0.0

    @property
    def jump_s(self) -> float:
        """Return by how much the time of day was set lately; 0 if it was not, or that is `HOLD_S` ago."""
        now = self._steady()
        jump_s = self._wall() - now - self._offset_s
        if abs(jump_s) < LEAST_JUMP_S:
            self._jumped_at = None
            return 0.0
        if self._jumped_at is None or abs(jump_s - self._seen_s) >= LEAST_JUMP_S:
            self._jumped_at, self._seen_s = now, jump_s
        if now - self._jumped_at < HOLD_S:
            return jump_s
        # The new time is taken for the right one.
        self._offset_s += jump_s
        self._jumped_at = None
        return 0.0
