"""A short form of `tests.system.what_if_replay`. Latencies are not compared, because a p99 of so few requests
says little."""

from __future__ import annotations

from tests.system.service import service
from tests.system.what_if_replay import FLAGS, LIMITED, Replays, draw_load

MAX_DIFFERENCE = 5
"""Allowed difference of the rejections. Requests may arrive in a different order in each run."""
BURST_S = 3600.0
"""Nearly the whole quota is available at the start, so neither the machine's speed nor a pause changes an
outcome."""


def test_a_forecast_agrees_with_what_a_real_service_then_admits() -> None:
    with service(*FLAGS) as running:
        replays = Replays(running)
        outcomes = replays.compare(draw_load(100, 10.0, max_output=10), raised=False, burst_s=BURST_S)
    for tenant, found in outcomes.items():
        predicted, measured, before = found["predicted"], found["measured"], found["before"]
        assert abs(predicted.rejected - measured.rejected) <= MAX_DIFFERENCE, (tenant, found)
        if tenant == LIMITED:
            assert measured.rejected > before.rejected + 2 * MAX_DIFFERENCE
        else:
            assert predicted.rejected == measured.rejected == 0
