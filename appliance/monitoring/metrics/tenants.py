"""Limits the number of series by limiting how many tenants have their own metrics."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

OTHERS = "_other"
"""Label value for tenants without their own metrics and for unknown models. No tenant or model can have this
name."""


class ShownTenants:
    """The tenants with their own metrics: the first ones to finish a request. A tenant stays in this set
    until it is deleted, because counters that disappear and return would yield wrong rates."""

    def __init__(self, most: int, known: Callable[[], Container[str]]) -> None:
        """`most` is the maximum number of tenants. `known` returns the tenants created by operators."""
        self.most = most
        self._known = known
        self._shown: dict[str, None] = {}
        """The tenants with their own metrics, in order of arrival."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown)

    def label(self, tenant: str) -> str:
        """Return a tenant's label value: its name if it has its own metrics, otherwise `OTHERS`. A new tenant
        is added to the set unless the set is full."""
        if tenant in self._shown:
            return tenant
        if len(self._shown) >= self.most or tenant not in self._known():
            return OTHERS
        self._shown[tenant] = None
        return tenant

    def forget_deleted(self) -> bool:
        """Remove deleted tenants from the set. Return whether there were any."""
        known, before = self._known(), len(self._shown)
        self._shown = {tenant: None for tenant in self._shown if tenant in known}
        return len(self._shown) < before
