"""Tests that a client that sends many requests does not delay the requests of other clients."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from appliance.background import TimeBudgets
from appliance.http import HttpServer
from appliance.http.connection import LARGE_READ_BYTES
from appliance.http.request_memory import HeadHolder, RequestMemory
from appliance.http.turns import BURST_S, MAX_SHARE, MAX_TURNS_PER_PASS, TURN_S, Source, Turns
from tests.front.raw import listening

GREEDY = 200
"""Number of connections of the greedy client, which sends requests without pausing."""


ONE = Source("one", "one")


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    asyncio.run(bounded())


def test_work_runs_at_once_if_no_other_work_waits() -> None:
    async def main() -> None:
        turns, done = Turns(), list[str]()
        turns.add(ONE, 0, lambda: done.append("a"))
        assert done == ["a"]
        for _ in range(3):
            await asyncio.sleep(0)
        turns.add(ONE, 0, lambda: done.append("b"))
        assert done == ["a", "b"]

    run(main)


def test_a_pass_of_the_loop_takes_one_turn_and_sources_alternate(monkeypatch: pytest.MonkeyPatch) -> None:
    # Limit each pass of the event loop to one turn. Otherwise, a slow pass on a busy machine could take a
    # second turn.
    monkeypatch.setattr("appliance.http.turns.TURN_S", 3600.0)

    async def main() -> None:
        turns, done = Turns(), list[str]()
        for name in ("a1", "a2", "a3", "b1", "c1"):
            turns.add(Source(name[0], name[0]), 0, lambda name=name: done.append(name))  # type: ignore[misc]
        seen = []
        while len(done) < 5:
            seen.append(len(done))
            await asyncio.sleep(0)
        assert done == ["a1", "a2", "b1", "c1", "a3"]
        assert set(seen) >= {1, 2, 3, 4}

    run(main)


def test_the_work_of_one_source_is_ordered_by_rank() -> None:
    async def main() -> None:
        turns, done = Turns(), list[int]()
        for rank in (0, 7, 3, 3, 1):
            turns.add(ONE, rank, lambda rank=rank: done.append(rank))  # type: ignore[misc]
        while len(done) < 5:
            await asyncio.sleep(0)
        assert done == [0, 1, 3, 3, 7]

    run(main)


def test_slow_passes_take_more_turns_up_to_a_bound() -> None:
    async def main() -> None:
        turns, done = Turns(), list[int]()
        for number in range(1 + 2 * MAX_TURNS_PER_PASS):
            turns.add(ONE, 0, lambda number=number: done.append(number))  # type: ignore[misc]
        time.sleep(100 * MAX_TURNS_PER_PASS * TURN_S)
        await asyncio.sleep(0)
        assert len(done) == 1 + MAX_TURNS_PER_PASS

    run(main)


def test_work_is_done_at_once_while_a_source_with_another_budget_pauses() -> None:
    async def main() -> None:
        turns, greedy, other = Turns(), list[int](), list[int]()
        turns._budgets.charge("tcp", 100.0, time.monotonic())
        for number in range(3):
            turns.add(Source(f"address {number}", "tcp"), 0, lambda: greedy.append(1))
        for number in range(100):
            turns.add(Source(f"tenant {number}", f"tenant {number}"), 0, lambda: other.append(1))
            assert len(other) == number + 1
            while turns._scheduled:
                await asyncio.sleep(0)
        assert not greedy

    run(main)


def test_work_that_pauses_is_done_when_its_budget_is_within_its_share_again() -> None:
    async def main() -> None:
        turns, done = Turns(), list[tuple[str, bool]]()
        began = time.monotonic()
        turns._budgets.charge("tcp", 2.0 * MAX_SHARE + BURST_S * MAX_SHARE, began)

        def work(name: str) -> None:
            done.append((name, time.monotonic() - began > 1.9))

        for name in ("a", "b"):
            turns.add(Source(name, "tcp"), 0, partial(work, name))
        while len(done) < 2:
            await asyncio.sleep(0.01)
        assert done == [("a", True), ("b", True)]

    run(main)


@pytest.mark.parametrize("max_share", [0.1, 1 / 3, 0.9])
def test_a_user_of_a_time_budget_takes_its_share_in_the_long_run(max_share: float) -> None:
    budgets, now, taken = TimeBudgets(max_share, burst_s=0.5), 100.0, 0.0
    while now < 200.0:
        if rest_s := budgets.rest_s("greedy", now):
            assert budgets.rest_s("other", now) == 0.0
            now += rest_s
        else:
            taken += 0.01
            now += 0.01
            budgets.charge("greedy", 0.01, now)
    assert taken == pytest.approx(100.0 * max_share, abs=0.5)
    budgets.charge("greedy", 1.0, now)
    budgets.forget_unused(now)
    assert budgets.rest_s("greedy", now) > 0.0


def test_a_user_that_took_nothing_for_a_while_may_take_its_share_of_that_time_at_once() -> None:
    budgets, taken = TimeBudgets(0.25, burst_s=2.0), 0
    while not budgets.rest_s("one", 50.0):
        budgets.charge("one", 0.01, 50.0)
        taken += 1
    assert taken == pytest.approx(50, abs=1)


def test_the_first_work_after_a_pause_is_not_delayed_by_the_budget() -> None:
    async def main() -> None:
        turns, done = Turns(), list[int]()
        for number in range(10):
            turns.add(Source("tenant", "tenant"), 0, lambda number=number: done.append(number))  # type: ignore[misc]
        passes = 0
        while len(done) < 10:
            await asyncio.sleep(0)
            passes += 1
        assert passes <= 20

    run(main)


def test_tenants_take_turns_from_the_first_request_of_a_connection(tmp_path: Path) -> None:
    answered = []

    async def work(request: Request) -> PlainTextResponse:
        answered.append(request.headers["tenant"])
        return PlainTextResponse("done")

    async def main() -> None:
        server = HttpServer(
            Starlette(routes=[Route("/", work)]),
            tenant_of=lambda headers, state: dict(headers)[b"tenant"].decode(),
        )
        await server.listen(listening(tmp_path / "s"))
        opened = [await asyncio.open_unix_connection(str(tmp_path / "s")) for _ in range(GREEDY + 1)]
        for _, writer in opened:
            tenant = b"modest" if writer is opened[-1][1] else b"greedy"
            writer.write(b"GET / HTTP/1.1\r\nHost: x\r\nTenant: " + tenant + b"\r\n\r\n")
        while "modest" not in answered:
            await asyncio.sleep(0)
        assert len(answered) < GREEDY // 2
        for _, writer in opened:
            writer.close()
        await server.stop(0.1)

    run(main)


def test_a_new_connection_is_answered_before_many_requests_of_other_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Limit each pass of the event loop to one turn. Otherwise, slow passes on a busy machine could take many.
    monkeypatch.setattr("appliance.http.turns.TURN_S", 3600.0)
    answered = []

    async def work(request: Request) -> PlainTextResponse:
        answered.append(request.url.path)
        time.sleep(0.001)
        return PlainTextResponse("done")

    async def main() -> None:
        server = HttpServer(Starlette(routes=[Route("/greedy", work), Route("/modest", work)]))
        # A connection's requests are ranked within each second. Stop the clock, so that all requests fall
        # into the same second however slow the machine is.
        assert server._clock is not None
        server._clock.cancel()
        await server.listen(listening(tmp_path / "s"))
        greedy = [await asyncio.open_unix_connection(str(tmp_path / "s")) for _ in range(GREEDY)]
        for _, writer in greedy:
            writer.write(b"GET /greedy HTTP/1.1\r\nHost: x\r\n\r\n" * 100)
        while len(answered) < 3 * GREEDY:
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "s"))
        sent = len(answered)
        writer.write(b"GET /modest HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).endswith(b"done")
        # The event loop needs a few passes to read the request, and one turn to serve it.
        assert answered.index("/modest") - sent < GREEDY // 2
        for _, other in [*greedy, (reader, writer)]:
            other.close()
        await server.stop(0.1)

    run(main)


def test_large_heads_that_arrive_at_the_same_time_are_read_by_turns(tmp_path: Path) -> None:
    unfinished = b"GET / HTTP/1.1\r\nHost: x\r\nFilling: " + b"x" * 60_000
    held: dict[object, int] = {}

    class Recorder(RequestMemory):
        def hold(self, connection: HeadHolder, size: int) -> None:
            held[connection] = size

    async def main() -> None:
        server = HttpServer(Starlette())
        server.request_memory = Recorder()
        await server.listen(listening(tmp_path / "s"))
        opened = [await asyncio.open_unix_connection(str(tmp_path / "s")) for _ in range(GREEDY)]
        while server.connections < GREEDY:
            await asyncio.sleep(0)
        for _, writer in opened:
            writer.write(unfinished)
        largest = before = 0
        while before < GREEDY * len(unfinished):
            await asyncio.sleep(0)
            total = sum(held.values())
            largest, before = max(largest, total - before), total
        assert largest <= (GREEDY + MAX_TURNS_PER_PASS) * LARGE_READ_BYTES
        for _, writer in opened:
            writer.close()
        await server.stop(0.1)

    run(main)
