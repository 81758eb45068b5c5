"""Chooses a front process for each new connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from appliance.front_pool.front import Front, Untaken
from appliance.front_pool.shortage import NoteProblem, ShortageReport


class ConnectionBalancer:
    """Assigns connections to the fronts in turn, skipping fronts that are full."""

    def __init__(self, fronts: Sequence[Front], note: NoteProblem) -> None:
        """The caller may modify `fronts` at any time. `note` reports a problem to the operator."""
        self._fronts = fronts
        self._next = 0
        self._waiting: deque[Untaken] = deque()
        """Accepted connections not yet given to a front."""
        self._shortage = ShortageReport("fronts", note)

    @property
    def open(self) -> bool:
        """Whether a front can currently take a new connection."""
        return not self._waiting and any(front.takes_connections for front in self._fronts)

    def assign(self, *connections: Untaken) -> None:
        """Assign the waiting connections, and then the new ones, to fronts. If no front accepts connections
        or too many files are open, the remaining connections wait until the next call."""
        self._waiting.extend(connections)
        while self._waiting and (front := self._next_front()) is not None:
            try:
                front.give(self._waiting[0])
            except OSError as error:
                self._shortage.report(
                    "accepted connections are waiting because they cannot be sent to a front process", error
                )
                return
            self._waiting.popleft()

    def _next_front(self) -> Front | None:
        """Return the next front with room for a connection. If all fronts are full, return the next one
        anyway; it refuses the connection with 503. Return None if no front accepts connections."""
        for needs_capacity in (True, False):
            for step in range(len(self._fronts)):
                front = self._fronts[(self._next + step) % len(self._fronts)]
                if front.takes_connections and (front.has_capacity or not needs_capacity):
                    self._next += step + 1
                    return front
        return None
