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
        """Give the connection to the next front that has a free place. If all fronts are full, the next front
        gets the connection and refuses it with 503. If no front accepts connections, the connection waits.
        The caller closes its own descriptors."""
        for needs_room in (True, False):
            for step in range(len(self._fronts)):
                front = self._fronts[(self._next + step) % len(self._fronts)]
                if front.takes_connections and (front.has_room or not needs_room):
                    front.give(connection, *descriptors)
                    self._next += step + 1
                    return
        self._waiting.append(Untaken(connection, descriptors))

    def assign_again(self, connections: Sequence[Untaken] = ()) -> None:
        """Assign the waiting connections to fronts, followed by `connections`, which a front left unread when
        it exited or could not receive. Their descriptors are closed here."""
        waiting = [*self._waiting, *connections]
        self._waiting.clear()
        for one in waiting:
            self.assign(one.connection, *one.descriptors)
            one.close()
