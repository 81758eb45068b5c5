"""Decides which tenants have their own metrics, because the number of series must be bounded."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

OTHERS = "_other"
"""Label value that represents all tenants without their own metrics, and all unknown models. No tenant or
model can have this name."""


class ShownTenants:
    """Contains the first `most` tenants with a finished request until they are deleted. Existing tenants are
    never displaced, because counters that disappear and return would show wrong rates.
    """

    def __init__(self, most: int, known: Callable[[], Container[str]]) -> None:
        """Create an empty set. `known` contains the tenants that operators created."""
        self.most = most
        self._known = known
        self._shown: dict[str, None] = {}
        """The tenants with their own metrics, in order of arrival."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown)

    def label(self, tenant: str) -> str:
        """Return the tenant's label value. A new tenant gets its own value while fewer than `most` tenants
        have one."""
        if tenant in self._shown:
            return tenant
        if len(self._shown) >= self.most or tenant not in self._known():
            return OTHERS
        self._shown[tenant] = None
        return tenant

    def forget_deleted(self) -> bool:
        """Remove deleted tenants. Returns whether there were any."""
        known, before = self._known(), len(self._shown)
        self._shown = {tenant: None for tenant in self._shown if tenant in known}
        return len(self._shown) < before
