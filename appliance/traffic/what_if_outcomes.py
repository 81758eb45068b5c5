"""Summarises replays for `appliance.traffic.what_if`, and predicts outcomes under new limits by applying the
differences between two replays to the recorded results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import mean
from typing import NamedTuple

from appliance.history.forecasts import Outcome, TenantForecast

OVER_QUOTA = 429
OVERLOADED = 503
_COUNTED = (200, OVER_QUOTA, OVERLOADED)
"""HTTP statuses of the requests to compare. Requests with any other status were cancelled or failed."""


class RequestResult(NamedTuple):
    """How a request ended."""

    status: int
    """HTTP status, or 0 while the request is unfinished."""
    ttft_ms: float | None
    e2e_ms: float | None


class Comparison(NamedTuple):
    """A request's recorded result and its results in both replays."""

    recorded: RequestResult
    present: RequestResult
    """Result of the replay with the current limits."""
    changed: RequestResult
    """Result of the replay with the new limits."""


def tenant_forecast(name: str, requests: Sequence[Comparison]) -> TenantForecast:
    """Return the forecast for the tenant that sent these requests."""
    recorded = _outcome([one.recorded for one in requests])
    present = _outcome([one.present for one in requests])
    changed = _outcome([one.changed for one in requests])
    over = min(len(requests), max(0, recorded.over_quota + changed.over_quota - present.over_quota))
    refused = min(len(requests) - over, max(0, recorded.refused + changed.refused - present.refused))
    return TenantForecast(
        tenant=name,
        recorded=recorded,
        simulated=present,
        predicted=Outcome(
            admitted=len(requests) - over - refused,
            over_quota=over,
            refused=refused,
            ttft_p99_ms=_p99(_shifted(requests, lambda one: one.ttft_ms)),
            e2e_p99_ms=_p99(_shifted(requests, lambda one: one.e2e_ms)),
        ),
    )


def _outcome(results: Sequence[RequestResult]) -> Outcome:
    over = sum(one.status == OVER_QUOTA for one in results)
    refused = sum(one.status == OVERLOADED for one in results)
    answered = [one for one in results if one.status == 200]
    return Outcome(
        admitted=len(results) - over - refused,
        over_quota=over,
        refused=refused,
        ttft_p99_ms=_p99(one.ttft_ms for one in answered),
        e2e_p99_ms=_p99(one.e2e_ms for one in answered),
    )


def _shifted(requests: Sequence[Comparison], latency: Callable[[RequestResult], float | None]) -> list[float]:
    """Return the predicted latencies of the answers under the new limits.

    The change between the two replays is applied to a request's recorded latency: an increase is added, and a
    decrease is applied as a ratio, so that the replay's error stays proportional to the latency. If a request
    has no recorded latency, or none in the first replay, the tenant's mean latencies are used instead.
    """
    known = [
        (latency(one.recorded), latency(one.present), changed)
        for one in requests
        if one.recorded.status in _COUNTED and (changed := latency(one.changed)) is not None
    ]
    both = [(recorded, present) for recorded, present, _ in known if recorded and present]
    if not both:
        return [changed for _, _, changed in known]
    mean_recorded, mean_present = (mean(column) for column in zip(*both, strict=True))
    values = []
    for recorded, present, changed in known:
        if not recorded or not present:
            recorded, present = mean_recorded, mean_present
        rises = changed >= present
        values.append(recorded + changed - present if rises else recorded * changed / present)
    return values


def _p99(values: Iterable[float | None]) -> float | None:
    known = sorted(value for value in values if value is not None)
    return known[min(len(known) - 1, int(0.99 * len(known)))] if known else None
