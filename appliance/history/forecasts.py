"""The predicted effect of new limits, as returned by the admin API (`POST /what-if/tenants.set`)."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of one tenant's requests in a period."""

    admitted: int
    over_quota: int
    """Number of requests refused with 429, because a tenant or key limit was reached."""
    refused: int
    """Number of requests refused with 503, because of overload or a deadline that could not be met."""
    ttft_p99_ms: float | None
    e2e_p99_ms: float | None


class TenantForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The effect that new limits would have had on one tenant in the last few minutes."""

    tenant: str
    recorded: Outcome
    """The outcomes that actually occurred."""
    simulated: Outcome
    """The outcomes of a replay with the current limits. Their difference from `recorded` shows the replay's
    accuracy."""
    predicted: Outcome
    """The outcomes with the new limits: `recorded` plus the difference between the replays with the new and
    the current limits."""


class QuotaForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The effect that new limits would have had, found by replaying the requests of the last few minutes."""

    since: float
    until: float
    """The replayed period, in unix time."""
    requests: int
    left_out: int
    """Number of requests that were not replayed, because they were invalid or because the speed of their
    model's ready replicas is unknown."""
    tenants: list[TenantForecast]
