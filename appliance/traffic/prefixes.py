"""Remembers the beginnings of prompts that a replica has computed and has therefore probably cached."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PREFIXES = 4096
"""Maximum number of prompt beginnings remembered per replica. The least recently used are dropped."""


class ComputedPrefixes:
    """The beginnings of the prompts that one incarnation of a replica has computed most recently. Tenants do
    not share cached prefixes, so the beginnings are remembered separately for each tenant."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], None] = {}

    def add(self, tenant: str, hashes: Sequence[bytes]) -> None:
        """Remember the beginnings of a prompt that the replica computes, each given by its hash."""
        for one in hashes:
            self._known.pop((tenant, one), None)
            self._known[tenant, one] = None
        while len(self._known) > MAX_PREFIXES:
            del self._known[next(iter(self._known))]

    def matching(self, tenant: str, hashes: Sequence[bytes]) -> int:
        """Return how many beginnings of a prompt are remembered, counting from the shortest until one is
        not."""
        for number, one in enumerate(hashes):
            if (tenant, one) not in self._known:
                return number
        return len(hashes)
