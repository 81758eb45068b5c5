"""Which tenants have metrics of their own: a bounded number."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator

OTHERS = "_other"
"""Stands for all tenants without metrics of their own, and for all names that are no model. Neither a tenant
nor a model can be called so."""


class ShownTenants:
    """The first `most` tenants that a request ended for, until they are deleted.

    A place is not handed on while its tenant is there: counters that come and go show rates that never were.
    """

    def __init__(self, most: int, known: Callable[[], Container[str]]) -> None:
        """`known` are the tenants that operators made."""
        self.most = most
        self._known = known
        self._shown: dict[str, None] = {}
        """In the order in which they came."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._shown)

    def label(self, tenant: str) -> str:
        """What its metrics are called; it gets a place if there is one."""
        if tenant in self._shown:
            return tenant
        if len(self._shown) >= self.most or tenant not in self._known():
            return OTHERS
        self._shown[tenant] = None
        return tenant

    def forget_deleted(self) -> bool:
        """Whether any are gone."""
        known, before = self._known(), len(self._shown)
        self._shown = {tenant: None for tenant in self._shown if tenant in known}
        return len(self._shown) < before
