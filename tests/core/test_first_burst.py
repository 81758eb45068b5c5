"""Tests that slow warm-up steps do not cause refusals in a burst right after a replica's start."""

from __future__ import annotations

import pytest

from appliance.traffic.rates import FIRST_STEPS, ReplicaRates
from appliance.traffic.rules import QueueRules
from engine.rank_messages import Report
from store.policies import TenantRecord
from tests.core.scheduler_replica import Speed
from tests.core.simulated_server import Asked, Shape, SimulatedServer

SLOW_FIRST = Speed(step_s=0.012, first_steps=8, first_step_s=2.0)
"""A device on which each initial (warm-up) step takes more than a hundred times as long as a later step."""
SHAPE = Shape(512, 128, 128)


def server() -> SimulatedServer:
    return SimulatedServer(tenants=[TenantRecord(name="a", created_at=0.0)])


def burst(on: SimulatedServer, streams: int, gap_s: float = 0.0) -> list[Asked]:
    """Send `streams` requests at intervals of `gap_s` seconds."""
    asked: list[Asked] = []
    for number in range(streams):
        on.at(on.now + number * gap_s, lambda: asked.append(on.ask("a", SHAPE)))
    return asked


@pytest.mark.parametrize(
    ("streams", "gap_s", "predicted"), [(64, 0.0, False), (256, 0.05, False), (256, 0.0, True)]
)
def test_slow_first_steps_cause_no_refusals_in_a_first_burst(
    streams: int, gap_s: float, predicted: bool
) -> None:
    served = server()
    replica = served.add_replica(slots=16, max_num_batched_tokens=2048, speed=SLOW_FIRST, predicted=False)
    if predicted:
        replica.account.predict(0.010, 1 / 50_000)
    asked = burst(served, streams, gap_s)
    served.run(120.0)
    refused = [one.refused.message for one in asked if one.refused is not None]
    assert len(asked) == streams and refused == []
    # The service was right to accept all requests, because it serves the whole burst within the maximum wait.
    assert all(one.ended_at is not None for one in asked)
    waits_s = [one.admitted_at - one.arrived_at for one in asked if one.admitted_at is not None]
    assert max(waits_s) < QueueRules().timeout_s


def test_a_device_that_stays_slow_refuses_what_would_wait_too_long() -> None:
    served = server()
    served.add_replica(slots=16, max_num_batched_tokens=2048, speed=Speed(step_s=1.0), predicted=False)
    asked = burst(served, 256, gap_s=0.5)
    served.run(130.0)
    refused = [
        one
        for one in asked
        if one.refused is not None and "the expected waiting time is" in one.refused.message
    ]
    assert refused, "at 1 s per step, 16 sequences of 128 tokens take longer than the maximum wait"
    assert min(one.arrived_at for one in refused) > FIRST_STEPS


def test_a_prediction_refuses_only_what_even_the_fastest_device_could_not_serve() -> None:
    served = server()
    replica = served.add_replica(slots=4, max_num_batched_tokens=2048, speed=Speed(step_s=0.5))
    replica.account.predict(0.4, 1 / 40_000)
    asked = burst(served, 64)
    served.run(1.0)
    # Four concurrent requests take 128 steps of at least 0.4 s, or 51 s. About ten requests begin within the
    # maximum wait.
    refused = [one for one in asked if one.refused is not None]
    assert 50 <= len(refused) <= 56
    assert all(
        "the expected waiting time is" in one.refused.message for one in refused if one.refused is not None
    )


def report(steps: int, ms: float) -> Report:
    return Report(step=1, credit_seqs=1, credit_tokens=1, running=4, decode_steps=steps, step_ms=ms)


def test_measurements_replace_the_prediction_after_the_first_steps() -> None:
    rates = ReplicaRates()
    assert not rates.known
    rates.predict(0.010, 1e-5)
    assert rates.known and rates.step_s == rates.decode_s(4) == 0.010 and rates.prompt_token_s == 1e-5
    rates.learn(report(FIRST_STEPS, 4000.0))
    assert rates.step_s == 0.010
    for _ in range(20):
        rates.learn(report(10, 20.0))
    assert rates.step_s == pytest.approx(0.020) and rates.decode_s(4) == pytest.approx(0.020)
