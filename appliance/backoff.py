"""How long to wait before something that died is started again."""

from __future__ import annotations

_FIRST_S = 0.1
_MOST_S = 5.0
_HEALTHY_S = 30.0


class Backoff:
    """Doubles from 0.1 s to 5 s while lives are short; a life of 30 s in service starts over."""

    def __init__(self) -> None:
        self._next_s = _FIRST_S

    def delay_s(self, lived_s: float) -> float:
        """The wait after a life that was in service for `lived_s` (0: it never was)."""
        if lived_s >= _HEALTHY_S:
            self._next_s = _FIRST_S
        delay, self._next_s = self._next_s, min(self._next_s * 2, _MOST_S)
        return delay
