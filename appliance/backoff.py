"""How long to wait before something that died is started again."""

from __future__ import annotations

_FIRST_S = 0.1
_MOST_S = 5.0
_HEALTHY_S = 30.0


class Backoff:
    """Doubles from `first_s` to `most_s` while lives are short; a life of 30 s in service starts over."""

    def __init__(self, first_s: float = _FIRST_S, most_s: float = _MOST_S) -> None:
        self._first_s = self._next_s = first_s
        self._most_s = most_s

    def delay_s(self, lived_s: float) -> float:
        """The wait after a life that was in service for `lived_s` (0: it never was)."""
        if lived_s >= _HEALTHY_S:
            self._next_s = self._first_s
        delay, self._next_s = self._next_s, min(self._next_s * 2, self._most_s)
        return delay
