"""Limits the number of connections and chooses which one to close when there is no room for a new one."""

from __future__ import annotations

from collections import Counter
from typing import Protocol

OTHERS_SHARE = 8
"""Each tenant must leave 1 / `OTHERS_SHARE` of a pool free for other tenants."""


class Occupant(Protocol):
    """A connection in a pool."""

    def abort(self) -> None: ...


class Pool:
    """Connections that share a limit.

    A connection without a complete request is *waiting*. If there is no room for a new connection, the pool
    closes the longest-waiting connection of the source with the most waiting connections. A connection may
    belong to a tenant. A pool holds at most `max_per_tenant` connections of the same tenant.
    """

    def __init__(self) -> None:
        self.limit = 0
        self.evicted = 0
        """Number of connections closed to make room for others."""
        self._members: dict[Occupant, str] = {}
        """Each connection's tenant, or "" while it has none."""
        self._by_tenant: Counter[str] = Counter()
        self._waiting: dict[Occupant, str] = {}
        """The source (origin) of each waiting connection."""
        self._waiting_by_source: Counter[str] = Counter()
        self._sources: dict[Occupant, str] = {}

    def __len__(self) -> int:
        return len(self._members)

    @property
    def busy(self) -> int:
        """Number of connections with a request that is being answered."""
        return len(self._members) - len(self._waiting)

    @property
    def max_per_tenant(self) -> int:
        """Maximum number of connections per tenant."""
        return max(self.limit - self.limit // OTHERS_SHARE, 1)

    def add(self, connection: Occupant, tenant: str = "", source: str = "") -> bool:
        """Add the connection to the pool. If the pool is full, close a waiting connection first. Return False
        if the pool, or the tenant's share of it, is full of connections with requests in progress. `source`
        identifies the connection's origin. If all connections have an empty source, the longest-waiting
        connection is closed.
        """
        if not self._make_space_of(tenant) or not self.make_space(1):
            return False
        self._members[connection] = tenant
        self._by_tenant[tenant] += 1
        self._sources[connection] = source
        self.mark_waiting(connection)
        return True

    def assign(self, connection: Occupant, tenant: str) -> bool:
        """Assign a connection in the pool to the tenant. Return False in the same cases as `add`."""
        if self._members[connection] == tenant:
            return True
        if not self._make_space_of(tenant):
            return False
        self._leave_tenant(connection)
        self._members[connection] = tenant
        self._by_tenant[tenant] += 1
        return True

    def make_space(self, places: int = 0) -> bool:
        """Close waiting connections until there is room for this many new ones. Return False if there are too
        few waiting connections."""
        while len(self._members) + places > self.limit:
            oldest = self._oldest_of_largest_source()
            if oldest is None:
                return False
            self._evict(oldest)
        return True

    def remove(self, connection: Occupant) -> None:
        """Remove the connection from the pool."""
        if connection in self._members:
            self._leave_tenant(connection)
            del self._members[connection]
            self.mark_busy(connection)
            del self._sources[connection]

    def mark_busy(self, connection: Occupant) -> None:
        """Record that the connection has received a complete request and is no longer waiting."""
        source = self._waiting.pop(connection, None)
        if source is not None:
            self._waiting_by_source[source] -= 1
            if not self._waiting_by_source[source]:
                del self._waiting_by_source[source]

    def mark_waiting(self, connection: Occupant) -> None:
        """Record that the connection is waiting again, because its request has been answered."""
        if connection in self._members and connection not in self._waiting:
            source = self._sources[connection]
            self._waiting[connection] = source
            self._waiting_by_source[source] += 1

    def _oldest_of_largest_source(self) -> Occupant | None:
        most = max(self._waiting_by_source.values(), default=0)
        by_source = self._waiting_by_source
        return next((one for one, source in self._waiting.items() if by_source[source] == most), None)

    def _make_space_of(self, tenant: str) -> bool:
        """Close the tenant's waiting connections, longest-waiting first, until the tenant has room for a new
        one. Return False if too few of its connections are waiting."""
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
        connection.abort()

    def _leave_tenant(self, connection: Occupant) -> None:
        tenant = self._members[connection]
        self._by_tenant[tenant] -= 1
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
