"""Short versions of `scripts/soak --attacks` and `scripts/soak --mixed`."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.system.attack_soak import FLOODS, Plan, attacked_service, measure
from tests.system.attacks.conftest import Target
from tests.system.attacks.test_templates import hostile_model_flags
from tests.system.mixed_soak import KV_BLOCKS, run
from tests.system.trends import slope_of

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def attacked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Target, str]]:
    """Start a service. Yields the service and the key of the attackers' tenant."""
    flags = hostile_model_flags(tmp_path_factory.mktemp("checkpoint") / "model")
    with attacked_service(*flags, "--kv-blocks", str(KV_BLOCKS)) as made:
        yield made


def test_floods_neither_stall_another_tenants_requests_nor_leave_memory_in_use(
    attacked: tuple[Target, str],
) -> None:
    # Without limits on connections, a flood of pipelined requests stalled other requests for 20 s, and the
    # fronts grew to 2.3 GB. A busy machine may delay a few requests as much, but not half of them, unless it
    # is nearly as slow without the flood.
    plan = Plan(
        rounds=1,
        min_requests=100,
        requests=20,
        rate=10.0,
        start_s=1.0,
        idle_s=3.0,
        min_bound_s=120.0,
        max_latency_s=120.0,
        max_left_mb=60.0,
    )
    floods = [one for one in FLOODS if one.name in ("pipelining, tcp", "huge bodies with a key, tcp")]
    rows = [measure(flood, *attacked, plan) for flood in floods]
    assert len(rows) == 2
    for row in rows:
        assert not row.failures, row
        assert row.p50_ms < max(8000, 10 * row.baseline_p50_ms), row
        assert row.attackers["requests"] > 100


def test_mixed_traffic_with_attacks_loses_no_request(attacked: tuple[Target, str]) -> None:
    # Memory is still growing shortly after the start, so only the long version checks its growth.
    result, _ = run(*attacked, seconds=6.0, count=3, every_s=0.2)
    assert result["failures"] == []
    assert result["requests"] >= 3
    assert result["attackers"]["requests"] > 100
    assert all(result["single_attacks"].values()), result["single_attacks"]


def test_a_slope_in_autocorrelated_noise_is_found_and_noise_without_a_slope_has_none() -> None:
    draw = random.Random(1)
    noise, level = [], 0.0
    for _ in range(900):
        level = 0.9 * level + draw.gauss(0.0, 1.0)
        noise.append(level)
    times_s = [float(number) for number in range(900)]
    assert slope_of(times_s, noise).includes_zero
    grown = slope_of(times_s, [one + time_s / 60.0 for time_s, one in zip(times_s, noise, strict=True)])
    assert grown.low > 0.0 and grown.low < 1.0 < grown.high
    assert slope_of(times_s, [5.0] * 900) == (0.0, 0.0, 0.0)
    # A level that is lower for a while or changes once is not growth. A steady rise by the same amount is.
    assert slope_of(times_s, [7.0] * 300 + [4.0] * 300 + [7.0] * 300).includes_zero
    assert slope_of(times_s, [4.0] * 450 + [7.0] * 450).low < 0.0
    assert slope_of(times_s, [4.0 + 3.0 * time_s / 900.0 for time_s in times_s]).low > 0.0
