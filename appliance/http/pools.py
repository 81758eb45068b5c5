"""Places for connections: how many there may be, and which one makes room when all places are taken."""

from __future__ import annotations

from typing import Protocol


class Occupant(Protocol):
    """A connection in a pool."""

    def evict(self) -> None: ...


class Pool:
    """Connections of one kind. Those without a complete request are `waiting`, in the order in which they
    began to wait: the first of them is closed when a new connection finds no place."""

    def __init__(self) -> None:
        self.limit = 0
        self.evicted = 0
        """Connections that were closed to make room."""
        self._members: set[Occupant] = set()
        self._waiting: dict[Occupant, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def busy(self) -> int:
        """Connections whose request is being answered."""
        return len(self._members) - len(self._waiting)

    def add(self, connection: Occupant) -> bool:
        """Give the connection a place, if need be that of the one that has waited longest. Return False if
        every place belongs to a connection whose request is being answered."""
        while len(self._members) >= self.limit:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self.remove(oldest)
            self.evicted += 1
            oldest.evict()
        self._members.add(connection)
        self._waiting[connection] = None
        return True

    def remove(self, connection: Occupant) -> None:
        """Free the connection's place."""
        self._members.discard(connection)
        self._waiting.pop(connection, None)

    def mark_busy(self, connection: Occupant) -> None:
        """The connection has a complete request."""
        self._waiting.pop(connection, None)

    def mark_waiting(self, connection: Occupant) -> None:
        """The connection's request is answered."""
        if connection in self._members:
            self._waiting[connection] = None
