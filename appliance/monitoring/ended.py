"""Counts finished requests and keeps the latencies of the most recent ones, for snapshots of the service."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from appliance.monitoring.metrics.families.requests import outcome
from appliance.snapshot import Latency, LatencyPercentiles
from appliance.traffic.lifecycle import RowSink
from store.requests import RequestRow

WINDOW_S = 60.0
MAX_KEPT = 4096
"""Maximum number of latencies kept. Above 68 requests per second, the percentiles therefore cover less time
than `WINDOW_S`; their `window_s` field gives the actual period."""
_SHARES = (0.5, 0.9, 0.99)
_REUSED_S = 0.9
"""How long computed percentiles are reused, in seconds. Sorting the latencies is the most expensive part of a
snapshot."""


class TenantCounts:
    """Statistics of a tenant's finished requests."""

    __slots__ = ("billed_tokens", "cached_tokens", "prompt_tokens", "refused", "requests")

    def __init__(self) -> None:
        self.requests = self.refused = 0
        self.prompt_tokens = self.cached_tokens = self.billed_tokens = 0

    def add(self, row: RequestRow) -> None:
        """Count a finished request."""
        self.requests += 1
        self.refused += outcome(row) == "refused"
        self.prompt_tokens += row.prompt_tokens
        self.cached_tokens += row.cached_tokens
        self.billed_tokens += row.billed_tokens


class _Ended(NamedTuple):
    at: float
    ttft_ms: float | None
    itl_ms: float | None
    queue_ms: float | None
    e2e_ms: float | None


class EndedRequests:
    """Counts finished requests and passes their rows on to the request log. Must be used on the event loop
    thread."""

    def __init__(self, rows: RowSink, is_tenant: Callable[[str], bool]) -> None:
        """`is_tenant` returns whether a tenant exists. Requests from unknown tenants are counted only
        in the service's totals."""
        self.failed = self.cancelled = self.billed_tokens = 0
        self.tenants: dict[str, TenantCounts] = {}
        self._rows = rows
        self._is_tenant = is_tenant
        self._recent: deque[_Ended] = deque(maxlen=MAX_KEPT)
        self._latency, self._computed_at = Latency(), float("-inf")

    def open(self, row: RequestRow) -> bool:
        """Pass an admitted request's row on to the request log."""
        return self._rows.open(row)

    def end(self, row: RequestRow) -> bool:
        """Count a finished request and pass its row on to the request log."""
        how, tenant = outcome(row), row.tenant or ""
        self.failed += how == "failed"
        self.cancelled += how == "cancelled"
        self.billed_tokens += row.billed_tokens
        if tenant in self.tenants or self._is_tenant(tenant):
            self.tenants.setdefault(tenant, TenantCounts()).add(row)
        # A retry that joined a running request or got a stored answer was not run separately, so its timings
        # are not counted.
        if row.retry not in ("joined", "repeated"):
            e2e_ms = row.e2e_ms if how == "ok" else None
            self._recent.append(_Ended(time.monotonic(), row.ttft_ms, row.itl_ms, row.queue_ms, e2e_ms))
        return self._rows.end(row)

    def forget_deleted(self) -> None:
        """Discard deleted tenants' counts."""
        self.tenants = {name: one for name, one in self.tenants.items() if self._is_tenant(name)}

    def latency(self) -> Latency:
        """Return latency percentiles for the requests that ended within the window."""
        now = time.monotonic()
        if now - self._computed_at < _REUSED_S:
            return self._latency
        while self._recent and self._recent[0].at < now - WINDOW_S:
            self._recent.popleft()
        full = len(self._recent) == MAX_KEPT
        window_s = now - self._recent[0].at if full else WINDOW_S
        self._latency, self._computed_at = (
            Latency(
                ttft=_percentiles(window_s, [one.ttft_ms for one in self._recent]),
                itl=_percentiles(window_s, [one.itl_ms for one in self._recent]),
                queue=_percentiles(window_s, [one.queue_ms for one in self._recent]),
                e2e=_percentiles(window_s, [one.e2e_ms for one in self._recent]),
            ),
            now,
        )
        return self._latency


def _percentiles(window_s: float, values: Iterable[float | None]) -> LatencyPercentiles:
    known = sorted(value for value in values if value is not None)
    if not known:
        return LatencyPercentiles(window_s=window_s, count=0)
    p50, p90, p99 = (known[min(len(known) - 1, int(share * len(known)))] for share in _SHARES)
    return LatencyPercentiles(window_s=window_s, count=len(known), p50_ms=p50, p90_ms=p90, p99_ms=p99)
