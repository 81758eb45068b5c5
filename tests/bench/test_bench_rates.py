"""Tests that arrivals follow a Poisson process, that every limit is applied to a trial, and that the search
finds the highest sustained rate."""

from __future__ import annotations

import io
import itertools
import statistics

import pytest
from msgspec.structs import replace

from appliance.bench.load import STOPPED, Load, Record, Target
from appliance.bench.processes import RawRun
from appliance.bench.rates import Search, UnsettledError, find_rate, judge, poisson_arrivals, requests_at
from appliance.bench.results import Backlog, Run, Slo, summarize
from appliance.cli.bench_report import BenchReport

TTFT_100 = Slo(ttft_p99_ms=100)
DURATION_S = 10.0


def some(count: int, **fields: object) -> list[Record]:
    """Return records of requests that meet every limit, with the given fields changed."""
    known: dict[str, object] = {
        "began_at": 0.0,
        "late_s": 0.0,
        "ended_at": 1.0,
        "first_at": 0.01,
        "gaps_s": [0.01, 0.02],
        **fields,
    }
    return [Record(**known) for _ in range(count)]  # type: ignore[arg-type]


def trial(records: list[Record], *, slo: Slo = TTFT_100, grew: bool = False, busy: float = 0.1) -> Run:
    """Return the evaluated result of a trial with these records."""
    load = Load(
        target=Target(),
        model="m",
        vocab_size=10,
        prompt_tokens=8,
        output_tokens=3,
        seed="",
        requests=len(records),
    )
    run = summarize(RawRun(0.0, 1, records, busiest_worker_cpu=busy), load, slo, DURATION_S)
    run.backlog = Backlog(0.1, 12, 160 if grew else 12, 5.0, 13.0)
    run.reasons = judge(run, slo, DURATION_S)
    return run


def with_size(run: Run, requests: int) -> Run:
    return replace(run, requests=requests, rate=requests / DURATION_S)


def test_arrivals_have_the_given_rate_and_exponential_gaps() -> None:
    arrivals = poisson_arrivals(requests_at(100, 100), 100, "seed")
    gaps = [after - before for before, after in itertools.pairwise(arrivals)]
    assert len(arrivals) == 10_000
    assert statistics.mean(gaps) == pytest.approx(0.01, rel=0.05)
    # The standard deviation of exponentially distributed gaps equals their mean. For equal gaps it is 0.
    assert statistics.stdev(gaps) == pytest.approx(0.01, rel=0.1)
    assert list(arrivals) == sorted(arrivals) and arrivals[0] >= 0 and arrivals[-1] <= 100


def test_the_seed_determines_the_arrivals() -> None:
    assert poisson_arrivals(50, 10, "a") == poisson_arrivals(50, 10, "a") != poisson_arrivals(50, 10, "b")
    assert requests_at(5, 10) == 50 and requests_at(0.001, 0.1) == 1


def search(capacity: float, first: int = 10, busy: float = 0.1, late_s: float = 0.0) -> Search:
    """Run the search against a server that sustains any rate up to `capacity`."""

    def attempt(requests: int) -> Run:
        holds = requests / DURATION_S <= capacity
        records = some(100, first_at=0.01 if holds else 1.0, late_s=0.0 if holds else late_s)
        return with_size(trial(records, busy=busy), requests)

    return find_rate(attempt, first)


@pytest.mark.parametrize("capacity", [0.3, 1.0, 37.0, 5000.0])
def test_the_search_ends_within_five_percent_or_one_request_below_the_capacity(capacity: float) -> None:
    found = search(capacity)
    assert found.best is not None and found.note == ""
    assert found.best.rate is not None
    assert min(capacity / 1.05, capacity - 0.1) <= found.best.rate + 1e-9 <= capacity + 1e-9
    assert len(found.trials) < 30


def test_the_search_ends_when_no_rate_is_sustained() -> None:
    found = search(0.0)
    assert found.best is None and len(found.trials) == 8 and "down to 0.1 " in found.note


def test_the_search_stops_when_the_client_is_the_bottleneck() -> None:
    found = search(1e9, busy=0.95)
    assert found.best is not None and found.best.rate == 1.0
    assert len(found.trials) == 1 and "client" in found.note


