"""Reports to the operator when file descriptors or memory run out."""

from __future__ import annotations

import time
from collections.abc import Callable

_SAME_SHORTAGE_S = 60.0
"""If file descriptors or memory run out again within this many seconds, the shortage is not reported
again."""

NoteProblem = Callable[[str, str], None]
"""Reports a problem to the operator. The arguments are the problem's location and description."""


class ShortageReport:
    """Reports that one part of the service has run out of descriptors or memory. A lasting shortage is
    reported only once."""

    def __init__(self, location: str, note: NoteProblem) -> None:
        self._location = location
        self._note = note
        self._latest_at: float | None = None

    def report(self, operation: str, shortage: OSError) -> None:
        """Report that `operation` is impossible because descriptors or memory have run out."""
        now = time.monotonic()
        if self._latest_at is None or now - self._latest_at > _SAME_SHORTAGE_S:
            self._note(
                self._location,
                f"{operation} ({shortage.strerror}): raise the open file limit (ulimit -n)",
            )
        self._latest_at = now
