"""The predicted effect of new limits, as returned by the admin API (`POST /what-if/tenants.set`)."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of a tenant's requests in a period."""

    admitted: int
    over_quota: int
    """Number of requests refused with 429 because of a limit of the tenant or key."""
    refused: int
    """Number of requests refused with 503 because of overload or a deadline."""
    ttft_p99_ms: float | None
    e2e_p99_ms: float | None


class TenantForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The effect that new limits would have had on one tenant in the last few minutes."""

    tenant: str
    recorded: Outcome
    """The outcomes that actually occurred."""
    simulated: Outcome
    """Result of the replay with the current limits. Compare it with `recorded` to see how accurate the replay
    is."""
    predicted: Outcome
    """The outcomes that would have occurred with the new limits: `recorded` plus the difference between the
    replays with the new and the current limits."""


class QuotaForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The effect that new limits would have had, found by replaying the requests of the last few minutes."""

    since: float
    until: float
    """The replayed period, in unix seconds."""
    requests: int
    left_out: int
    """Number of requests that were not replayed, because they were invalid, or because no ready replica of
    their model has a known speed."""
    tenants: list[TenantForecast]
