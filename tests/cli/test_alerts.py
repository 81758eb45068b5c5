"""Tests of the alert commands against the real core, with fake fronts and replicas."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from store.schemas import HISTORY
from store.telemetry import TelemetryLog
from store.writer import Writer
from tests.cli.conftest import Run
from tests.cli.servers import AdminService
from tests.core.conftest import Service, make_service
from tests.core.test_alerting import kill_replica, wait_until_sampled
from tests.monitoring.histories import history
from tests.waiting import wait_until

pytestmark = pytest.mark.system
Make = Callable[..., Service]
__all__ = ["make_service"]

RULE = """
[[alerts.rules]]
name = "busy"
metric = "queue.waiting"
above = 50.0
for_s = 5.0
description = "{value} requests are waiting"
"""


@pytest.fixture
def run(cli: Run) -> Callable[..., str]:
    """Return a function that runs a command, checks its exit code, and returns its output or its error."""

    def run(*words: object, code: int = 0) -> str:
        outcome = cli("alerts", *words)
        assert outcome.code == code, outcome
        return outcome.out if code == 0 else outcome.err

    return run


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Path]:
    """Record a history in which 60 requests wait from second 30 to second 60."""

    def change(second: int, tree: dict[str, Any]) -> None:
        tree["queue"]["waiting"] = 60 if 30 <= second < 60 else 0

    path = tmp_path / "history.db"
    writer = Writer(path, HISTORY, synchronous="NORMAL")
    writer.start()
    telemetry = TelemetryLog(writer)
    now = time.time() - 200
    for number, sample in enumerate(history(150, change)):
        telemetry.record(type(sample)(now + number, sample.layout, sample.numbers))
    writer.close()
    yield path


def test_rules_are_tested_on_a_recorded_history(
    run: Callable[..., str], recorded: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(RULE)
    found = json.loads(run("test", rules, "--on", recorded, "--json"))
    assert found["samples"] == 150 and found["lasting"] == 0
    [raised, ended] = found["transitions"]
    assert (raised["event"], raised["rule"], raised["description"]) == (
        "raised",
        "busy",
        "60 requests are waiting",
    )
    assert raised["at"] - found["since"] == pytest.approx(35, abs=0.1)
    assert (ended["event"], ended["at"] - found["since"]) == ("ended", pytest.approx(90, abs=0.1))
    assert "1 alert in 150 samples" in run("test", rules, "--on", recorded)
    assert "0 alerts in 150 samples" in run("test", "built-in", "--on", recorded)


def test_a_wrong_rule_is_reported_with_its_line_and_remedy(
    run: Callable[..., str], recorded: Path, tmp_path: Path
) -> None:
    rules = tmp_path / "rules.toml"
    rules.write_text(
        RULE + '\n[[alerts.rules]]\nname = "two"\nmetric = "queue.waiting"\nabove = 1\nbelow = 1\n'
    )
    said = run("test", rules, "--on", recorded, code=1)
    assert (
        f"{rules}:12: rule 'two' has 2 thresholds instead of one: set exactly one of above, below and texts"
        in said
    )
    rules.write_text(RULE.replace("above", "abve"))
    said = run("test", rules, "--on", recorded, code=1)
    assert f"{rules}:5: alerts.rules.1.abve is not a setting: did you mean 'above'?" in said
    assert "is not a file" in run("test", tmp_path / "none", "--on", recorded, code=2)


def test_the_list_says_that_there_are_no_alerts(
    run: Callable[..., str], admin: AdminService, run_dir: Path
) -> None:
    assert run("list", "--run-dir", run_dir) == "no alerts within the last hour\n"


def test_alerts_are_listed_acknowledged_and_silenced(run: Callable[..., str], make_service: Make) -> None:
    service = make_service().start_and_wait()
    at = ("--run-dir", service.run_dir)

    def down() -> list[Any]:
        # On a slow machine, there may be other alerts: of consequences, or of an earlier silence of the
        # replica.
        listed = json.loads(run("list", "--json", *at))
        return [one for one in listed if (one["rule"], one["state"]) == ("replica-down", "firing")]

    wait_until_sampled(service)
    wait_until(lambda: not down())
    kill_replica(service)
    wait_until(lambda: bool(down()))
    [alert] = down()
    assert alert["where"] == "m-0"
    assert "acknowledged: m-0 is not responding" in run("ack", alert["id"], *at)
    listed = run("list", *at)
    assert "CRITICAL  m-0 is not responding" in listed and "acknowledged by uid:" in listed
    assert "likely cause: m-0 ended" in listed and "next step: wait for the restart" in listed
    said = run("silence", "replica-down", "--for", "2h", "--reason", "planned", *at)
    assert said.startswith("silence ") and ": planned" in said
    assert "silenced" in run("list", *at)
    silence_id = said.split()[1].rstrip(":")
    assert run("silences", *at) == said
    [silence] = json.loads(run("silences", "--json", *at))
    assert (silence["id"], silence["rule"], silence["reason"]) == (silence_id, "replica-down", "planned")
    run("unsilence", silence_id, *at)
    assert run("silences", *at) == "no silences are active\n"
    assert json.loads(run("silences", "--json", *at)) == []
    assert "is too long: use at most 30d" in run("silence", "x", "--for", "60d", *at, code=2)
