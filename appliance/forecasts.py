"""The forecast of new limits, as the admin API returns it (`POST /what-if/tenants.set`)."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a tenant's requests in a time."""

    admitted: int
    over_quota: int
    """Requests refused with 429 because of a limit of the tenant or key."""
    refused: int
    """Requests refused with 503, because of overload or a deadline."""
    ttft_p99_ms: float | None
    e2e_p99_ms: float | None


class TenantForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of new limits on one tenant, if the requests of the last minutes came again."""

    tenant: str
    recorded: Outcome
    """What happened."""
    simulated: Outcome
    """Result of the replay with the present limits, which shows how well the replay fits."""
    predicted: Outcome
    """What would have happened with the new limits: `recorded`, changed by the difference between the replays
    with the new and with the present limits."""


class QuotaForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The effect of new limits, from a replay of the requests of the last minutes."""

    since: float
    until: float
    """The replayed time, in unix seconds."""
    requests: int
    left_out: int
    """Requests that are not replayed: their request was invalid, or no replica of their model is ready whose
    speed is known."""
    tenants: list[TenantForecast]
