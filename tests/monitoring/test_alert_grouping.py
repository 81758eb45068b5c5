"""Tests of grouping: one root cause raises one alert."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from appliance.alert_rules import BUILT_IN
from appliance.monitoring.alerts.evaluation import Evaluator
from appliance.monitoring.alerts.manager import AlertManager
from store.alerts import AlertRow
from tests.monitoring.histories import evaluate, history, summary, transitions


def kill(tree: dict[str, Any], second: int, died: int, back: int, model: int = 0, one: int = 0) -> None:
    """Change the tree of values as if a replica had died between two samples."""
    replica = tree["models"][model]["replicas"][one]
    name = replica["name"]
    if second < died:
        return
    replica["restarts"] = 1
    replica["last_error"] = "rank 0 (pid 7) was killed by SIGKILL"
    if second >= back:
        return
    replica["state"] = "restarting" if second < died + 2 else "loading"
    if second < died + 2:
        tree["current_problems"].append(
            {"where": name, "description": "restarting", "remedy": "fix the cause"}
        )


def test_a_dead_replica_with_all_its_consequences_raises_one_alert() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        kill(tree, second, 100, 160)
        if 105 <= second < 200:
            tree["queue"].update(waiting=99, overload_step=3)
            tree["queue"]["classes"][1]["oldest_wait_s"] = 50.0
            tree["rates"].update(failed_per_s=2.0, refused_per_s=8.0)
            tree["latency"]["ttft"]["p50_ms"] = 5000.0

    found = list(evaluate(BUILT_IN, history(400, change)))
    assert [summary(one)[:3] for one in found] == [
        (100, "raised", "replica-down"),
        (165, "ended", "replica-down"),
    ]
    alert = found[0].alert
    assert alert.subject == "model-0-0" and alert.severity == "critical"
    assert alert.cause == "model-0-0 ended: rank 0 (pid 7) was killed by SIGKILL at the same time"
    assert "appliance status" in alert.remedy


def test_the_alert_counts_what_it_explains() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        kill(tree, second, 10, 100)
        if second >= 20:
            tree["queue"].update(waiting=99, overload_step=3)

    evaluator = Evaluator(BUILT_IN)
    for sample in history(60, change):
        evaluator.step(sample)
    [shown] = [alert for alert in evaluator.alerts.values() if alert.announced]
    assert shown.rule == "replica-down" and shown.suppressed == 2


def test_an_ended_alert_stays_acknowledged_when_a_consequence_ends() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        kill(tree, second, 10, 40)
        if 20 <= second < 60:
            tree["queue"].update(waiting=99)

    saved: list[tuple[object, ...]] = []
    log: Any = SimpleNamespace(save=lambda alert: saved.append(alert.stored()))
    manager = AlertManager(BUILT_IN, log, SimpleNamespace(send=lambda event, alert: None))
    for sample in history(100, change):
        manager.observe(sample)
        if len(saved) == 1 and manager.list():
            manager.acknowledge(manager.list()[0].id, "uid:0")
    columns = AlertRow.__struct_fields__
    rows = [dict(zip(columns, row, strict=True)) for row in saved if row[1] == "replica-down"]
    assert {row["suppressed"] for row in rows if row["ended_at"]} == {0, 1}
    assert {row["acknowledged_by"] for row in rows[1:]} == {"uid:0"}


def test_a_consequence_that_outlasts_its_cause_is_raised() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        kill(tree, second, 10, 20)
        if second >= 15:
            tree["queue"].update(waiting=99)

    found = transitions(BUILT_IN, history(200, change))
    assert [one[1:3] for one in found] == [
        ("raised", "replica-down"),
        ("ended", "replica-down"),
        ("raised", "queue-full"),
    ]
    assert found[2][0] - found[1][0] > 60


def test_a_consequence_of_another_model_is_raised() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        kill(tree, second, 10, 100, model=0)
        if second >= 10:
            tree["models"][1]["state"] = "failed"

    found = transitions(BUILT_IN, history(60, change, models=2))
    assert [one[1:] for one in found] == [
        ("raised", "replica-down", "model-0-0"),
        ("raised", "model-failed", "model model-1"),
    ]


def test_eight_replicas_that_die_together_raise_one_alert() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        for one in range(8):
            kill(tree, second, 10 + one, 60, one=one)

    found = transitions(BUILT_IN, history(120, change, replicas=8))
    assert [one[1:] for one in found] == [
        ("raised", "replica-down", "model-0-0"),
        ("ended", "replica-down", "model-0-0"),
    ]


def test_replicas_that_die_at_different_times_raise_an_alert_each() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        kill(tree, second, 10, 200, one=0)
        kill(tree, second, 100, 200, one=1)

    found = [one for one in transitions(BUILT_IN, history(150, change)) if one[1] == "raised"]
    assert [one[3] for one in found] == ["model-0-0", "model-0-1"]


def test_an_xid_error_explains_the_death_of_the_replica_on_its_gpu() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        if second >= 10:
            tree["gpus"][1]["last_xid"] = 79
        kill(tree, second, 11, 60, one=1)

    found = list(evaluate(BUILT_IN, history(100, change)))
    assert [summary(one)[1:] for one in found] == [("raised", "gpu-xid", "GPU 1")]
    assert found[0].alert.cause == "GPU 1 reported Xid 79 at the same time"


def test_a_lost_gpu_explains_its_replica_and_no_other_replica() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        if second >= 10:
            tree["gpus"][1].update(last_xid=79, error="GPU is lost")
        kill(tree, second, 11, 100, one=1)
        kill(tree, second, 150, 200, one=0)

    found = [one for one in evaluate(BUILT_IN, history(180, change)) if one.alert.ended_at is None]
    assert [summary(one)[1:] for one in found] == [
        ("raised", "gpu-xid", "GPU 1"),
        ("suppressed", "gpu-xid", "GPU 1"),
        ("raised", "gpu-failed", "GPU 1"),
        ("raised", "replica-down", "model-0-0"),
    ]
    assert found[2].alert.description == "GPU 1 cannot be read: GPU is lost"


def test_reduced_clocks_are_the_cause_of_slow_tokens_but_not_of_the_alerts_of_their_gpu() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        if second >= 100:
            tree["gpus"][1]["throttle_reasons"] = ["hardware slowdown"]
        if second >= 120:
            tree["kv"][1]["blocks_used"] = tree["kv"][1]["blocks_total"]

    found = {one.alert.rule: one.alert for one in evaluate(BUILT_IN, history(200, change))}
    assert found["gpu-slowed-down"].cause == "nothing else changed within the 2 min before the alert"
    assert "GPU 1 reduced its clocks (hardware slowdown)" in found["kv-cache-full"].cause


def restored(*alerts: dict[str, Any]) -> tuple[list[tuple[str, float | None]], list[str]]:
    """Start the alert manager with stored alerts, 50 s after the epoch. Return the id and the end of each
    alert that it ends, and the ids of the alerts that remain active."""
    saved: list[AlertRow] = []
    log: Any = SimpleNamespace(save=saved.append)
    manager = AlertManager(BUILT_IN, log, SimpleNamespace(send=lambda event, alert: None), lambda: 50.0)
    texts = dict.fromkeys(("description", "cause", "remedy"), "")
    manager.restore([AlertRow(severity="critical", since=1.0, **texts, **alert) for alert in alerts], [])
    return [(row.id, row.ended_at) for row in saved], [alert.id for alert in manager.list()]


def test_an_earlier_alert_whose_end_was_not_stored_is_ended_at_the_next_start() -> None:
    first, second = (
        {"id": one, "rule": "queue-full", "subject": "queue", "raised_at": at}
        for one, at in (("first", 1.0), ("second", 9.0))
    )
    assert restored(first, second) == ([("first", 50.0)], ["second"])


@pytest.mark.parametrize("scope", ["", '[["GPU", 1]]'])
def test_an_alert_with_a_damaged_scope_is_ended_at_the_next_start(scope: str) -> None:
    damaged, other = (
        {"id": rule, "rule": rule, "subject": "GPU 1", "raised_at": 1.0, "scope": stored}
        for rule, stored in (("gpu-xid", scope), ("gpu-hot", '[["GPU", "1"]]'))
    )
    assert restored(damaged, other) == ([("gpu-xid", 50.0)], ["gpu-hot"])


def test_an_alert_that_came_before_its_cause_is_suppressed() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        if second >= 10:
            tree["queue"]["waiting"] = 99
        kill(tree, second, 30, 100)

    found = transitions(BUILT_IN, history(60, change))
    assert [one[1:3] for one in found] == [
        ("raised", "queue-full"),
        ("raised", "replica-down"),
        ("suppressed", "queue-full"),
    ] or [one[1:3] for one in found] == [
        ("raised", "queue-full"),
        ("suppressed", "queue-full"),
        ("raised", "replica-down"),
    ]


def test_a_rising_load_is_named_as_the_cause_with_its_tenant() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        if second >= 100:
            tree["rates"]["requests_per_s"] = 21.0
            tree["tenants"][1].update(running=40, waiting=90)
        if second >= 130:
            tree["queue"]["waiting"] = 98

    found = list(evaluate(BUILT_IN, history(200, change)))
    assert found[0].alert.rule == "queue-full"
    assert found[0].alert.cause == "requests per second rose from 4 to 21, mostly from tenant beta"


def test_an_operators_action_is_named_as_the_cause() -> None:
    def change(second: int, tree: dict[str, Any]) -> None:
        if second >= 50:
            tree["audit_rows"] = 12
        if second >= 60:
            tree["queue"]["waiting"] = 98

    [alert] = [one.alert for one in evaluate(BUILT_IN, history(100, change))]
    assert alert.cause == "an operator's action (see audit rows 11 to 12) 15 s before"
