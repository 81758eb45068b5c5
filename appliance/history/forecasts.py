"""The predicted effect of new limits, as returned by the admin API (`POST /what-if/tenants.set`)."""

from __future__ import annotations

import msgspec


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcomes of one tenant's requests in a period."""

    admitted: int
    over_quota: int
    """Number of requests that were refused with 429, because a limit of the tenant or key was reached."""
    refused: int
    """Number of requests that were refused with 503, because of overload or because a deadline could not be
    met."""
    ttft_p99_ms: float | None
    e2e_p99_ms: float | None


class TenantForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The effect that new limits would have had on one tenant during the last few minutes."""

    tenant: str
    recorded: Outcome
    """The outcomes that actually occurred."""
    simulated: Outcome
    """The outcomes of a replay with the current limits. The difference from `recorded` shows how accurate the
    replay is."""
    predicted: Outcome
    """The outcomes that would have occurred with the new limits. They are computed from `recorded` and the
    difference between the two replays, with the new and with the current limits."""


class QuotaForecast(msgspec.Struct, frozen=True, kw_only=True):
    """The effect that new limits would have had. It is determined by replaying the requests of the last few
    minutes."""

    since: float
    until: float
    """The replayed period, in unix time."""
    requests: int
    left_out: int
    """Number of requests that were not replayed. They were invalid, or no ready replica of their model has a
    known speed."""
    tenants: list[TenantForecast]
