"""Tests of the longest steps and the stalls that the core derives from the replicas' reports."""

from __future__ import annotations

import random
from copy import copy
from typing import Any

from appliance.models.step_totals import StepTotals
from appliance.snapshot import Stall
from appliance.stalls import MAX_STALLS, LongestSteps, StallLog
from engine.rank_messages import LongestStep, Report


def report(ms: float, mean_ms: float = 0.0, request: str = "r-1", steps: int = 32) -> Report:
    step = LongestStep(ms, 4, 512, request) if ms else None
    return Report(
        step=1, credit_seqs=0, credit_tokens=0, decode_steps=steps, step_ms=mean_ms, longest_step=step
    )


def listed(log: StallLog) -> list[tuple[Any, ...]]:
    return [(one.replica, one.at, one.ms, one.mean_ms, one.request, one.tenant) for one in log.list()]


def test_the_longest_step_since_a_moment_is_the_maximum_of_the_later_reports() -> None:
    chance, steps, known = random.Random(5), LongestSteps(), list[tuple[float, LongestStep]]()
    for number in range(300):
        at = number * 0.1
        step = LongestStep(chance.uniform(1, 100), 1, 0)
        steps.add(at, step)
        known.append((at, step))
        since = at - chance.uniform(0, 4)
        later = [one for time, one in known if time > since]
        assert steps.since(since) == max(later, key=lambda one: one.ms, default=None)
    assert steps.since(at) is None


def test_a_step_of_more_than_three_times_the_mean_is_a_stall() -> None:
    log = StallLog()
    log.add("a", 10.0, report(0, 10.0), "")
    log.add("a", 11.0, report(29.0, 11.0), "acme")
    assert log.list() == []
    log.add("a", 12.0, report(34.0), "acme")
    assert listed(log) == [("a", 12.0, 34.0, 11.0, "r-1", "acme")]


def test_a_step_is_compared_with_the_mean_before_it() -> None:
    """If the report contains only one step, a decode-only step, the report's mean equals the duration of that
    step."""
    log = StallLog()
    log.add("a", 10.0, report(10.0, 10.0), "")
    log.add("a", 11.0, report(500.0, 500.0, request=""), "")
    assert listed(log) == [("a", 11.0, 500.0, 10.0, "", "")]
    log.forget("a")
    log.add("a", 12.0, report(501.0), "")
    assert len(log.list()) == 1, "nothing is known about the speed of a new process"


def test_a_report_of_one_short_step_does_not_make_the_next_step_a_stall() -> None:
    """The CPU backend computes a step while it launches the step. The last step of a sequence therefore seems
    to take no time."""
    log = StallLog()
    log.add("a", 10.0, report(0, 20.0), "")
    log.add("a", 10.1, report(0, 0.2, steps=1), "")
    log.add("a", 10.2, report(40.0, 20.0), "")
    assert log.list() == []
    log.add("a", 11.0, report(90.0), "")
    assert [round(one.mean_ms) for one in log.list()] == [20]


def test_a_replica_has_one_stall_per_second_and_the_newest_are_kept() -> None:
    log = StallLog()
    for at, ms in ((10.1, 100.0), (10.5, 300.0), (10.9, 200.0)):
        log.add("a", at, report(ms, 10.0), "")
        log.add("b", at, report(90.0, 10.0), "")
    assert [(one.replica, one.ms) for one in log.list()] == [("b", 90.0), ("a", 300.0)]
    for second in range(20, 20 + MAX_STALLS):
        log.add("a", float(second), report(100.0, 10.0), "")
    found: list[Stall] = log.list()
    assert [one.at for one in found] == [float(second) for second in range(20, 20 + MAX_STALLS)]


def test_the_means_of_a_slice_cover_all_of_its_reports() -> None:
    """The last report of a slice may contain no steps with prefill although the slice does."""
    totals = StepTotals()
    totals.add(report(0, 40.0, steps=10))
    decode, mixed = copy(totals.decode), copy(totals.mixed)
    totals.add(Report(step=1, credit_seqs=0, credit_tokens=0, mixed_steps=2, mixed_step_ms=60.0))
    totals.add(report(0, 10.0, steps=1))
    totals.add(report(0, 20.0, steps=3))
    slices = totals.decode.since(decode), totals.mixed.since(mixed)
    assert [(one.steps, round(one.mean_ms or 0, 3)) for one in slices] == [(4, 17.5), (2, 60.0)]
    assert totals.mixed.since(totals.mixed).mean_ms is None
