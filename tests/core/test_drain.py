"""A drain's order: readiness first, then refusals, then the wait, then the end of what is left."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.drains import Drain, DrainError, Drains


class FakeRequestManager:
    """Counts down by itself: one request fewer each time that it is looked at."""

    def __init__(self, told: list[str], looks: int) -> None:
        self.told, self.looks = told, looks

    def close(self, model: str | None, why: str, *, hold: bool = False) -> None:
        self.told.append(f"close {model} {hold}: {why}")

    def open(self, model: str | None) -> None:
        self.told.append(f"open {model}")

    def unfinished(self, model: str | None = None) -> list[Any]:
        self.looks -= 1
        return [Unfinished()] if self.looks > 0 else []

    def finished(self, model: str | None = None) -> bool:
        return not self.unfinished(model)


class Unfinished:
    request_id = "r0"


class FakeHouse:
    def __init__(self, looks: int = 3) -> None:
        self.told: list[str] = []
        self.requests: Any = FakeRequestManager(self.told, looks)
        self.fronts_know = asyncio.Event()

    async def announce(self) -> None:
        self.told.append("announce")
        await self.fronts_know.wait()
        self.told.append("fronts know")

    def cancel(self, request_id: str, message: str) -> bool:
        self.told.append(f"cancel {request_id}: {message}")
        self.requests.looks = 0
        return True


def drain(house: FakeHouse, model: str | None = None, **options: Any) -> Drain:
    given = {"why": "it drains", "grace_s": 60.0, "notice_s": 0.0, **options}
    return Drain(house, model, **given)


def test_nothing_is_refused_before_every_front_knows() -> None:
    async def check() -> None:
        house = FakeHouse()
        one = drain(house)
        running = asyncio.create_task(one.run())
        await asyncio.sleep(0.05)
        assert (one.state, house.told) == ("announced", ["announce"])
        house.fronts_know.set()
        await running
        assert house.told == ["announce", "fronts know", "close None False: it drains"]
        assert (one.state, one.ended) == ("drained", 0)

    asyncio.run(check())


def test_what_outlives_the_grace_is_ended_with_a_word() -> None:
    async def check() -> None:
        house = FakeHouse(looks=10**9)
        house.fronts_know.set()
        one = drain(house, "m", grace_s=0.05)
        await one.run()
        assert house.told[-1] == "cancel r0: it drains, and this request did not finish in time"
        assert (one.ended, one.grace_left_s) == (1, 0.0)

    asyncio.run(check())


def test_a_hurry_ends_the_notice_and_the_grace() -> None:
    async def check() -> None:
        house, hurry = FakeHouse(looks=10**9), asyncio.Event()
        house.fronts_know.set()
        one = drain(house, grace_s=1e6, notice_s=1e6, hurry=hurry)
        running = asyncio.create_task(one.run())
        await asyncio.sleep(0.05)
        assert one.state == "announced"
        hurry.set()
        await running
        assert one.ended == 1

    asyncio.run(check())


def test_a_clock_that_somebody_sets_changes_nothing_of_how_long_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(time=lambda: 1e9, monotonic=lambda: 100.0)
    monkeypatch.setattr("appliance.core.drains.time", clock)
    house = FakeHouse()
    house.fronts_know.set()
    one, other = drain(house), drain(house)
    clock.time, clock.monotonic = lambda: 5.0, lambda: 107.0
    later = drain(house)
    later.replaces(one)
    for each in (one, later):
        assert (each.elapsed_s, each.started_at) == (7.0, 1e9)
    asyncio.run(other.run())
    clock.monotonic = lambda: 110.0
    assert (other.state, other.elapsed_s, one.elapsed_s) == ("drained", 7.0, 10.0)


def test_a_drain_in_the_place_of_another_does_not_begin_again() -> None:
    async def check() -> None:
        house = FakeHouse(looks=10**9)
        house.fronts_know.set()
        drains = Drains(house)
        first = drain(house, "m", grace_s=1e6)
        drains.begin(first)
        await asyncio.sleep(0.05)
        assert first.state == "draining"
        second = drain(house, "m", grace_s=0.0, hold=True)
        drains.begin(second)
        await asyncio.sleep(0.1)
        assert (second.state, second.started_at) == ("drained", first.started_at)
        assert house.told[2:] == [
            "close m False: it drains",
            "close m True: it drains",
            "cancel r0: it drains, and this request did not finish in time",
        ]
        assert list(drains) == [second]
        with pytest.raises(DrainError, match="the service is not draining; model 'm' is"):
            drains.end(None)
        assert drains.end("m") is second
        assert house.told[-1] == "open m"
        with pytest.raises(DrainError, match="model 'm' is not draining; nothing is"):
            drains.end("m")

    asyncio.run(check())
