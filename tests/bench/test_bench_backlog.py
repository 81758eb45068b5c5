"""A server of known capacity, simulated: which rates it keeps up with, and what the search finds."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import statistics
from collections.abc import Callable
from dataclasses import replace

import pytest

from appliance.bench.backlog import backlog
from appliance.bench.messages import STOPPED, Record
from appliance.bench.rates import Found, Trial, find_rate, judge, poisson_arrivals
from appliance.bench.results import Slo, summarize
from appliance.bench.workers import Raw

NO_LIMIT = Slo(itl_p99_ms=1e6)
Server = Callable[[list[float], random.Random], list[float]]
"""When each of the requests that arrive at these times has ended."""


def queue(slots: int, service_s: float, spread_s: float = 0.0) -> Server:
    """First come first served, `slots` at once, about `service_s` each: slots ÷ service_s a second."""

    def serve(arrivals: list[float], draw: random.Random) -> list[float]:
        free = [0.0] * slots
        ends = []
        for at in arrivals:
            begins = max(at, heapq.heappop(free))
            ends.append(begins + max(0.01 * service_s, draw.gauss(service_s, spread_s)))
            heapq.heappush(free, ends[-1])
        return ends

    return serve


def shared(work_s: float) -> Server:
    """Processor sharing: 1 ÷ work_s requests a second; all that are open advance at the same pace, none alone
    more than eight times as fast as the whole would be, like the streams of one batch."""

    def serve(arrivals: list[float], draw: random.Random) -> list[float]:
        ends = [0.0] * len(arrivals)
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
                ends[number] = now
        return ends

    return serve


def trial(server: Server, requests: int, duration_s: float, seed: str) -> Trial:
    arrivals = poisson_arrivals(requests, duration_s, seed)
    ends = server(arrivals, random.Random(seed))
    records = [
        Record(number, began_at=at, late_s=0.0, ended_at=end, first_at=end)
        for number, (at, end) in enumerate(zip(arrivals, ends, strict=True))
    ]
    summary = summarize(Raw(0.0, records, 1, 0.1), 1, 8, NO_LIMIT, duration_s)
    made = Trial(requests, duration_s, summary, backlog(records, 0.0, duration_s), None)
    return replace(made, reasons=judge(made, records, NO_LIMIT))


def search(server: Server, first: int, duration_s: float, seed: int) -> Found:
    tried = itertools.count()

    async def attempt(requests: int) -> Trial:
        return trial(server, requests, duration_s, f"{seed}/{next(tried)}")

    return asyncio.run(find_rate(attempt, first))


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
def test_the_rate_that_is_found_is_the_capacity(server: Server, capacity: float, duration_s: float) -> None:
    found = [search(server, 4, duration_s, seed).best for seed in range(15)]
    held = [best for best in found if best is not None]
    assert len(held) == 15
    # Of a hundred searches one or two exceed what `resolution` says, by little.
    assert all(best.rate <= capacity * (1 + 1.2 * best.resolution) for best in held)
    assert statistics.median(best.rate for best in held) <= 1.1 * capacity
    assert min(best.rate for best in held) >= 0.7 * capacity


@pytest.mark.parametrize("requests", [20, 240, 3000])
@pytest.mark.parametrize("spread_s", [0.0, 1.0])
def test_a_server_without_a_queue_always_keeps_up(requests: int, spread_s: float) -> None:
    # Many open at once, and as many at the end as ever: but none for longer than a response takes.
    server = queue(requests, 5.0, spread_s)
    reasons = [trial(server, requests, 30, str(seed)).reasons for seed in range(40)]
    assert reasons == [[]] * 40


def test_twice_the_capacity_leaves_half_of_it_behind() -> None:
    over = trial(queue(1, 0.025), 800, 10, "seed")
    assert over.reasons[0].startswith("backlog grew: ") and over.reasons[0].endswith(" in 5 s")
    assert 0.25 * 800 < over.backlog.after < 0.5 * 800
    assert over.backlog.before < 0.6 * over.backlog.after
    assert over.backlog.allowed < 0.5 * 800**0.5


def test_a_trial_shorter_than_two_responses_tells_nothing() -> None:
    too_short = trial(queue(1000, 3.0), 100, 5, "seed")
    assert too_short.reasons == ["E2E p99 > 2.5 s, half a trial"]


def test_what_is_open_when_a_trial_is_given_up_is_behind() -> None:
    # One every 1/8 s; the first ten take 1/4 s each, then nothing ends until it is given up.
    due = [number / 8 for number in range(30)]
    records = [Record(number, at, 0.0, at + 0.25, at + 0.25) for number, at in enumerate(due[:10])]
    records += [Record(number, at, 0.0, 3.75, failure=STOPPED) for number, at in enumerate(due[10:])]
    left = backlog(records, 0.0, 20.0)
    # All that came until 1/4 s before are overdue.
    assert left.response_s == 0.25
    assert (left.seconds, left.before, left.after) == (1.875, 4, 19)
