"""The forecast effect of new limits, as returned by the admin API (`POST /what-if/tenants.set`)."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of a tenant's requests in a period."""

    admitted: int
    over_quota: int
    """Requests refused with 429 because of a limit of the tenant or key."""
    refused: int
    """Requests refused with 503, because of overload or a deadline."""
    ttft_p99_ms: float | None
    e2e_p99_ms: float | None


class TenantForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The effect that new limits would have had on one tenant in the last minutes."""

    tenant: str
    recorded: Outcome
    """What happened."""
    simulated: Outcome
    """Result of the replay with the current limits. Compare it with `recorded` to see how accurate the replay
    is."""
    predicted: Outcome
    """What would have happened with the new limits: `recorded`, changed by the difference between the replays
    with the new and the current limits."""


class QuotaForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The effect that new limits would have had, found by replaying the requests of the last few minutes."""

    since: float
    until: float
    """The replayed period, in unix seconds."""
    requests: int
    left_out: int
    """Requests that were not replayed, because they were invalid or their model has no ready replica whose
    speed is known."""
    tenants: list[TenantForecast]
