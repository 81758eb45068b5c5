"""Limits the memory that request heads and read-ahead bytes take up across all connections."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Protocol, TypeVar

MAX_REQUEST_MEMORY_BYTES = 32 << 20
"""Maximum total size, in bytes, of request heads and read-ahead bytes. Only connections that hold more than
`SMALL_REQUEST_BYTES` are counted."""
SMALL_REQUEST_BYTES = 8 << 10
"""Connections that hold no more bytes than this are not counted. Typical request heads take 1 to 6 KiB."""


class HeadHolder(Protocol):
    """A connection that holds a request in memory."""

    @property
    def owner(self) -> tuple[bool, str]:
        """Whether the client is authenticated, and the client's tenant."""
        ...

    def give_up_request(self) -> None:
        """Refuse the request held by the connection."""
        ...


C = TypeVar("C", bound=HeadHolder)


def of_largest_owner(sizes: Mapping[C, int]) -> list[C]:
    """Return the connections of the tenant that holds the most memory, in the order of `sizes`."""
    totals: Counter[tuple[bool, str]] = Counter()
    for connection, size in sizes.items():
        totals[connection.owner] += size
    largest, _ = totals.most_common(1)[0]
    return [connection for connection in sizes if connection.owner == largest]


class RequestMemory:
    """Counts the memory held by connections. If the total exceeds the limit, the largest requests of the
    tenant holding the most memory are refused. All unauthenticated clients count as one tenant."""

    def __init__(self) -> None:
        self.refused = 0
        """Number of requests that were refused to free memory."""
        self._sizes: dict[HeadHolder, int] = {}
        self._total = 0

    def hold(self, connection: HeadHolder, size: int) -> None:
        """Record that the connection's requests currently take up `size` bytes of memory."""
        self._total -= self._sizes.pop(connection, 0)
        if size <= SMALL_REQUEST_BYTES:
            return
        self._sizes[connection] = size
        self._total += size
        while self._total > MAX_REQUEST_MEMORY_BYTES:
            requests = sorted(of_largest_owner(self._sizes), key=self._sizes.__getitem__, reverse=True)
            # Refuse the largest request. If the tenant has many requests, refuse one more for every 64 of
            # them, so that fewer searches are needed.
            for largest in requests[: 1 + len(requests) // 64]:
                self._total -= self._sizes.pop(largest)
                self.refused += 1
                largest.give_up_request()
