"""Tests that a run's statistics are computed from its records as defined."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from appliance.bench.load import STOPPED, Load, Record, Target
from appliance.bench.processes import RawRun
from appliance.bench.results import Run, Slo, percentile, summarize
from appliance.bench.server import Server
from appliance.bench.session import Session
from appliance.bench.workloads import WORKLOADS

START = 1000.0


def record(**fields: object) -> Record:
    """Return the record of a request with 4 tokens: sent at 0 s, tokens at 100, 110, 120 and 150 ms, finished
    at 151 ms."""
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
    return Record(**known)  # type: ignore[arg-type]


def summary(*records: Record, output_tokens: int = 4, slo: Slo | None = None, duration_s: float = 0.0) -> Run:
    load = Load(
        target=Target(),
        model="m",
        vocab_size=10,
        prompt_tokens=8,
        output_tokens=output_tokens,
        seed="",
        requests=len(records),
    )
    return summarize(RawRun(START, 1, list(records)), load, slo or Slo(), duration_s)


def test_the_statistics_of_one_request_are_its_own_times() -> None:
    run = summary(record())
    assert run.ttft_ms and run.itl_ms and run.tpot_ms and run.e2e_ms
    assert run.ttft_ms.p50 == pytest.approx(100)
    assert (run.itl_ms.p50, run.itl_ms.max) == pytest.approx((10, 30))
    assert run.tpot_ms.p50 == pytest.approx(50 / 3)
    assert run.e2e_ms.p99 == pytest.approx(151)
    assert run.output_tok_s == pytest.approx(4 / 0.151)
    assert run.prompt_tok_s == pytest.approx(8 / 0.151)
    assert run.goodput is None and run.short_answers == 0


@pytest.mark.parametrize(
    ("name", "seconds", "typical"),
    [
        ("ttft8k", [0.2, 0.3, 0.1], 0.2),
        ("ttft8k", [0.2, 0.3], 0.3),
        ("ttft8k", [0.4, 0.2, 0.1, 0.3], 0.3),
        # This workload reports tokens per second. A longer run therefore has a lower value.
        ("b1_decode", [0.2, 0.3, 0.1], 0.2),
        ("b1_decode", [0.2, 0.3], 0.3),
    ],
)
def test_for_an_even_number_of_runs_the_worse_of_the_middle_two_is_shown(
    name: str, seconds: list[float], typical: float
) -> None:
    times = iter(seconds)

    def run_load(load: Load, workers: int | None, show: Callable[[RawRun], None]) -> RawRun:
        """Return a run whose only request takes the next of the given times. No client process is started."""
        return RawRun(START, 1, [record(ended_at=START + next(times))])

    session = Session(Server(Target(), "fake", 1000, ""), "1", warm_up=False, run_load=run_load)
    result = session.closed(name, WORKLOADS[name], len(seconds))
    assert result.typical.seconds == pytest.approx(typical)


def test_with_several_tokens_per_chunk_tpot_is_per_token_and_itl_is_per_chunk() -> None:
    run = summary(record(tokens=8), output_tokens=8)
    assert (run.output_tokens, run.chunks) == (8, 4)
    assert run.itl_ms and run.tpot_ms
    assert run.itl_ms.p50 == pytest.approx(10)
    assert run.tpot_ms.p50 == pytest.approx(50 / 7)


def test_chunks_are_counted_as_tokens_if_the_server_reports_no_usage() -> None:
    run = summary(record(tokens=None, prompt_tokens=None))
    assert (run.output_tokens, run.prompt_tokens, run.tokens_counted_by_client) == (4, 8, True)


def test_failures_are_counted_by_kind_and_their_tokens_are_not_counted() -> None:
    failed = [record(failure="http 503", message="full") for _ in range(3)]
    run = summary(record(), *failed, record(failure="timeout"))
    assert {kind: one.count for kind, one in run.failures.items()} == {"http 503": 3, "timeout": 1}
    assert run.failures["http 503"].example == "full"
    assert (run.requests, run.succeeded, run.output_tokens) == (5, 1, 4)


def test_requests_that_were_open_when_a_run_was_stopped_are_unfinished_and_have_no_times() -> None:
    run = summary(record(), record(failure=STOPPED, ended_at=START + 9), slo=Slo(ttft_p99_ms=101))
    assert (run.requests, run.succeeded, run.unfinished, run.failures) == (2, 1, 1, {})
    assert run.seconds == pytest.approx(9) and run.output_tokens == 4
    assert run.e2e_ms and run.e2e_ms.max == pytest.approx(151)
    assert run.goodput == pytest.approx(1 / 9)


def test_in_open_loop_time_without_arrivals_is_part_of_the_run() -> None:
    # One request in 2 s is 0.5 requests per second, regardless of when the request arrived and finished.
    assert summary(record(), duration_s=2.0).requests_s == pytest.approx(0.5)


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
    assert summary(record(), record(failure="timeout"), slo=slo).goodput == pytest.approx(good / 0.151)


@pytest.mark.parametrize(("percent", "value"), [(50, 50), (90, 90), (99, 99), (100, 100), (1, 1)])
def test_percentiles_are_nearest_rank(percent: float, value: float) -> None:
    assert percentile([float(number) for number in range(1, 101)], percent) == value
