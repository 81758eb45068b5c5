"""Records in, figures out: each number from its definition."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from appliance.bench.messages import STOPPED, Record
from appliance.bench.results import Slo, distribution, percentile, summarize
from appliance.bench.server import Server, target_of
from appliance.bench.session import Session
from appliance.bench.workers import Load, Raw, Watch
from appliance.bench.workloads import WORKLOADS

START = 1000.0


def record(number: int = 0, **fields: object) -> Record:
    """A request of 4 tokens: sent at 0 s, tokens at 100, 110, 120 and 150 ms, over at 151 ms."""
    known: dict[str, object] = {
        "began_at": START,
        "late_s": 0.0,
        "ended_at": START + 0.151,
        "first_at": START + 0.1,
        "gaps_s": [0.01, 0.01, 0.03],
        "tokens": 4,
        "prompt_tokens": 8,
        **fields,
    }
    return Record(number, **known)  # type: ignore[arg-type]


def raw(*records: Record) -> Raw:
    return Raw(START, list(records), workers=1, busiest_worker=0.1)


def test_one_request_gives_its_own_times() -> None:
    summary = summarize(raw(record()), 4, 8, Slo())
    assert summary.ttft and summary.itl and summary.tpot and summary.e2e
    assert summary.ttft.p50 == pytest.approx(100)
    assert (summary.itl.p50, summary.itl.max) == pytest.approx((10, 30))
    assert summary.tpot.p50 == pytest.approx(50 / 3)
    assert summary.e2e.p99 == pytest.approx(151)
    assert summary.output_tok_s == pytest.approx(4 / 0.151)
    assert summary.prompt_tok_s == pytest.approx(8 / 0.151)
    assert summary.goodput is None and summary.short_answers == 0


class Timed:
    """Instead of worker processes: runs of one request, which take these times."""

    def __init__(self, seconds: list[float]) -> None:
        self._seconds = iter(seconds)

    async def run(self, load: Load, workers: int, watch: Watch) -> Raw:
        return raw(record(ended_at=START + next(self._seconds)))


@pytest.mark.parametrize(
    ("name", "seconds", "typical"),
    [
        ("ttft8k", [0.2, 0.3, 0.1], 0.2),
        ("ttft8k", [0.2, 0.3], 0.3),
        ("ttft8k", [0.4, 0.2, 0.1, 0.3], 0.3),
        # Tokens a second: fewer, the longer it takes.
        ("b1_decode", [0.2, 0.3, 0.1], 0.2),
        ("b1_decode", [0.2, 0.3], 0.3),
    ],
)
def test_of_an_even_number_of_runs_the_worse_of_the_two_in_the_middle_is_told(
    name: str, seconds: list[float], typical: float
) -> None:
    server = Server(target_of("http://127.0.0.1:1", None, None), "fake", 1000, "", None)
    session = Session(server, Timed(seconds), lambda aim, standing: None, seed="1")  # type: ignore[arg-type]
    result = asyncio.run(session.closed(name, WORKLOADS[name], len(seconds), warm_up=False))
    assert result.typical.summary.seconds == pytest.approx(typical)


def test_several_tokens_a_chunk_count_per_token_in_tpot_and_per_chunk_in_itl() -> None:
    summary = summarize(raw(record(tokens=8)), 8, 8, Slo())
    assert summary.tokens_per_chunk == 2
    assert summary.itl and summary.tpot
    assert summary.itl.p50 == pytest.approx(10)
    assert summary.tpot.p50 == pytest.approx(50 / 7)
    assert sum(second.output_tokens for second in summary.series) == pytest.approx(8)


def test_tokens_are_chunks_where_the_server_does_not_count() -> None:
    summary = summarize(raw(record(tokens=None, prompt_tokens=None)), 4, 8, Slo())
    assert (summary.output_tokens, summary.prompt_tokens, summary.tokens_counted_by_us) == (4, 8, True)


def test_failures_count_by_kind_and_their_tokens_not_at_all() -> None:
    failed = [record(number, failure="http 503", message="full") for number in range(3)]
    summary = summarize(raw(record(), *failed, record(failure="timeout")), 4, 8, Slo())
    assert {kind: one.count for kind, one in summary.failures.items()} == {"http 503": 3, "timeout": 1}
    assert summary.failures["http 503"].example == "full"
    assert (summary.requests, summary.succeeded, summary.output_tokens) == (5, 1, 4)


def test_requests_that_were_open_when_we_gave_up_are_unfinished_and_have_no_times() -> None:
    given_up = record(failure=STOPPED, ended_at=START + 9)
    summary = summarize(raw(record(), given_up), 4, 8, Slo(ttft_p99_ms=101))
    assert (summary.requests, summary.succeeded, summary.unfinished, summary.failures) == (2, 1, 1, {})
    assert summary.seconds == pytest.approx(9) and summary.output_tokens == 4
    assert summary.e2e and summary.e2e.max == pytest.approx(151)
    assert summary.goodput == pytest.approx(1 / 9)


def test_in_open_loop_time_without_arrivals_counts() -> None:
    # One request in a window of 2 s is 0.5 a second, however soon it came and ended.
    assert summarize(raw(record()), 4, 8, Slo(), duration_s=2.0).requests_s == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("slo", "good"),
    [
        (Slo(ttft_p99_ms=101), 1),
        (Slo(ttft_p99_ms=99), 0),
        (Slo(itl_p99_ms=17), 1),
        (Slo(itl_p99_ms=16), 0),
        (Slo(ttft_p99_ms=101, itl_p99_ms=16), 0),
    ],
)
def test_goodput_counts_requests_within_every_limit(slo: Slo, good: int) -> None:
    summary = summarize(raw(record(), record(failure="timeout")), 4, 8, slo)
    assert summary.good == good
    assert summary.goodput == pytest.approx(good / 0.151)


def test_the_series_says_what_came_in_which_second() -> None:
    late = record(1, began_at=START + 1.5, first_at=START + 2.1, ended_at=START + 2.2, gaps_s=[0.0] * 3)
    series = summarize(raw(record(), late), 4, 8, Slo()).series
    assert [second.output_tokens for second in series] == [4, 0, 4]
    assert [second.running for second in series] == [0, 1, 0]
    assert [second.first_tokens for second in series] == [1, 0, 1]


def test_the_series_lasts_as_long_as_the_run_and_counts_what_fails_as_running() -> None:
    failed = record(1, failure="timeout", ended_at=START + 2.5)
    series = summarize(raw(record(), failed), 4, 8, Slo(), duration_s=4.0).series
    assert [second.running for second in series] == [1, 1, 0, 0, 0]
    assert [second.ended for second in series] == [1, 0, 0, 0, 0]
    assert sum(second.output_tokens for second in series) == 4


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (90, 90), (99, 99), (100, 100), (1, 1)])
def test_percentiles_are_nearest_rank(percent: float, value: float) -> None:
    assert percentile([float(number) for number in range(1, 101)], percent) == value


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=200))
@example([0.0, 5e-324])
@example([1e-320, 1e-300, 1e-12])
@example([3.0, 3.0 + 1e-12])
def test_every_value_is_in_the_bin_that_says_so(values: list[float]) -> None:
    ordered = sorted(values)
    bins = distribution(ordered)
    assert sum(one.count for one in bins) == len(ordered)
    assert len(bins) <= 12
    assert all(low.high == high.low for low, high in itertools.pairwise(bins))
    for index, one in enumerate(bins):
        last = index == len(bins) - 1
        inside = sum(one.low <= value < one.high or (last and value == one.high) for value in ordered)
        assert inside == one.count
