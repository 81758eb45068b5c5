"""Tests that the client processes' records match a server's known response times."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.bench.load import STOPPED, Load, Target
from appliance.bench.processes import RawRun, run_load
from appliance.bench.results import Run, Slo, summarize
from appliance.bench.server import parse_url, socket_target
from tests.bench.fake_server import FakeServer
from tests.waiting import wait_until


def load_of(target: Target, requests: int, **fields: object) -> Load:
    """Return a load with prompts of 16 tokens and answers of 5 tokens."""
    known: dict[str, object] = {
        "target": target,
        "model": "fake",
        "vocab_size": 1000,
        "prompt_tokens": 16,
        "output_tokens": 5,
        "seed": "seed",
        "requests": requests,
        "timeout_s": 60.0,
        **fields,
    }
    return Load(**known)  # type: ignore[arg-type]


def drive(
    target: Target,
    requests: int,
    *,
    concurrency: int = 0,
    arrivals: tuple[float, ...] = (),
    output_tokens: int = 5,
    workers: int = 1,
    timeout_s: float = 60.0,
    stop_after_s: float = math.inf,
    show: Callable[[RawRun], None] = lambda raw: None,
) -> RawRun:
    """Run a load against the server, without the probe that normally precedes a load."""
    load = load_of(
        target,
        requests,
        concurrency=concurrency,
        arrivals=arrivals,
        output_tokens=output_tokens,
        timeout_s=timeout_s,
        stop_after_s=stop_after_s,
    )
    return run_load(load, workers, show)


def statistics(raw: RawRun, output_tokens: int = 5) -> Run:
    return summarize(raw, load_of(Target(), len(raw.records), output_tokens=output_tokens), Slo())


@pytest.fixture
def target(fake: FakeServer) -> Target:
    return parse_url(fake.url, None)


def test_percentiles_match_the_response_times_of_the_server(fake: FakeServer, target: Target) -> None:
    fake.behaviour.ttft_s = lambda number: 0.3 if number == 3 else 0.05
    fake.behaviour.gap_s = 0.02
    began = time.monotonic()
    summary = statistics(drive(target, 20, concurrency=4))
    taken_ms = 1000 * (time.monotonic() - began)
    assert summary.succeeded == 20 and not summary.failures
    assert summary.ttft_ms and summary.itl_ms and summary.tpot_ms and summary.e2e_ms
    # How much longer the times are depends on the machine. The five requests of a connection and the four
    # gaps of a request follow one another.
    assert summary.ttft_ms.p50 >= 50 and summary.ttft_ms.max >= 300
    assert summary.itl_ms.p50 >= 18 and summary.tpot_ms.p50 >= 18
    assert summary.e2e_ms.p50 >= 130 and summary.e2e_ms.p50 > summary.ttft_ms.p50
    assert summary.e2e_ms.max < taken_ms and summary.e2e_ms.p50 < taken_ms / 2
    assert 4 * summary.tpot_ms.p50 < summary.e2e_ms.max and 2 * summary.itl_ms.p50 < summary.e2e_ms.max
    assert (summary.output_tokens, summary.prompt_tokens) == (100, 320)


def test_the_concurrency_limit_is_divided_among_the_workers(fake: FakeServer, target: Target) -> None:
    fake.behaviour.answers = lambda: len(fake.bodies) >= 6
    raw = drive(target, 24, concurrency=6, workers=2)
    summary = statistics(raw)
    assert summary.succeeded == 24 and raw.workers == 2
    assert fake.connections == 6
    edges = sorted([(one.began_at, 1) for one in raw.records] + [(one.ended_at, -1) for one in raw.records])
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    assert most == 6


@pytest.mark.parametrize(
    ("requests", "concurrency", "workers"), [(16, 4, 4), (30, 3, 2), (2, 8, 2), (5, 5, 3)]
)
def test_each_worker_sends_the_requests_of_its_streams(requests: int, concurrency: int, workers: int) -> None:
    load = load_of(Target(), requests, concurrency=concurrency)
    shares = [load.numbers(worker, workers) for worker in range(workers)]
    assert sorted(number for share in shares for number in share) == list(range(requests))
    per_stream = requests / load.streams
    for worker, share in enumerate(shares):
        streams = len(range(worker, load.streams, workers))
        assert abs(len(share) - per_stream * streams) < per_stream


def test_no_two_requests_share_a_prompt_and_all_request_the_full_length(
    fake: FakeServer, target: Target
) -> None:
    drive(target, 12, concurrency=4, workers=2)
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 12
    for body in fake.bodies:
        assert len(body["prompt"]) == 16 and all(0 <= token < 1000 for token in body["prompt"])
        assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (5, True, True)
        assert body["stream_options"] == {"include_usage": True}


def test_a_server_that_closes_after_each_answer_gets_one_connection_per_request(
    fake: FakeServer, target: Target
) -> None:
    fake.behaviour.keeps_alive = False
    assert statistics(drive(target, 9, concurrency=3)).succeeded == 9
    assert fake.connections == 9


def test_a_request_that_meets_a_closed_idle_connection_is_sent_again(
    fake: FakeServer, target: Target
) -> None:
    fake.behaviour.hangs_up_idle = True
    assert statistics(drive(target, 6, concurrency=2)).succeeded == 6
    assert len(fake.bodies) == 6


def test_chunks_of_several_tokens_are_measured(fake: FakeServer, target: Target) -> None:
    fake.behaviour.tokens_per_chunk = 4
    fake.behaviour.gap_s = 0.02
    # With forty requests, a pause of the client, after which several chunks arrive at once, affects only a
    # few gaps.
    summary = statistics(drive(target, 40, concurrency=4, output_tokens=16), 16)
    assert (summary.output_tokens, summary.chunks) == (640, 160)
    assert summary.itl_ms and summary.tpot_ms
    # The last fifteen tokens of an answer arrive in only three chunks. TPOT is therefore well below ITL, even
    # if a busy machine made one gap long.
    assert summary.itl_ms.p50 >= 18 and summary.tpot_ms.max < summary.itl_ms.max / 3


def test_chunks_are_counted_if_the_server_reports_no_usage(fake: FakeServer, target: Target) -> None:
    fake.behaviour.sends_usage = False
    summary = statistics(drive(target, 2, concurrency=1))
    assert (summary.output_tokens, summary.tokens_counted_by_client) == (10, True)


def test_a_unix_socket_works_like_an_address(run_dir: Path) -> None:
    server = FakeServer(str(run_dir / "fake.sock"))
    try:
        assert (
            statistics(drive(socket_target(str(run_dir / "fake.sock")), 40, concurrency=40)).succeeded == 40
        )
    finally:
        server.close()


@pytest.fixture(
    params=[
        ("status", lambda number: 503, "http 503", "no, 503"),
        ("breaks_after", 2, "closed", "closed the connection"),
        ("error_event_after", 1, "error event", "the engine failed"),
        ("hangs_after", 3, "timeout", "0.4 s"),
        ("streams", False, "protocol", "the server streamed no completion"),
    ],
    ids=lambda case: case[2],
)
def failing(request: pytest.FixtureRequest, fake: FakeServer) -> Iterator[tuple[str, str]]:
    name, value, kind, message = request.param
    setattr(fake.behaviour, name, value)
    yield kind, message


def test_a_failure_is_counted_by_its_kind(target: Target, failing: tuple[str, str]) -> None:
    kind, message = failing
    summary = statistics(drive(target, 3, concurrency=3, timeout_s=0.4 if kind == "timeout" else 60.0))
    assert summary.succeeded == 0 and summary.output_tokens == 0
    assert {name: one.count for name, one in summary.failures.items()} == {kind: 3}
    assert message in summary.failures[kind].example


def test_a_failure_does_not_end_the_others(fake: FakeServer, target: Target) -> None:
    fake.behaviour.status = lambda number: 500 if number % 3 == 0 else 200
    summary = statistics(drive(target, 12, concurrency=2))
    assert summary.succeeded == 8 and summary.failures["http 500"].count == 4


def test_a_server_that_does_not_listen_is_a_failure_to_connect() -> None:
    closed = parse_url("http://127.0.0.1:1/v1", None)
    summary = statistics(drive(closed, 2, concurrency=2))
    assert summary.failures["connect"].count == 2


def test_in_open_loop_latency_is_measured_from_the_time_a_request_was_due(
    fake: FakeServer, target: Target
) -> None:
    # All requests are due at the same time, but the server handles them one at a time and takes 500 ms for
    # each. The last request therefore waits for the first three. The server answers none of them before all
    # have arrived, so the client must send each without waiting for the answer to another.
    fake.behaviour.at_once = 1
    fake.behaviour.answers = lambda: len(fake.bodies) == 4
    fake.behaviour.ttft_s = lambda number: 0.5
    summary = statistics(drive(target, 4, arrivals=(0.0, 0.0, 0.0, 0.0)))
    assert summary.ttft_ms and summary.succeeded == 4
    assert summary.ttft_ms.max >= 1990


def test_in_open_loop_requests_do_not_wait_for_answers(fake: FakeServer, target: Target) -> None:
    fake.behaviour.answers = lambda: len(fake.bodies) == 10
    raw = drive(target, 10, arrivals=tuple(0.02 * number for number in range(10)), workers=2)
    began = sorted(one.began_at - raw.started_at for one in raw.records)
    assert began == pytest.approx([0.02 * number for number in range(10)], abs=0.001)
    assert statistics(raw).succeeded == 10


def test_a_run_that_reaches_its_time_limit_closes_its_requests(fake: FakeServer, target: Target) -> None:
    fake.behaviour.hangs_after = 1
    raw = drive(target, 50, concurrency=3, stop_after_s=8.0)
    assert [record.failure for record in raw.records] == [STOPPED] * 3
    assert (statistics(raw).unfinished, statistics(raw).failures) == (3, {})
    wait_until(lambda: fake.left == 3)


def test_progress_shows_running_requests_and_received_tokens(fake: FakeServer, target: Target) -> None:
    seen: list[tuple[int, int]] = []
    fake.behaviour.answers = lambda: (3, 0) in seen
    drive(target, 3, concurrency=3, show=lambda raw: seen.append((raw.running, raw.chunks)))
    assert seen[-1] == (0, 15)


def test_every_request_is_reported_once(fake: FakeServer, target: Target) -> None:
    # The run is long enough for several progress reports, so the test would notice if records were lost
    # between two of them.
    fake.behaviour.ttft_s = lambda number: 0.03
    assert len(drive(target, 60, concurrency=3, output_tokens=2).records) == len(fake.bodies) == 60
