"""Chooses the front process that gets a new connection."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from appliance.channel.core_messages import ClientConnection
from appliance.front_pool.front import Front, Untaken


class ConnectionBalancer:
    """Assigns connections to the fronts in turn, skipping fronts that are full."""

    def __init__(self, fronts: Sequence[Front]) -> None:
        """`fronts` may change at any time."""
        self._fronts = fronts
        self._next = 0
        self._waiting: deque[Untaken] = deque()
        """Connections waiting for a front that accepts connections."""

    @property
    def open(self) -> bool:
        """Whether at least one front currently accepts connections."""
        return any(front.takes_connections for front in self._fronts)

    def assign(self, connection: ClientConnection, *descriptors: int) -> None:
        """Give the connection to a front. If no front accepts connections, the connection waits. The caller
        closes its own descriptors. Raises OSError if too many files are open."""
        if (front := self._next_front()) is not None:
            front.give(connection, *descriptors)
        else:
            self._waiting.append(Untaken(connection, descriptors))

    def assign_again(self, connections: Sequence[Untaken] = ()) -> None:
        """Assign the waiting connections to fronts, followed by `connections`, which a front left unread when
        it exited or could not receive. Their descriptors are closed here. Connections that cannot be assigned
        now, because no front accepts connections or because too many files are open, keep waiting."""
        self._waiting.extend(connections)
        while self._waiting and (front := self._next_front()) is not None:
            first = self._waiting[0]
            try:
                front.give(first.connection, *first.descriptors)
            except OSError:
                return  # tried again after the next report of a front
            self._waiting.popleft().close()

    def _next_front(self) -> Front | None:
        """Return the next front that has a free place. If all fronts are full, return the next front, which
        refuses connections with 503. Return None if no front accepts connections."""
        for needs_room in (True, False):
            for step in range(len(self._fronts)):
                front = self._fronts[(self._next + step) % len(self._fronts)]
                if front.takes_connections and (front.has_room or not needs_room):
                    self._next += step + 1
                    return front
        return None
