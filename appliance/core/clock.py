"""Detects system clock jumps, so that a wrong time does not cause log entries to be removed too early."""

from __future__ import annotations

import time
from collections.abc import Callable

MIN_JUMP_S = 600.0
HOLD_S = 24 * 3600.0
"""After a clock jump, no log entries are removed for this many seconds. If the clock is corrected, removal
resumes immediately."""


def _steady() -> float:
    """Return the time, in seconds, of a clock that cannot be set and keeps running while the machine is
    suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class ClockGuard:
    """Compares wall-clock time with a clock that cannot be set."""

    def __init__(self, wall: Callable[[], float] = time.time, steady: Callable[[], float] = _steady) -> None:
        self._wall, self._steady = wall, steady
        self._offset_s = wall() - steady()
        self._jumped_at: float | None = None
        self._seen_s = 0.0

    @property
    def jump_s(self) -> float:
        """Number of seconds by which the system clock has jumped, or 0 if it has not jumped within the last
        `HOLD_S` seconds."""
        now = self._steady()
        jump_s = self._wall() - now - self._offset_s
        if abs(jump_s) < MIN_JUMP_S:
            self._jumped_at = None
            return 0.0
        if self._jumped_at is None or abs(jump_s - self._seen_s) >= MIN_JUMP_S:
            self._jumped_at, self._seen_s = now, jump_s
        if now - self._jumped_at < HOLD_S:
            return jump_s
        # The clock has kept the new time for `HOLD_S` seconds, so accept it as correct.
        self._offset_s += jump_s
        self._jumped_at = None
        return 0.0
