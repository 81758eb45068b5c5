"""Arrivals are Poisson, each limit judges a trial, and the search ends at the highest rate that holds."""

from __future__ import annotations

import asyncio
import io
import itertools
import statistics
from dataclasses import replace

import pytest

from appliance.bench.backlog import Backlog
from appliance.bench.messages import STOPPED, Record
from appliance.bench.rates import (
    Found,
    Trial,
    UnsettledError,
    find_rate,
    is_lost,
    judge,
    poisson_arrivals,
    requests_at,
)
from appliance.bench.results import Slo, summarize
from appliance.bench.workers import Raw
from appliance.cli.bench_report import Report

TTFT_100 = Slo(ttft_p99_ms=100)
DURATION_S = 10.0


def record(number: int, **fields: object) -> Record:
    """One of a request that is good by every limit."""
    known: dict[str, object] = {
        "began_at": 0.0,
        "late_s": 0.0,
        "ended_at": 1.0,
        "first_at": 0.01,
        "gaps_s": [0.01, 0.02],
        **fields,
    }
    return Record(number, **known)  # type: ignore[arg-type]


def some(count: int, **fields: object) -> list[Record]:
    return [record(number, **fields) for number in range(count)]


def trial(
    records: list[Record],
    *,
    slo: Slo = TTFT_100,
    requests: int | None = None,
    grew: bool = False,
    given_up_s: float | None = None,
    busy: float = 0.1,
) -> Trial:
    """A trial with these records, judged."""
    summary = summarize(Raw(0.0, records, workers=1, busiest_worker=busy), 3, 8, slo)
    backlog = Backlog(0.1, 12, 160 if grew else 12, 5.0, 13.0)
    made = Trial(requests or len(records), DURATION_S, summary, backlog, given_up_s)
    return replace(made, reasons=judge(made, records, slo))


def test_arrivals_come_at_the_rate_with_exponential_gaps() -> None:
    arrivals = poisson_arrivals(requests_at(100, 100), 100, "seed")
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert len(arrivals) == 10_000
    assert statistics.mean(gaps) == pytest.approx(0.01, rel=0.05)
    # An exponential's deviation is its mean; equal gaps would have none.
    assert statistics.stdev(gaps) == pytest.approx(0.01, rel=0.1)
    assert arrivals == sorted(arrivals) and arrivals[0] >= 0 and arrivals[-1] <= 100


def test_a_seed_decides_the_arrivals() -> None:
    assert poisson_arrivals(50, 10, "a") == poisson_arrivals(50, 10, "a") != poisson_arrivals(50, 10, "b")
    assert requests_at(5, 10) == 50 and requests_at(0.001, 0.1) == 1


def search(capacity: float, first: int = 10, busy: float = 0.1, late_s: float = 0.0) -> Found:
    """The search against a server that holds any rate up to `capacity`."""

    async def attempt(requests: int) -> Trial:
        holds = requests / DURATION_S <= capacity
        made = trial(some(100, first_at=0.01 if holds else 1.0, late_s=0.0 if holds else late_s), busy=busy)
        return replace(made, requests=requests)

    return asyncio.run(find_rate(attempt, first))


@pytest.mark.parametrize("capacity", [0.3, 1.0, 37.0, 5000.0])
def test_the_search_ends_within_five_percent_or_one_request_below_the_capacity(capacity: float) -> None:
    found = search(capacity)
    assert found.best is not None and found.note == ""
    assert min(capacity / 1.05, capacity - 0.1) <= found.best.rate + 1e-9 <= capacity + 1e-9
    assert len(found.trials) < 30


def test_the_search_gives_up_where_nothing_holds() -> None:
    found = search(0.0)
    assert found.best is None and len(found.trials) == 8 and "no rate down to 0.1 " in found.note


def test_the_search_stops_where_the_client_is_what_would_be_measured() -> None:
    found = search(1e9, busy=0.95)
    assert found.best is not None and found.best.rate == 1.0
    assert len(found.trials) == 1 and "client" in found.note


def test_a_rate_that_fails_while_the_client_is_late_is_noted() -> None:
    assert "client" in search(37.0, late_s=0.05).note


