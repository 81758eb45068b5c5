"""Places for connections: how many there may be, and which one makes room when all places are taken."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

OTHERS_SHARE = 8
"""One place in so many stays free of the connections of any one tenant."""


class Occupant(Protocol):
    """A connection in a pool."""

    def evict(self) -> None: ...


class Pool:
    """Connections of one kind. Those without a complete request are `waiting`, in the order in which they
    began to wait: the first of them is closed when a new connection finds no place.

    A connection may belong to a tenant, whose connections take at most `max_per_tenant` places.
    """

    def __init__(self) -> None:
        self.limit = 0
        self.evicted = 0
        """Connections that were closed to make room."""
        self._members: dict[Occupant, str] = {}
        """Each with its tenant; "" while that is not known."""
        self._by_tenant: Counter[str] = Counter()
        self._waiting: dict[Occupant, None] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def busy(self) -> int:
        """Connections whose request is being answered."""
        return len(self._members) - len(self._waiting)

    @property
    def max_per_tenant(self) -> int:
        """Places that the connections of one tenant may take."""
        return max(self.limit - self.limit // OTHERS_SHARE, 1)

    def add(self, connection: Occupant, tenant: str = "") -> bool:
        """Give the connection a place, if need be that of the one that has waited longest. Return False if
        every place, or every one of the tenant's, belongs to a connection whose request is being answered."""
        if not self._make_room(tenant):
            return False
        while len(self._members) >= self.limit:
            oldest = next(iter(self._waiting), None)
            if oldest is None:
                return False
            self._evict(oldest)
        self._members[connection] = tenant
        self._by_tenant[tenant] += 1
        self._waiting[connection] = None
        return True

    def assign(self, connection: Occupant, tenant: str) -> bool:
        """Make a connection that has a place one of the tenant's. Return False as `add` does."""
        if self._members[connection] == tenant:
            return True
        if not self._make_room(tenant):
            return False
        self._leave_tenant(connection)
        self._members[connection] = tenant
        self._by_tenant[tenant] += 1
        return True

    def remove(self, connection: Occupant) -> None:
        """Free the connection's place."""
        if connection in self._members:
            self._leave_tenant(connection)
            del self._members[connection]
        self._waiting.pop(connection, None)

    def mark_busy(self, connection: Occupant) -> None:
        """The connection has a complete request."""
        self._waiting.pop(connection, None)

    def mark_waiting(self, connection: Occupant) -> None:
        """The connection's request is answered."""
        if connection in self._members:
            self._waiting[connection] = None

    def _make_room(self, tenant: str) -> bool:
        """Close the tenant's connections that have waited longest while it has all of its places. Return
        False if none of them waits."""
        while tenant and self._by_tenant[tenant] >= self.max_per_tenant:
            members = self._members
            oldest = next((one for one in self._waiting if members[one] == tenant), None)
            if oldest is None:
                return False
            self._evict(oldest)
        return True

    def _evict(self, connection: Occupant) -> None:
        self.remove(connection)
        self.evicted += 1
        connection.evict()

    def _leave_tenant(self, connection: Occupant) -> None:
        tenant = self._members[connection]
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
