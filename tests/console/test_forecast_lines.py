"""Tests of how dialogs describe the effect of new limits."""

from __future__ import annotations

import pytest

from appliance.history.forecasts import Outcome, QuotaForecast, TenantForecast
from console.impact import forecast_lines


@pytest.mark.parametrize(
    ("requests", "left_out", "expected"),
    [
        (0, 0, ["no requests to replay: the effect is unknown"]),
        (
            0,
            1,
            [
                "no requests to replay: the effect is unknown",
                "not replayed: 1 request (invalid, or no ready replica has a known speed)",
            ],
        ),
        (5, 0, ["no change for any tenant"]),
    ],
)
def test_a_forecast_says_which_requests_were_not_replayed(
    requests: int, left_out: int, expected: list[str]
) -> None:
    forecast = QuotaForecast(since=0.0, until=900.0, requests=requests, left_out=left_out, tenants=[])
    assert forecast_lines(forecast, "acme")[1:] == expected


def test_a_forecast_shows_before_after_and_difference_with_units() -> None:
    def outcome(over_quota: int, ttft_ms: float, e2e_ms: float | None) -> Outcome:
        return Outcome(admitted=900, over_quota=over_quota, refused=3, ttft_p99_ms=ttft_ms, e2e_p99_ms=e2e_ms)

    before, after = outcome(211, 412.0, 5230.0), outcome(31, 655.0, 5710.0)
    same, other = outcome(0, 398.0, None), outcome(0, 371.0, None)
    forecast = QuotaForecast(
        since=0.0,
        until=900.0,
        requests=5,
        left_out=0,
        tenants=[
            TenantForecast(tenant="search", recorded=same, simulated=same, predicted=other),
            TenantForecast(tenant="mobile", recorded=before, simulated=before, predicted=after),
        ],
    )
    assert forecast_lines(forecast, "mobile")[1:] == [
        "mobile: rejections 214 → 34 (180 fewer)",
        "  p99 TTFT 412ms → 655ms (+243ms), p99 E2E 5.23s → 5.71s (+480ms)",
        "search: rejections 3 → 3 (unchanged)",
        "  p99 TTFT 398ms → 371ms (-27.0ms), p99 E2E -- → --",
    ]
