"""Tests of the evaluation of alert rules: when alerts are raised, when they end, and which of them are
shown."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.alert_rules import BUILT_IN, AlertRule, cycle, effective_rules, faults_of_rule
from appliance.monitoring.alerts.evaluation import Evaluator
from appliance.monitoring.alerts.windows import Window
from store.samples import Splitter
from tests.examples import examples
from tests.monitoring.histories import START, evaluate, history, quiet_service, transitions

HOT = AlertRule(
    name="hot", metric="gpus[*].temperature_c", above=88.0, clear=83.0, for_s=5.0, clear_for_s=10.0
)


def temperatures(values: list[float]) -> list[tuple[int, str]]:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["gpus"][0]["temperature_c"] = values[second]

    return [(at, event) for at, event, _, _ in transitions([HOT], history(len(values), change))]


def test_an_alert_is_raised_after_its_time_and_ends_after_the_clear_time() -> None:
    values = [60.0] * 10 + [90.0] * 20 + [60.0] * 20
    assert temperatures(values) == [(15, "raised"), (40, "ended")]


def test_a_peak_shorter_than_the_rules_time_raises_nothing() -> None:
    assert temperatures([60.0] * 5 + [95.0] * 5 + [60.0] * 20) == []


def test_values_between_clear_and_threshold_neither_raise_nor_end_an_alert() -> None:
    assert temperatures([86.0] * 40) == []
    assert temperatures([90.0] * 10 + [86.0] * 100) == [(5, "raised")]


@given(st.lists(st.floats(87.0, 89.0), min_size=60, max_size=120))
@examples(40)
def test_noise_at_a_threshold_raises_at_most_one_alert(values: list[float]) -> None:
    events = temperatures(values)
    assert events in ([], [(events[0][0], "raised")] if events else [])


@given(st.lists(st.sampled_from([60.0, 84.0, 90.0]), min_size=60, max_size=150))
@examples(40)
def test_events_alternate_and_are_at_least_their_times_apart(values: list[float]) -> None:
    events = temperatures(values)
    assert [event for _, event in events] == ["raised", "ended"] * (len(events) // 2) + ["raised"] * (
        len(events) % 2
    )
    for (before, event), (after, _) in pairwise(events):
        assert after - before >= (HOT.clear_for_s if event == "raised" else HOT.for_s)


def test_an_unknown_metric_keeps_a_raised_alert() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["gpus"][0]["temperature_c"] = 90.0 if second < 10 else None

    assert transitions([HOT], history(60, change)) == [(5, "raised", "hot", "GPU 0")]


def test_the_alert_of_an_entry_that_disappears_ends() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["gpus"][1]["temperature_c"] = 90.0
        if second >= 20:
            del tree["gpus"][1]

    assert transitions([HOT], history(60, change)) == [
        (5, "raised", "hot", "GPU 1"),
        (30, "ended", "hot", "GPU 1"),
    ]


def test_a_rule_that_is_removed_ends_its_alerts() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["gpus"][0]["temperature_c"] = 90.0

    evaluator, events = Evaluator([HOT]), []
    for second, sample in enumerate(history(30, change)):
        if second == 20:
            evaluator.set_rules([])
        events += [(second, one.event) for one in evaluator.step(sample)]
    assert events == [(5, "raised"), (20, "ended")]


@pytest.mark.parametrize(
    ("above", "events"),
    [(95.0, [(5, "raised"), (20, "ended")]), (85.0, [(5, "raised"), (20, "ended"), (25, "raised")])],
)
def test_a_rule_that_is_changed_ends_its_alerts(above: float, events: list[tuple[int, str]]) -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["gpus"][0]["temperature_c"] = 90.0

    evaluator, found = Evaluator([HOT]), []
    for second, sample in enumerate(history(40, change)):
        if second == 20:
            evaluator.set_rules([msgspec.structs.replace(HOT, above=above)])
        found += [(second, one.event) for one in evaluator.step(sample)]
    assert found == events
    lasting = [one for one in evaluator.alerts.values() if one.ended_at is None]
    assert len(lasting) == len(events) - 2


def test_a_clock_that_is_set_back_delays_alerts_by_no_more_than_their_times() -> None:
    """A pending alert, an alert that is about to end, and a rate must not wait until the clock has reached
    its former time again."""
    filling = AlertRule(name="filling", metric="kv[*].blocks_used", measure="rate", window_s=60.0, above=0.5)

    def change(second: int, tree: dict[str, Any]) -> None:
        tree["gpus"][0]["temperature_c"] = 90.0 if 18 <= second < 40 else 60.0
        tree["kv"][0]["blocks_used"] = 200 + max(0, second - 40)

    evaluator, events = Evaluator([HOT, filling]), []
    for second, sample in enumerate(history(120, change)):
        set_back_s = 3600.0 * ((second >= 20) + (second >= 42))
        one = msgspec.structs.replace(sample, at=sample.at - set_back_s)
        events += [(second, found.event, found.alert.rule) for found in evaluator.step(one)]
    assert events == [(25, "raised", "hot"), (52, "ended", "hot"), (72, "raised", "filling")]


def test_a_trend_predicts_when_the_kv_cache_is_full() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["kv"][0]["blocks_used"] = min(1000, 400 + second)

    found = list(evaluate(effective_rules([], []), history(700, change)))
    [filling, full] = [one for one in found if one.event == "raised"]
    assert filling.alert.rule == "kv-cache-filling" and filling.at - START == pytest.approx(230, abs=5)
    assert filling.alert.value is not None and filling.alert.value == pytest.approx(370, abs=20)
    assert filling.alert.description == "the KV cache of model-0-0 will be full in 6 min"
    assert full.alert.rule == "kv-cache-full"
    # Once the cache is full, the alert about the full cache is the root cause and suppresses the alert that
    # predicted it.
    assert [one.event for one in found if one.alert.rule == "kv-cache-filling"] == ["raised", "suppressed"]


def test_a_noisy_constant_metric_has_no_trend() -> None:
    rng = random.Random(1)

    def change(second: int, tree: dict[str, Any]) -> None:
        tree["kv"][0]["blocks_used"] = 800 + rng.randint(-50, 50)

    assert transitions(BUILT_IN, history(900, change)) == []


def test_an_anomaly_is_measured_against_the_last_half_hour() -> None:
    rng = random.Random(2)

    def change(second: int, tree: dict[str, Any]) -> None:
        tree["latency"]["ttft"]["p50_ms"] = (400 if second < 1500 else 1500) + rng.gauss(0, 20)

    found = transitions(BUILT_IN, history(1800, change))
    assert [one[1:3] for one in found] == [("raised", "first-token-slow")]
    assert 1560 <= found[0][0] <= 1600


def test_a_text_rule_needs_a_clear_text_first() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["models"][0]["replicas"][0]["state"] = "loading" if second < 20 else "ready"

    assert transitions(BUILT_IN, history(60, change)) == []


def test_a_normal_service_raises_nothing() -> None:
    rng = random.Random(3)

    def change(second: int, tree: dict[str, Any]) -> None:
        wave = 1 + 0.5 * math.sin(second / 600)
        tree["rates"]["requests_per_s"] = 4 * wave + rng.random()
        tree["latency"]["ttft"]["p50_ms"] = 80 * wave + rng.gauss(0, 5)
        tree["latency"]["itl"]["p50_ms"] = 12 * wave + rng.gauss(0, 0.5)
        for cache in tree["kv"]:
            cache["blocks_used"] = int(400 * wave + rng.gauss(0, 20))
        tree["host"]["disk_free_bytes"] -= second * 4096

    samples = list(history(2000, change))
    assert transitions(BUILT_IN, samples) == []


def test_evaluating_a_history_twice_gives_the_same_transitions() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["gpus"][second % 2]["temperature_c"] = 95.0 if second % 40 > 5 else 60.0

    samples = list(history(300, change))
    first = [one.alert.id for one in evaluate(BUILT_IN, samples)]
    assert first == [one.alert.id for one in evaluate(BUILT_IN, samples)]


def test_windows_are_bounded() -> None:
    window = Window(60.0)
    for second in range(10_000):
        window.add(float(second), float(second))
    assert len(window._buckets) <= 62
    assert window.change() == pytest.approx(60, abs=2) and window.rate() == pytest.approx(1.0)
    window.add(20_000.0, 0.0)
    assert window.rate() is None  # The counter was reset.


def test_every_built_in_rule_is_complete_and_selects_a_metric() -> None:
    names = [rule.name for rule in BUILT_IN]
    assert len(set(names)) == len(names)
    assert cycle(BUILT_IN) == []
    for rule in BUILT_IN:
        assert faults_of_rule(rule) == [] and rule.description and rule.remedy and rule.reason
        assert set(rule.downstream_of) <= set(names)
    layout = Splitter().split(START, _everything()).layout
    evaluator = Evaluator(BUILT_IN)
    evaluator.step(Splitter().split(START, layout.tree([1.0] * len(layout.metrics))))
    selected = {rule.name for rule, metrics in evaluator._selected if metrics}
    assert selected == set(names)


def remedy_of(rule: str, change: Callable[[int, dict[str, Any]], None]) -> str:
    """Return the next step of the alert that a built-in rule raises during a minute."""
    rules = [one for one in BUILT_IN if one.name == rule]
    [raised] = [one for one in evaluate(rules, history(60, change)) if one.event == "raised"]
    return raised.alert.remedy


@pytest.mark.parametrize(("tenant", "word"), [("acme", "acme"), ("acme labs", "'acme labs'")])
def test_the_next_step_for_a_daily_quota_names_the_tenant(tenant: str, word: str) -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["tenants"][0]["name"] = tenant
        tree["tenants"][0]["usage"][0]["used"] = 950

    expected = f"tell the tenant, or raise the quota: appliance tenants set {word} --tokens-per-day N"
    assert remedy_of("tenant-daily-quota", change) == expected


def test_the_next_step_of_grouped_alerts_names_no_single_tenant() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["tenants"][0]["usage"][0]["used"] = 950
        tree["tenants"].append(copy.deepcopy(tree["tenants"][0]) | {"name": "other"})

    assert "appliance tenants set TENANT" in remedy_of("tenant-daily-quota", change)


def test_the_next_step_for_a_replica_that_restarts_again_and_again_names_the_model() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        tree["models"][0]["replicas"][0]["restarts"] = second // 10

    assert "(appliance drain -m model-0)" in remedy_of("replica-crash-loop", change)


def test_a_next_step_keeps_a_word_to_replace_if_the_alert_concerns_no_such_object() -> None:
    rule = AlertRule(name="full", metric="queue.waiting", above=5.0, remedy="drain {model} or ask {tenant}")

    def change(second: int, tree: dict[str, Any]) -> None:
        tree["queue"]["waiting"] = 10

    assert faults_of_rule(rule) == []
    [raised] = evaluate([rule], history(5, change))
    assert raised.alert.remedy == "drain MODEL or ask TENANT"


def test_rules_that_explain_each_other_are_found() -> None:
    one = AlertRule(name="one", metric="a", above=1.0, downstream_of=["two"])
    two = AlertRule(name="two", metric="a", above=1.0, downstream_of=["one"])
    assert set(cycle([one, two])) == {"one", "two"}


def _everything() -> dict[str, Any]:
    tree = quiet_service()
    tree["current_problems"] = [{"where": "audit", "description": "x", "remedy": "y"}]
    tree["gpus"][0].update(throttle_reasons=["power brake"], error="GPU is lost")
    return tree
