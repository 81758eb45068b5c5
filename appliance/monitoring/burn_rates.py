"""Predicts when limits will be exhausted, based on the last minute's usage."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from appliance.protocol import LimitUsage

WINDOW_S = 60.0
_EVERY_S = 2.0
_MIN_SPAN_S = 10.0
"""Exhaustion is predicted only after a limit's usage has been recorded for this many seconds."""


class _Use(NamedTuple):
    at: float
    used: int


class BurnRates:
    """Records how much of each limit tenants have used over the last minute."""

    def __init__(self) -> None:
        self._uses: dict[tuple[str, str], deque[_Use]] = {}
        """The recorded usage of each limit, oldest first, by tenant and limit name."""

    def record(self, at: float, usage: Mapping[str, Iterable[LimitUsage]]) -> None:
        """Record the current usage of all tenants' limits. `at` is a time on a monotonic clock."""
        found = {}
        for tenant, limits in usage.items():
            for limit in limits:
                uses = found[tenant, limit.limit] = self._uses.get((tenant, limit.limit), deque())
                if not uses or at >= uses[-1].at + _EVERY_S:
                    uses.append(_Use(at, limit.used))
                while uses[0].at < at - WINDOW_S:
                    uses.popleft()
        self._uses = found

    def exhausted_in_s(self, at: float, tenant: str, limits: Iterable[LimitUsage]) -> float | None:
        """Return the number of seconds until the first of a tenant's limits will be exhausted if usage keeps
        growing at the last minute's rate, or None if it is not growing."""
        times = [self._time_left(at, tenant, limit) for limit in limits]
        return min((one for one in times if one is not None), default=None)

    def _time_left(self, at: float, tenant: str, limit: LimitUsage) -> float | None:
        left = limit.capacity - limit.used
        if left <= 0:
            return 0.0
        uses = self._uses.get((tenant, limit.limit))
        if not uses or at - uses[0].at < _MIN_SPAN_S:
            return None
        growth_per_s = (limit.used - uses[0].used) / (at - uses[0].at)
        return left / growth_per_s if growth_per_s > 0 else None