def test_one_bad_moment_does_not_decide_and_a_hopeless_trial_is_not_repeated() -> None:
    tried: list[int] = []

    async def attempt(requests: int) -> Trial:
        tried.append(requests)
        if requests > 40:
            return replace(trial(some(100, first_at=1.0), given_up_s=5.0), requests=requests)
        stumbles = requests == 10 and len(tried) == 1
        return replace(trial(some(100), grew=stumbles), requests=requests)

    found = asyncio.run(find_rate(attempt, 10))
    assert found.best is not None and found.best.requests == 40
    assert tried[:2] == [10, 10] and len(tried) == len(set(tried)) + 1


def test_the_search_ends_with_what_it_has_where_the_server_does_not_settle() -> None:
    async def attempt(requests: int) -> Trial:
        if requests == 40:
            raise UnsettledError("it still works")
        return replace(trial(some(100)), requests=requests)

    found = asyncio.run(find_rate(attempt, 10))
    assert found.best is not None and (found.best.requests, found.note) == (20, "it still works")


def test_a_rate_is_sustained_with_one_percent_of_failures_and_no_more() -> None:
    failed = some(2, failure="http 503", first_at=None)
    assert trial([*some(99), *failed[:1]]).is_sustained
    assert trial([*some(98), *failed]).reasons[0] == "2 of 100 failed (http 503)"


def test_failures_and_late_ones_count_together() -> None:
    # 200 requests may have two that miss the limit, whichever way.
    late, failed = record(0, first_at=0.5), record(1, failure="closed")
    assert trial([*some(198), late, failed]).is_sustained
    assert trial([*some(197), late, late, failed]).reasons == ["TTFT p99 500 > 100 ms"]


def test_each_limit_is_named_when_it_is_missed() -> None:
    assert trial(some(100, first_at=0.5)).reasons == ["TTFT p99 500 > 100 ms"]
    assert trial(some(100), slo=Slo(itl_p99_ms=19)).reasons == ["ITL p99 20.0 > 19 ms"]
    assert trial(some(100), slo=Slo(itl_p99_ms=21)).is_sustained
    assert trial(some(100, ended_at=5.1)).reasons == ["E2E p99 > 5 s, half a trial"]
    assert trial(some(100, first_at=None, gaps_s=[])).reasons == ["no answer had a token"]


def test_a_backlog_that_grew_is_a_reason_however_good_the_percentiles() -> None:
    assert trial(some(100), grew=True).reasons == ["backlog grew: 12 → 160 in 5 s"]


def test_what_was_open_when_a_trial_was_given_up_counts_with_the_time_it_waited() -> None:
    open_ones = some(20, failure=STOPPED, first_at=None, gaps_s=[], ended_at=0.3)
    lost = trial([*some(30), *open_ones], requests=100, given_up_s=1.0)
    assert lost.reasons == ["TTFT > 100 ms of 20 in 100"]
    assert (lost.summary.requests, lost.summary.unfinished, lost.summary.failures) == (50, 20, {})
    waited_less = some(20, failure=STOPPED, first_at=None, gaps_s=[], ended_at=0.05)
    assert trial([*some(80), *waited_less], given_up_s=1.0).is_sustained


def test_a_trial_is_given_up_when_more_than_one_percent_missed() -> None:
    assert not is_lost(200, 2) and is_lost(200, 3) and is_lost(50, 1)


def printed(best: Trial) -> str:
    written = io.StringIO()
    Report(written).search(Found(best, [best], ""))
    return " ".join(written.getvalue().split())


def test_what_few_requests_cannot_tell_is_said() -> None:
    assert "a p99 of 99 requests is the slowest of them" in printed(trial(some(99)))
    assert "slowest of them" not in printed(trial(some(100)))
    assert "may pass that is up to 20% beyond what the server can do" in printed(trial(some(100)))
    assert "may pass" not in printed(trial(some(1700)))


def test_a_trial_too_short_for_its_responses_says_what_to_do() -> None:
    said = printed(trial(some(100, ended_at=5.1)))
    assert "no: E2E p99 > 5 s, half a trial" in said and "give a longer --duration" in said
