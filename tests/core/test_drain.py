"""Tests of the order of steps in a drain: fronts report "not ready", then admission pauses, then the drain
waits, and finally the remaining requests are cancelled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.drains import Drain, DrainError, Drains, DrainTools
from tests.waiting import until


class FakeRequestManager:
    """A fake request manager that reports one fewer running request with each call."""

    def __init__(self, told: list[str], looks: int) -> None:
        self.told, self.looks = told, looks
        self.state = self
        """The fake request manager also serves as its own `state` attribute."""

    def pause_admission(self, model: str | None, reason: str, *, hold: bool = False) -> None:
        self.told.append(f"close {model} {hold}: {reason}")

    def resume_admission(self, model: str | None) -> None:
        self.told.append(f"open {model}")

    def unfinished(self, model: str | None = None) -> list[Any]:
        self.looks -= 1
        return [Unfinished()] if self.looks > 0 else []

    def finished(self, model: str | None = None) -> bool:
        return not self.unfinished(model)


class Unfinished:
    request_id = "r0"


class FakeService:
    """A fake service that records the calls made by drains. Once `fronts_know` is set, it reports that all
    fronts have applied the configuration."""

    def __init__(self, looks: int = 3) -> None:
        self.told: list[str] = []
        self.requests: Any = FakeRequestManager(self.told, looks)
        self.fronts_know = asyncio.Event()
        self.tools = DrainTools(self.requests, self, self.cancel)

    def publish_configuration(self) -> None:
        self.told.append("publish")

    async def applied(self, timeout_s: float) -> bool:
        self.told.append("announce")
        await self.fronts_know.wait()
        self.told.append("fronts know")
        return True

    def cancel(self, request_id: str, message: str) -> bool:
        self.told.append(f"cancel {request_id}: {message}")
        self.requests.looks = 0
        return True


def drain(service: FakeService, model: str | None = None, **options: Any) -> Drain:
    given = {"reason": "it drains", "grace_s": 60.0, "notice_s": 0.0, **options}
    return Drain(service.tools, model, **given)


def test_nothing_is_refused_before_every_front_has_applied_the_drain() -> None:
    async def check() -> None:
        service = FakeService()
        one = drain(service)
        running = asyncio.create_task(one.run())
        await until(lambda: bool(service.told))
        assert (one.state, service.told) == ("announced", ["announce"])
        service.fronts_know.set()
        await running
        assert service.told == ["announce", "fronts know", "close None False: it drains"]
        assert (one.state, one.ended) == ("drained", 0)

    asyncio.run(check())


def test_requests_that_outlast_the_grace_period_are_ended_with_an_error() -> None:
    async def check() -> None:
        service = FakeService(looks=10**9)
        service.fronts_know.set()
        one = drain(service, "m", grace_s=0.05)
        await one.run()
        assert (
            service.told[-1]
            == "cancel r0: it drains, and this request did not finish within the grace period"
        )
        assert (one.ended, one.grace_left_s) == (1, 0.0)

    asyncio.run(check())


def test_hurry_ends_the_notice_period_and_the_grace_period() -> None:
    async def check() -> None:
        service, hurry = FakeService(looks=10**9), asyncio.Event()
        service.fronts_know.set()
        one = drain(service, grace_s=1e6, notice_s=1e6, hurry=hurry)
        running = asyncio.create_task(one.run())
        await asyncio.sleep(0.05)
        assert one.state == "announced"
        hurry.set()
        await running
        assert one.ended == 1

    asyncio.run(check())


def test_a_change_of_the_time_of_day_does_not_change_durations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = SimpleNamespace(time=lambda: 1e9, monotonic=lambda: 100.0)
    monkeypatch.setattr("appliance.core.drains.time", clock)
    service = FakeService()
    service.fronts_know.set()
    one, other = drain(service), drain(service)
    clock.time, clock.monotonic = lambda: 5.0, lambda: 107.0
    later = drain(service)
    later.replaces(one)
    for each in (one, later):
        assert (each.elapsed_s, each.started_at) == (7.0, 1e9)
    asyncio.run(other.run())
    clock.monotonic = lambda: 110.0
    assert (other.state, other.elapsed_s, one.elapsed_s) == ("drained", 7.0, 10.0)


def test_a_drain_that_replaces_another_one_continues_it() -> None:
    async def check() -> None:
        service = FakeService(looks=10**9)
        service.fronts_know.set()
        settings: Any = SimpleNamespace(drain_notice_s=0.0)
        drains = Drains(service.tools, lambda: settings, lambda: ["m"])
        first = drains.begin("m", grace_s=1e6, hold=False)
        await until(lambda: first.state == "draining")
        second = drains.begin("m", grace_s=0.0, hold=True)
        await until(lambda: second.state == "drained")
        assert second.started_at == first.started_at
        reason = "model 'm' is draining"
        assert service.told[2:] == [
            f"close m False: {reason}",
            f"close m True: {reason}",
            f"cancel r0: {reason}, and this request did not finish within the grace period",
        ]
        assert list(drains) == [second]
        with pytest.raises(DrainError, match="the service is not draining; active drains: model 'm'"):
            drains.resume(None)
        assert drains.resume("m") is second
        assert service.told[-2:] == ["open m", "publish"]
        with pytest.raises(DrainError, match="model 'm' is not draining; active drains: none"):
            drains.resume("m")
        with pytest.raises(DrainError, match="unknown model 'n'; available models: m"):
            drains.begin("n", grace_s=0.0, hold=False)
        drains.begin("m", grace_s=1e6, hold=False)
        drains.forget("m")
        assert list(drains) == [] and service.told[-1] == "publish", "admission stays paused"

    asyncio.run(check())
