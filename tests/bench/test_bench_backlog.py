"""Tests of the rate search and the backlog limit against simulated servers of known capacity."""

from __future__ import annotations

import heapq
import itertools
import random
import statistics
from collections.abc import Callable

import pytest

from appliance.bench.load import STOPPED, Load, Record, Target
from appliance.bench.processes import RawRun
from appliance.bench.rates import Search, backlog, find_rate, judge, poisson_arrivals, resolution
from appliance.bench.results import RequestTimes, Run, Slo, summarize

NO_LIMIT = Slo(itl_p99_ms=1e6)
Server = Callable[[list[float], random.Random], list[float]]
"""A function that maps the arrival times of requests to their completion times."""


def queue(slots: int, service_s: float, spread_s: float = 0.0) -> Server:
    """Return a first-come, first-served server. It serves `slots` requests at a time and spends about
    `service_s` on each, so its capacity is slots ÷ service_s requests per second."""

    def serve(arrivals: list[float], draw: random.Random) -> list[float]:
        free = [0.0] * slots
        end_times = []
        for at in arrivals:
            begins = max(at, heapq.heappop(free))
            end_times.append(begins + max(0.01 * service_s, draw.gauss(service_s, spread_s)))
            heapq.heappush(free, end_times[-1])
        return end_times

    return serve


def shared(work_s: float) -> Server:
    """Return a processor-sharing server with a capacity of 1 ÷ work_s requests per second. All open requests
    advance at the same rate, like the sequences of a batch, but no request gets more than an eighth of the
    server's total rate."""

    def serve(arrivals: list[float], draw: random.Random) -> list[float]:
        end_times = [0.0] * len(arrivals)
        left: dict[int, float] = {}
        now, index = 0.0, 0
        while index < len(arrivals) or left:
            pace = 1 / max(8, len(left))
            next_end = now + min(left.values()) / pace if left else float("inf")
            next_arrival = arrivals[index] if index < len(arrivals) else float("inf")
            until = min(next_end, next_arrival)
            for number in left:
                left[number] -= (until - now) * pace
            now = until
            if next_arrival <= next_end:
                left[index] = work_s
                index += 1
            else:
                number = min(left, key=left.__getitem__)
                del left[number]
                end_times[number] = now
        return end_times

    return serve


def trial(server: Server, requests: int, duration_s: float, seed: str) -> Run:
    """Return the evaluated result of a trial against the simulated server."""
    arrivals = poisson_arrivals(requests, duration_s, seed)
    end_times = server(list(arrivals), random.Random(seed))
    records = [Record(at, 0.0, end, first_at=end) for at, end in zip(arrivals, end_times, strict=True)]
    load = Load(
        target=Target(),
        model="m",
        vocab_size=10,
        prompt_tokens=8,
        output_tokens=1,
        seed=seed,
        requests=requests,
        arrivals=arrivals,
    )
    run = summarize(RawRun(0.0, 1, records), load, NO_LIMIT, duration_s)
    run.backlog = backlog(run.per_request, duration_s)
    run.reasons = judge(run, NO_LIMIT, duration_s)
    return run


def search(server: Server, first: int, duration_s: float, seed: int) -> Search:
    tried = itertools.count()

    def attempt(requests: int) -> Run:
        return trial(server, requests, duration_s, f"{seed}/{next(tried)}")

    return find_rate(attempt, first)


@pytest.mark.parametrize(
    ("server", "capacity", "duration_s"),
    [
        (queue(1, 0.025), 40, 2),
        (queue(1, 0.025), 40, 20),
        (queue(4, 0.05), 80, 2),
        (queue(64, 3.0, 0.3), 64 / 3, 30),
        (queue(256, 5.0, 1.0), 256 / 5, 30),
        (shared(0.025), 40, 10),
    ],
    ids=["one slot, 2 s", "one slot, 20 s", "four slots", "64 slots", "256 uneven slots", "shared"],
)
def test_the_search_finds_the_capacity_of_the_server(
    server: Server, capacity: float, duration_s: float
) -> None:
    found = [search(server, 4, duration_s, seed).best for seed in range(8)]
    held = [best for best in found if best is not None]
    assert len(held) == 8
    rates = [best.rate or 0.0 for best in held]
    # In one or two of a hundred searches, the error of the rate slightly exceeds the tolerance that
    # `resolution` returns.
    for best, rate in zip(held, rates, strict=True):
        assert rate <= capacity * (1 + 1.2 * resolution(best, duration_s))
    assert statistics.median(rates) <= 1.1 * capacity
    assert min(rates) >= 0.7 * capacity


@pytest.mark.parametrize(("requests", "trials"), [(20, 40), (240, 40), (3000, 15)])
@pytest.mark.parametrize("spread_s", [0.0, 1.0])
def test_a_server_without_a_queue_always_keeps_up(requests: int, trials: int, spread_s: float) -> None:
    # Many requests are open at the same time, even at the end, but each request is open only for the duration
    # of its response.
    server = queue(requests, 5.0, spread_s)
    reasons = [trial(server, requests, 30, str(seed)).reasons for seed in range(trials)]
    assert reasons == [[]] * trials


def test_twice_the_capacity_leaves_half_of_the_requests_behind() -> None:
    over = trial(queue(1, 0.025), 800, 10, "seed")
    assert over.reasons[0].startswith("backlog grew: ") and over.reasons[0].endswith(" in 5 s")
    assert over.backlog is not None
    assert 0.25 * 800 < over.backlog.after < 0.5 * 800
    assert over.backlog.before < 0.6 * over.backlog.after
    assert over.backlog.allowed < 0.5 * 800**0.5


def test_a_trial_shorter_than_two_responses_is_inconclusive() -> None:
    too_short = trial(queue(1000, 3.0), 100, 5, "seed")
    assert too_short.reasons == ["E2E p99 > 2.5 s, half a trial"]


def test_requests_that_are_open_when_a_trial_is_stopped_count_as_backlog() -> None:
    # One request arrives every 1/8 s for 4 s. The first ten take 1/4 s each. The others are still open when
    # the trial is stopped at 6 s.
    due = [number / 8 for number in range(32)]
    ended = [RequestTimes(at, 250.0, 250.0, 0.0, None, 1, "", "") for at in due[:10]]
    stopped = [RequestTimes(at, None, 1e3 * (6 - at), 0.0, None, 0, STOPPED, "") for at in due[10:]]
    left = backlog([*ended, *stopped], 4.0)
    assert left.response_s == 0.25
    assert (left.seconds, left.before, left.after) == (2.0, 5, 21)
