"""Figures by tenant, for a bounded number of them: the most active ones, and the rest together."""

from __future__ import annotations

from typing import NamedTuple

from appliance.watch.metrics.families import Families

REST = "_other"
"""Stands for all tenants that are not shown; no tenant can be called so."""

_HALF_LIFE_S = 600.0
"""After which activity counts half."""
_RANK_EVERY_S = 30.0
_INCUMBENT = 2.0
"""Nobody takes the place of a tenant that was more than half as active: places should seldom change."""
_MOST_EXPONENT = 500.0


class Ended(NamedTuple):
    """What a request took that ended."""

    outcome: str
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    billed_tokens: int
    service: float
    """Weighted tokens."""


class Account:
    """What one tenant got since the service began."""

    __slots__ = ("activity", "outcomes", "sums")

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.sums = [0.0 if field == "service" else 0 for field in Ended._fields[1:]]
        """Of the fields of `Ended` but the outcome."""
        self.activity = 0.0
        """Requests and tokens, of which recent ones count more."""

    def count(self, ended: Ended) -> None:
        """A request ended."""
        self.outcomes[ended.outcome] = self.outcomes.get(ended.outcome, 0) + 1
        self.sums = [have + more for have, more in zip(self.sums, ended[1:], strict=True)]


class TenantAccounts:
    """The accounts of all tenants, of which at most `most` are shown by name.

    A counter must never fall. So a tenant's is its whole sum, whether or not it was shown all the time, and
    that of the rest has what happened to tenants while they were not shown: rates add up, sums do not.
    """

    def __init__(self, most: int) -> None:
        self.shown: dict[str, Account] = {}
        self._rest = Account()
        self._most = most
        self._accounts: dict[str, Account] = {}
        self._written: set[str] = set()
        self._epoch = 0.0
        """What is done at this time counts once, a half-life later twice: decay, without touching all."""
        self._rank_at = 0.0

    def count(self, tenant: str, ended: Ended, now: float) -> None:
        """A request of the tenant ended at `now`, in seconds of a monotonic clock."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = Account()
        account.count(ended)
        account.activity += (1 + ended.prompt_tokens + ended.generated_tokens) * 2.0 ** self._exponent(now)
        if tenant not in self.shown:
            self._find_place(tenant, account, now)
        if tenant not in self.shown:
            self._rest.count(ended)

    def write(self, families: Families) -> None:
        """Set what the families say of tenants."""
        sums = (
            families.tenant_prompt_tokens,
            families.tenant_cached_tokens,
            families.tenant_generated_tokens,
            families.tenant_billed_tokens,
            families.tenant_service,
        )
        shown = {**self.shown, REST: self._rest}
        for name in self._written - shown.keys():
            for outcome in self._accounts[name].outcomes:
                families.tenant_requests.forget(name, outcome)
            for family in sums:
                family.forget(name)
        self._written = set(shown)
        for name, account in shown.items():
            for outcome, number in account.outcomes.items():
                families.tenant_requests.set(number, name, outcome)
            for family, total in zip(sums, account.sums, strict=True):
                family.set(total, name)

    def _find_place(self, tenant: str, account: Account, now: float) -> None:
        if len(self.shown) < self._most:
            self.shown[tenant] = account
        elif now >= self._rank_at:
            self._rank_at = now + _RANK_EVERY_S
            self._rank()

    def _rank(self) -> None:
        def standing(item: tuple[str, Account]) -> float:
            name, account = item
            return account.activity * (_INCUMBENT if name in self.shown else 1.0)

        self.shown = dict(sorted(self._accounts.items(), key=standing, reverse=True)[: self._most])

    def _exponent(self, now: float) -> float:
        exponent = (now - self._epoch) / _HALF_LIFE_S
        if exponent <= _MOST_EXPONENT:
            return exponent
        for account in self._accounts.values():
            account.activity *= 2.0**-exponent
        self._epoch = now
        return 0.0
