"""Worker processes against a server with known timings: what they note is what happened."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.bench.messages import STOPPED, Record, Target
from appliance.bench.results import Slo, Summary, summarize
from appliance.bench.server import Server, target_of
from appliance.bench.workers import Load, Raw, Standing, Workers
from tests.bench.fake_server import FakeServer


def drive(
    target: Target,
    requests: int,
    *,
    concurrency: int = 0,
    arrivals: list[float] | None = None,
    output_tokens: int = 5,
    workers: int = 1,
    timeout_s: float = 60.0,
    watch: Callable[[Standing], bool] = lambda standing: True,
) -> Raw:
    """One run against the server, without asking it anything before."""
    server = Server(target, "fake", 1000, "the test", None)

    async def run() -> Raw:
        async with Workers() as pool:
            prompting = server.prompting(16, output_tokens, "seed", 0.0, 1.0)
            load = Load(
                target, prompting, requests, concurrency, arrivals or [], timeout_s, ttft_limit_s=0.05
            )
            return await pool.run(load, workers, watch)

    return asyncio.run(run())


def figures(raw: Raw, output_tokens: int = 5) -> Summary:
    return summarize(raw, output_tokens, 16, Slo())


@pytest.fixture
def target(fake: FakeServer) -> Target:
    return target_of(fake.url, None, None)


def test_percentiles_are_the_servers_own_times(fake: FakeServer, target: Target) -> None:
    fake.behaviour.ttft_s = lambda number: 0.3 if number == 3 else 0.05
    fake.behaviour.gap_s = 0.02
    summary = figures(drive(target, 20, concurrency=4))
    assert summary.succeeded == 20 and not summary.failures
    assert summary.ttft and summary.itl and summary.tpot and summary.e2e
    # Nothing comes early; how late depends on the machine, which others may use as well.
    assert 50 <= summary.ttft.p50 < 250 and summary.ttft.max >= 300
    assert 18 <= summary.itl.p50 < 100
    assert 18 <= summary.tpot.p50 < 100
    assert 130 <= summary.e2e.p50 < 650
    assert (summary.output_tokens, summary.prompt_tokens) == (100, 320)


def test_at_most_the_concurrency_runs_at_once_spread_over_workers(fake: FakeServer, target: Target) -> None:
    fake.behaviour.ttft_s = lambda number: 0.3  # in which both workers have begun, whoever comes late
    raw = drive(target, 24, concurrency=6, workers=2)
    summary = figures(raw)
    assert summary.succeeded == 24 and raw.workers == 2
    assert fake.connections == 6
    edges = sorted([(one.began_at, 1) for one in raw.records] + [(one.ended_at, -1) for one in raw.records])
    running = most = 0
    for _, change in edges:
        running += change
        most = max(most, running)
    assert most == 6


@pytest.mark.parametrize(
    ("requests", "concurrency", "workers"), [(16, 4, 8), (30, 3, 2), (2, 8, 4), (5, 5, 3)]
)
def test_requests_are_dealt_like_the_streams_that_send_them(
    target: Target, requests: int, concurrency: int, workers: int
) -> None:
    prompting = Server(target, "fake", 1000, "the test", None).prompting(16, 5, "seed", 0.0, 1.0)
    plans = Load(target, prompting, requests, concurrency).plans(workers)
    assert sorted(number for plan in plans for number in plan.requests) == list(range(requests))
    assert sum(plan.concurrency for plan in plans) == min(requests, concurrency)
    a_stream = requests / min(requests, concurrency)
    assert all(abs(len(plan.requests) - a_stream * plan.concurrency) < a_stream for plan in plans)


def test_arrivals_stay_with_their_requests(target: Target) -> None:
    prompting = Server(target, "fake", 1000, "the test", None).prompting(16, 5, "seed", 0.0, 1.0)
    arrivals = [0.5 * number for number in range(7)]
    plans = Load(target, prompting, 7, arrivals=arrivals).plans(3)
    dealt = [pair for plan in plans for pair in zip(plan.requests, plan.arrivals, strict=True)]
    assert sorted(dealt) == list(enumerate(arrivals)) and len(plans) == 3


def test_no_two_requests_share_a_prompt_and_all_ask_for_the_whole_length(
    fake: FakeServer, target: Target
) -> None:
    drive(target, 12, concurrency=4, workers=2)
    assert len({tuple(body["prompt"]) for body in fake.bodies}) == 12
    for body in fake.bodies:
        assert len(body["prompt"]) == 16 and all(0 <= token < 1000 for token in body["prompt"])
        assert (body["max_tokens"], body["ignore_eos"], body["stream"]) == (5, True, True)
        assert body["stream_options"] == {"include_usage": True}


def test_a_server_that_closes_after_each_answer_gets_a_connection_each(
    fake: FakeServer, target: Target
) -> None:
    fake.behaviour.keeps_alive = False
    assert figures(drive(target, 9, concurrency=3)).succeeded == 9
    assert fake.connections == 9


def test_a_request_that_meets_a_closed_idle_connection_is_sent_again(
    fake: FakeServer, target: Target
) -> None:
    fake.behaviour.hangs_up_idle = True
    assert figures(drive(target, 6, concurrency=2)).succeeded == 6
    assert len(fake.bodies) == 6


def test_several_tokens_a_chunk_are_noticed(fake: FakeServer, target: Target) -> None:
    fake.behaviour.tokens_per_chunk = 4
    fake.behaviour.gap_s = 0.02
    summary = figures(drive(target, 4, concurrency=4, output_tokens=16), 16)
    assert (summary.output_tokens, summary.chunks, summary.tokens_per_chunk) == (64, 16, 4)
    assert summary.itl and summary.tpot
    # Three gaps for fifteen tokens, however long the machine made one of them.
    assert summary.itl.p50 >= 18 and summary.tpot.max < summary.itl.max / 3


def test_chunks_are_counted_where_there_is_no_usage(fake: FakeServer, target: Target) -> None:
    fake.behaviour.sends_usage = False
    summary = figures(drive(target, 2, concurrency=1))
    assert (summary.output_tokens, summary.tokens_counted_by_us) == (10, True)


def test_a_unix_socket_is_served_as_well(run_dir: Path) -> None:
    server = FakeServer(str(run_dir / "fake.sock"))
    try:
        assert (
            figures(drive(target_of(None, str(run_dir / "fake.sock"), None), 40, concurrency=40)).succeeded
            == 40
        )
    finally:
        server.close()


@pytest.fixture(
    params=[
        ("status", lambda number: 503, "http 503", "no, 503"),
        ("breaks_after", 2, "closed", "closed the connection"),
        ("error_event_after", 1, "error event", "the engine fell over"),
        ("hangs_after", 3, "timeout", "0.4 s"),
        ("streams", False, "protocol", "no completion was streamed"),
    ],
    ids=lambda case: case[2],
)
def failing(request: pytest.FixtureRequest, fake: FakeServer) -> Iterator[tuple[str, str]]:
    name, value, kind, message = request.param
    setattr(fake.behaviour, name, value)
    yield kind, message


def test_a_failure_is_counted_by_its_kind(target: Target, failing: tuple[str, str]) -> None:
    kind, message = failing
    summary = figures(drive(target, 3, concurrency=3, timeout_s=0.4 if kind == "timeout" else 60.0))
    assert summary.succeeded == 0 and summary.output_tokens == 0
    assert {name: one.count for name, one in summary.failures.items()} == {kind: 3}
    assert message in summary.failures[kind].example


def test_a_failure_does_not_end_the_others(fake: FakeServer, target: Target) -> None:
    fake.behaviour.status = lambda number: 500 if number % 3 == 0 else 200
    summary = figures(drive(target, 12, concurrency=2))
    assert summary.succeeded == 8 and summary.failures["http 500"].count == 4


def test_a_server_that_is_gone_is_a_failure_to_connect() -> None:
    closed = target_of("http://127.0.0.1:1/v1", None, None)
    summary = figures(drive(closed, 2, concurrency=2))
    assert summary.failures["connect"].count == 2


def test_in_open_loop_a_request_counts_from_when_it_was_due(fake: FakeServer, target: Target) -> None:
    # One at a time, 500 ms each, all due at once: the last one waited for all others.
    fake.behaviour.at_once = 1
    fake.behaviour.ttft_s = lambda number: 0.5
    summary = figures(drive(target, 4, arrivals=[0.0, 0.0, 0.0, 0.0]))
    assert summary.ttft and summary.succeeded == 4
    assert summary.ttft.max >= 1990
    assert summary.late_p99_ms < 1490  # they left when due: what they waited for was the server


def test_in_open_loop_requests_do_not_wait_for_answers(fake: FakeServer, target: Target) -> None:
    fake.behaviour.ttft_s = lambda number: 1.5
    raw = drive(target, 10, arrivals=[0.02 * number for number in range(10)], workers=2)
    began = sorted(one.began_at - raw.started_at for one in raw.records)
    assert began == pytest.approx([0.02 * number for number in range(10)], abs=0.001)
    assert figures(raw).seconds < 14  # one after another: 15


def test_a_run_that_is_given_up_leaves_the_server_and_the_next_one_begins(
    fake: FakeServer, target: Target
) -> None:
    fake.behaviour.hangs_after = 1
    server = Server(target, "fake", 1000, "the test", None)

    async def run() -> None:
        async with Workers() as pool:
            load = Load(target, server.prompting(16, 5, "seed", 0.0, 1.0), 50, concurrency=3)
            raw = await pool.run(load, 1, lambda standing: standing.chunks < 3)
            assert raw.stopped
            assert [record.failure for record in raw.records] == [STOPPED] * 3
            while fake.left < 3:
                await asyncio.sleep(0.01)
            fake.behaviour.hangs_after = None
            raw = await pool.run(load, 1, lambda standing: True)
            assert not raw.stopped and figures(raw).succeeded == 50

    asyncio.run(asyncio.wait_for(run(), 60))


def test_requests_without_their_first_token_in_time_are_known_while_they_run(
    fake: FakeServer, target: Target
) -> None:
    fake.behaviour.ttft_s = lambda number: 2.0
    most = 0

    def watch(standing: Standing) -> bool:
        nonlocal most
        most = max(most, standing.overdue)
        return True

    drive(target, 3, concurrency=3, watch=watch)
    assert most == 3


def test_records_are_whole_however_they_travel(fake: FakeServer, target: Target) -> None:
    # Longer than several progress reports: none of the records between two of them is lost.
    fake.behaviour.ttft_s = lambda number: 0.03
    records: list[Record] = drive(target, 60, concurrency=3, output_tokens=2).records
    assert sorted(record.number for record in records) == list(range(60))
