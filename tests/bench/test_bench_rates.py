"""Arrivals are Poisson, and the search ends at the highest rate that holds."""

from __future__ import annotations

import asyncio
import io
import itertools
import statistics

import pytest

from appliance.bench.messages import Record
from appliance.bench.rates import Found, Trial, find_rate, is_lost, judge, poisson_arrivals
from appliance.bench.results import Slo, Summary, summarize
from appliance.bench.workers import Raw
from appliance.cli.bench_report import Report


def summary(*, ttft_ms: float = 10.0, failed: int = 0, requests: int = 100, busy: float = 0.1) -> Summary:
    records = [
        Record(
            number,
            began_at=0.0,
            late_s=0.0,
            ended_at=1.0,
            first_at=ttft_ms / 1000,
            gaps_s=[0.01, 0.02],
            failure="http 503" if number < failed else "",
        )
        for number in range(requests)
    ]
    return summarize(Raw(0.0, records, workers=1, busiest_worker=busy), 3, 8, Slo(ttft_p99_ms=100))


def test_arrivals_come_at_the_rate_with_exponential_gaps() -> None:
    arrivals = poisson_arrivals(100, 100, "seed")
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert len(arrivals) == pytest.approx(10_000, rel=0.05)
    assert statistics.mean(gaps) == pytest.approx(0.01, rel=0.05)
    # An exponential's deviation is its mean; equal gaps would have none.
    assert statistics.stdev(gaps) == pytest.approx(0.01, rel=0.1)
    assert arrivals == sorted(arrivals) and arrivals[-1] < 100


def test_a_seed_decides_the_arrivals() -> None:
    assert poisson_arrivals(5, 10, "a") == poisson_arrivals(5, 10, "a") != poisson_arrivals(5, 10, "b")
    assert poisson_arrivals(0.001, 0.1, "a") == [0.0]


def search(capacity: float, first_rate: float, busy: float = 0.1) -> tuple[float | None, int, str]:
    """The search against a server that holds any rate up to `capacity`."""

    async def attempt(rate: float) -> Trial:
        made = summary(ttft_ms=10 if rate <= capacity else 1000, busy=busy)
        return Trial(rate, made, False, judge(made, Slo(ttft_p99_ms=100), False))

    found = asyncio.run(find_rate(attempt, first_rate))
    return None if found.best is None else found.best.rate, len(found.trials), found.note


@pytest.mark.parametrize("capacity", [0.3, 1.0, 37.0, 5000.0])
def test_the_search_ends_within_five_percent_below_the_capacity(capacity: float) -> None:
    rate, trials, note = search(capacity, 1.0)
    assert rate is not None and capacity / 1.05 <= rate <= capacity
    assert trials < 25 and note == ""


def test_the_search_gives_up_where_nothing_holds() -> None:
    rate, trials, note = search(0.0, 1.0)
    assert rate is None and trials < 10 and "no rate" in note


def test_the_search_stops_where_the_client_is_what_would_be_measured() -> None:
    rate, trials, note = search(1e9, 1.0, busy=0.95)
    assert (rate, trials) == (1.0, 1) and "client" in note


def test_a_rate_is_sustained_with_one_percent_of_failures_and_no_more() -> None:
    assert judge(summary(failed=1), Slo(ttft_p99_ms=100), False) == ""
    assert "2 of 100 failed (http 503)" in judge(summary(failed=2), Slo(ttft_p99_ms=100), False)


def test_each_limit_is_named_when_it_is_missed() -> None:
    assert "TTFT p99 500 ms" in judge(summary(ttft_ms=500), Slo(ttft_p99_ms=100), False)
    assert "ITL p99 20.0 ms" in judge(summary(), Slo(itl_p99_ms=19), False)
    assert judge(summary(), Slo(itl_p99_ms=21), False) == ""
    assert "late" in judge(summary(), Slo(ttft_p99_ms=100), True)


def test_a_trial_is_given_up_when_more_than_one_percent_missed() -> None:
    assert not is_lost(200, 2) and is_lost(200, 3) and is_lost(50, 1)


@pytest.mark.parametrize(("requests", "noted"), [(99, True), (100, False)])
def test_a_p99_of_few_requests_is_told_to_be_their_maximum(requests: int, noted: bool) -> None:
    best = Trial(1.0, summary(requests=requests), False, "")
    written = io.StringIO()
    Report(written).search(Found(best, [best], ""))
    assert ("a p99 of 99 requests is the slowest of them" in written.getvalue()) == noted
