"""Remembers the prompt prefixes that a replica has computed and therefore probably cached."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PREFIXES = 4096
"""Maximum number of prefixes remembered per replica. The least recently used are dropped."""


class ComputedPrefixes:
    """The prompt prefixes that one incarnation of a replica has computed most recently. They are remembered
    per tenant, because tenants do not share cached prefixes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], None] = {}

    def add(self, tenant: str, hashes: Sequence[bytes]) -> None:
        """Remember the prefix hashes of a prompt that the replica is computing."""
        for one in hashes:
            self._known.pop((tenant, one), None)
            self._known[tenant, one] = None
        while len(self._known) > MAX_PREFIXES:
            del self._known[next(iter(self._known))]

    def matching(self, tenant: str, hashes: Sequence[bytes]) -> int:
        """Return how many of a prompt's prefixes are remembered. Counting begins with the shortest and stops
        before the first that is not remembered."""
        for number, one in enumerate(hashes):
            if (tenant, one) not in self._known:
                return number
        return len(hashes)
