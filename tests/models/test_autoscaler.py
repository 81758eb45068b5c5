"""Tests of how many replicas the autoscaler chooses, in simulated time."""

from __future__ import annotations

import itertools

import pytest

from appliance.models.autoscaler import REFUSED_S, Autoscaler, Decision, ModelLoad, ScalingRules
from appliance.models.demand import DemandForecast
from tests.models.simulated_scaling import SimulatedModel, recorded_arrivals

RULES = ScalingRules(min_replicas=1, max_replicas=4, ttft_target_s=2.0, cooldown_s=30.0, idle_s=300.0)
DAY_S = 86_400


def load(
    demand: float, *, replicas: int = 1, ready: int | None = None, wait_s: float = 0.0, ttft_s: float = 0.1
) -> ModelLoad:
    return ModelLoad(replicas, replicas if ready is None else ready, demand, wait_s, ttft_s, load_s=20.0)


def first_change(scaler: Autoscaler, seconds: range, loads: ModelLoad) -> tuple[int, Decision] | None:
    for now in seconds:
        if (decision := scaler.decide(now, RULES, loads)) is not None:
            return now, decision
    return None


# ── a recorded load ──


@pytest.mark.parametrize("seed", [1, 3])
def test_a_recorded_load_is_scaled_up_in_time_without_flapping_and_down_again(seed: int) -> None:
    arrivals = recorded_arrivals(seed)
    rules = RULES._replace(min_replicas=2, max_replicas=8)
    model = SimulatedModel(rules, load_s=20.0, seed=seed)
    model.run(arrivals)
    assert len(model.waits_s) == len(arrivals) == 19_366
    assert model.p99_s() < rules.ttft_target_s
    numbers = [rules.min_replicas, *(replicas for _, replicas, _ in model.changes)]
    assert max(numbers) >= 7 and numbers[-1] == rules.min_replicas
    # Flapping would show as replicas that are removed soon after they were added, and as frequent changes of
    # direction.
    steps = [after - before for before, after in itertools.pairwise(numbers)]
    turns = sum((one > 0) != (other > 0) for one, other in itertools.pairwise(steps))
    assert turns <= 3
    removed_at = -rules.idle_s
    for (at, _, reason), step in zip(model.changes, steps, strict=True):
        assert reason
        if step < 0:
            removed_at = at
        else:
            assert at - removed_at >= rules.idle_s
    fixed = SimulatedModel(rules, load_s=20.0, seed=seed, scales=False)
    fixed.run(arrivals)
    assert fixed.p99_s() > 100 * rules.ttft_target_s  # the load really needs more replicas
    assert model.replica_seconds < 0.7 * rules.max_replicas * (arrivals[-1] + 3600)


# ── adding replicas ──


def test_demand_above_the_target_use_adds_as_many_replicas_as_it_needs() -> None:
    assert first_change(Autoscaler(), range(5), load(0.69)) is None
    at, decision = first_change(Autoscaler(), range(5), load(2.0)) or (None, None)
    assert at == 0 and decision == Decision(3, "the load needs 2.0 replicas")


def test_the_number_of_replicas_stays_within_its_limits() -> None:
    scaler = Autoscaler()
    assert scaler.decide(0, RULES, load(50.0)) == Decision(4, "the load needs 50.0 replicas")
    assert scaler.decide(1, RULES, load(50.0, replicas=4, wait_s=60.0)) is None
    assert scaler.decide(2, RULES, load(1.0, replicas=6)) == Decision(4, "max_replicas is 4")
    assert scaler.decide(3, RULES, load(1.0, replicas=0)) == Decision(1, "min_replicas is 1")


def test_waiting_requests_add_a_replica_before_they_miss_the_target() -> None:
    assert Autoscaler().decide(0, RULES, load(0.5, wait_s=1.0)) is None
    decision = Autoscaler().decide(0, RULES, load(0.5, wait_s=1.1))
    assert decision is not None and decision.replicas == 2 and "requests wait 1.1 s" in decision.reason


def test_a_late_first_token_adds_a_replica_only_if_the_replicas_are_in_use() -> None:
    decision = Autoscaler().decide(0, RULES, load(0.4, ttft_s=1.5))
    assert decision is not None and decision.replicas == 2 and "TTFT is 1.5 s" in decision.reason
    assert Autoscaler().decide(0, RULES, load(0.2, ttft_s=1.5)) is None


def test_late_requests_add_no_further_replica_while_one_is_starting_or_has_just_become_ready() -> None:
    scaler = Autoscaler()
    scaler.changed(0)
    assert scaler.decide(50, RULES, load(1.0, replicas=2, ready=1, wait_s=9.0)) is None
    assert scaler.decide(29, RULES, load(1.0, replicas=2, wait_s=9.0)) is None
    assert scaler.decide(51, RULES, load(1.0, replicas=2, wait_s=9.0)) is not None


def test_growing_demand_adds_a_replica_before_it_is_reached() -> None:
    scaler = Autoscaler()
    changes = [(now, scaler.decide(now, RULES, load(0.2 + now / 600))) for now in range(300)]
    at, decision = next((now, change) for now, change in changes if change is not None)
    assert 0.2 + at / 600 < 0.65 and decision.replicas == 2  # the current demand alone would need only 1
    assert "grows by 0.10 per minute" in decision.reason


def test_the_same_time_of_the_day_before_adds_a_replica_in_advance() -> None:
    scaler = Autoscaler()
    for now in range(0, 3600, 10):
        scaler.decide(now, RULES, load(0.1))
    for now in range(3600, 5400, 10):
        scaler.decide(now, RULES, load(2.0, replicas=4))
    for now in range(5400, DAY_S + 2000, 10):
        scaler.decide(now, RULES, load(0.1))
    at, decision = first_change(scaler, range(DAY_S + 2000, DAY_S + 5400), load(0.1)) or (0, None)
    assert decision is not None and decision.replicas == 3
    assert DAY_S + 3000 < at < DAY_S + 3600 and "a day ago" in decision.reason


def test_a_trend_at_most_doubles_the_present_demand() -> None:
    forecast = DemandForecast()
    for now in range(60):
        forecast.add(now, 0.0 if now < 50 else 0.3)
    assert forecast.expected(60, 3600.0).replicas == pytest.approx(2 * forecast.present(60))


def test_after_a_refusal_no_replica_is_added_for_a_while() -> None:
    scaler = Autoscaler()
    scaler.refuse(0, "each rank needs 2 GB")
    assert first_change(scaler, range(1, int(REFUSED_S)), load(2.0)) is None
    assert scaler.refusal == "each rank needs 2 GB"
    assert scaler.decide(REFUSED_S, RULES, load(2.0)) is not None


# ── removing replicas ──


def test_a_replica_is_removed_after_the_load_has_been_low_for_the_whole_time() -> None:
    scaler = Autoscaler()
    scaler.decide(0, RULES, load(1.4, replicas=2))
    at, decision = first_change(scaler, range(1, 1000), load(0.4, replicas=2)) or (0, None)
    assert decision is not None and decision.replicas == 1 and "at most 0." in decision.reason
    assert 300 < at < 330


def test_a_load_that_one_replica_less_could_hardly_serve_removes_none() -> None:
    assert first_change(Autoscaler(), range(2000), load(0.55, replicas=2)) is None


def test_no_replica_is_removed_while_one_is_starting_or_below_the_minimum() -> None:
    assert first_change(Autoscaler(), range(1000), load(0.1, replicas=3, ready=2)) is None
    assert first_change(Autoscaler(), range(1000), load(0.0, replicas=1)) is None