def test_a_rate_that_fails_while_the_client_is_late_is_noted() -> None:
    assert "client" in search(37.0, late_s=0.05).note


def test_one_bad_trial_is_repeated_but_a_stopped_trial_is_not() -> None:
    tried: list[int] = []

    def attempt(requests: int) -> Run:
        tried.append(requests)
        if requests > 40:
            return with_size(trial(some(100, failure=STOPPED, first_at=None)), requests)
        return with_size(trial(some(100), grew=requests == 10 and len(tried) == 1), requests)

    found = find_rate(attempt, 10)
    assert found.best is not None and found.best.requests == 40
    assert tried[:2] == [10, 10] and len(tried) == len(set(tried)) + 1


def test_the_search_returns_its_best_trial_when_the_server_does_not_settle() -> None:
    def attempt(requests: int) -> Run:
        if requests == 40:
            raise UnsettledError("still busy")
        return with_size(trial(some(100)), requests)

    found = find_rate(attempt, 10)
    assert found.best is not None and (found.best.requests, found.note) == (20, "still busy")


def test_a_rate_counts_as_sustained_with_at_most_one_percent_of_failures() -> None:
    failed = some(2, failure="http 503", first_at=None)
    assert trial([*some(99), *failed[:1]]).reasons == []
    assert trial([*some(98), *failed]).reasons[0] == "2 of 100 failed (http 503)"


def test_failures_and_late_requests_count_together() -> None:
    # Up to two of the 200 requests may be late or fail.
    late, failed = some(2, first_at=0.5), some(1, failure="closed")
    assert trial([*some(198), *late[:1], *failed]).reasons == []
    assert trial([*some(197), *late, *failed]).reasons == ["TTFT p99 500 > 100 ms"]


def test_each_limit_is_named_when_it_is_missed() -> None:
    assert trial(some(100, first_at=0.5)).reasons == ["TTFT p99 500 > 100 ms"]
    assert trial(some(100), slo=Slo(itl_p99_ms=19)).reasons == ["ITL p99 20.0 > 19 ms"]
    assert trial(some(100), slo=Slo(itl_p99_ms=21)).reasons == []
    assert trial(some(100, ended_at=5.1)).reasons == ["E2E p99 > 5 s, half a trial"]
    assert trial(some(100, first_at=None, gaps_s=[])).reasons == ["no answer contained a token"]


def test_a_growing_backlog_is_a_reason_even_if_the_percentiles_are_good() -> None:
    assert trial(some(100), grew=True).reasons == ["backlog grew: 12 → 160 in 5 s"]


def test_requests_that_are_open_when_a_trial_is_stopped_miss_the_limits() -> None:
    stopped = some(2, failure=STOPPED, first_at=None, gaps_s=[], ended_at=15.0)
    stopped_trial = trial([*some(98), *stopped])
    assert stopped_trial.reasons == ["TTFT p99 > 100 ms"]
    assert (stopped_trial.requests, stopped_trial.unfinished, stopped_trial.failures) == (100, 2, {})
    assert trial([*some(99), *stopped[:1]]).reasons == []
    with_token = some(2, failure=STOPPED, gaps_s=[], ended_at=15.0)
    assert trial([*some(98), *with_token]).reasons == ["E2E p99 > 5 s, half a trial"]


def printed(best: Run) -> str:
    written = io.StringIO()
    BenchReport(written).search(Search(best=best, trials=[best], note=""), DURATION_S)
    return " ".join(written.getvalue().split())


def test_the_report_states_the_uncertainty_of_trials_with_few_requests() -> None:
    assert "with only 99 requests per trial, the 99th percentile is the slowest request" in printed(
        trial(some(99))
    )
    assert "slowest request" not in printed(trial(some(100)))
    assert "may be up to 20% above the rate that the server can sustain" in printed(trial(some(100)))
    assert "may be up to" not in printed(trial(some(1700)))


def test_the_report_asks_for_longer_trials_when_responses_take_too_long() -> None:
    text = printed(trial(some(100, ended_at=5.1)))
    assert "no: E2E p99 > 5 s, half a trial" in text and "use a longer --duration" in text
