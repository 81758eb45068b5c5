"""Tests of sleeping and waking versions with simulated replicas and fronts."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.models.load_errors import LoadError, MemoryShortageError
from tests.models.test_operations import WITHIN_S, World, run


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.control.close()


def test_a_version_sleeps_and_wakes_and_is_not_loaded_again_at_the_next_start(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        await world.operations.sleep(world.version(1), WITHIN_S)
        assert world.operations.asleep == {"chat@1"} and world.unit == ""
        assert world.version(1).loaded_at is None
        await world.operations.sleep(world.version(1), WITHIN_S)  # it is already asleep
        world.fronts.routes.clear()
        await world.operations.wake(world.version(1))
        # Requests wait in the fronts until the version is awake.
        assert world.fronts.routes == [{"chat": ""}, {"chat": "chat@1"}]
        assert not world.operations.asleep and world.version(1).loaded_at is not None
        await world.operations.wake(world.version(1))  # it is already awake
        assert world.manager.history == ["load chat@1", "sleep chat@1", "wake chat@1"]

    run(scenario)


def test_a_version_sleeps_only_when_its_requests_have_finished(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        world.fronts.preparing.add("chat@1")
        sleeping = asyncio.ensure_future(world.operations.sleep(world.version(1), WITHIN_S))
        await asyncio.sleep(0.1)
        assert world.unit == "" and world.operations.draining == {"chat@1"}
        world.manager.busy.add("chat@1")
        world.fronts.preparing.clear()
        await asyncio.sleep(0.1)
        assert world.manager.history == ["load chat@1"]
        world.manager.busy.clear()
        await sleeping
        assert world.manager.history == ["load chat@1", "sleep chat@1"]
        assert not world.operations.draining

    run(scenario)


def test_a_version_stays_awake_if_its_requests_do_not_finish(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        world.manager.busy.add("chat@1")
        with pytest.raises(LoadError, match=r"chat@1 stays awake: its requests did not finish within 0\.1 s"):
            await world.operations.sleep(world.version(1), 0.1)
        assert world.unit == "chat@1" and not world.operations.asleep and not world.operations.draining

    run(scenario)


def test_a_version_whose_replicas_cannot_sleep_stays_awake(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        world.manager.stuck = "no host memory"
        with pytest.raises(LoadError, match="chat@1 stays awake: no host memory"):
            await world.operations.sleep(world.version(1), WITHIN_S)
        assert world.unit == "chat@1" and world.version(1).loaded_at is not None
        assert world.manager.history == ["load chat@1", "sleep chat@1", "wake chat@1"]

    run(scenario)


def test_a_version_that_cannot_wake_stays_asleep_and_can_be_woken_later(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        await world.operations.sleep(world.version(1), WITHIN_S)
        world.manager.stuck = "no device memory"
        with pytest.raises(MemoryShortageError, match="chat@1 stays asleep: no device memory"):
            await world.operations.wake(world.version(1))
        assert world.operations.asleep == {"chat@1"} and world.unit == ""
        world.manager.stuck = ""
        await world.operations.wake(world.version(1))
        assert world.unit == "chat@1"

    run(scenario)


def test_a_request_to_wake_keeps_a_version_awake_whose_requests_are_still_finishing(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        world.manager.busy.add("chat@1")
        sleeping = asyncio.ensure_future(world.operations.sleep(world.version(1), WITHIN_S))
        await world.until(lambda: world.unit == "")
        await world.operations.wake(world.version(1))
        assert world.unit == "chat@1" and world.manager.history == ["load chat@1"]
        with pytest.raises(LoadError, match="cancelled"):
            await sleeping

    run(scenario)


def test_loading_a_sleeping_version_wakes_it_and_unloading_it_ends_it(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        await world.operations.sleep(world.version(1), WITHIN_S)
        await world.operations.load(world.version(1))
        assert world.unit == "chat@1"
        await world.operations.sleep(world.version(1), WITHIN_S)
        await world.operations.unload(world.version(1), WITHIN_S)
        assert not world.operations.asleep and not world.manager.models
        assert world.manager.history == [
            *("load chat@1", "sleep chat@1", "wake chat@1", "sleep chat@1", "unload chat@1"),
        ]
        with pytest.raises(LoadError, match="chat@1 is not asleep; load it with"):
            await world.operations.wake(world.version(1))
        with pytest.raises(LoadError, match="chat@1 is not loaded; load it first"):
            await world.operations.sleep(world.version(1), WITHIN_S)

    run(scenario)


def test_a_swap_to_a_sleeping_version_wakes_it(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        await world.operations.load(world.version(2))
        await world.operations.sleep(world.version(2), WITHIN_S)
        await world.make_default(2)
        assert world.unit == "chat@2" and not world.operations.asleep
        assert "wake chat@2" in world.manager.history

    run(scenario)


def test_several_requests_wake_a_version_once(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        await world.operations.sleep(world.version(1), WITHIN_S)
        await asyncio.gather(*(world.operations.wake(world.version(1)) for _ in range(5)))
        assert world.manager.history.count("wake chat@1") == 1 and world.unit == "chat@1"

    run(scenario)


def test_a_version_that_is_waking_sleeps_afterwards(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        await world.operations.sleep(world.version(1), WITHIN_S)
        waking = asyncio.ensure_future(world.operations.wake(world.version(1)))
        await asyncio.sleep(0)
        assert "chat@1" in world.operations.wakes
        await world.operations.sleep(world.version(1), WITHIN_S)
        await waking
        assert world.operations.asleep == {"chat@1"}
        assert world.manager.history[1:] == ["sleep chat@1", "wake chat@1", "sleep chat@1"]

    run(scenario)


def test_a_version_that_is_awake_has_not_failed(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        await world.operations.sleep(world.version(1), WITHIN_S)
        world.operations.note_failure(world.version(1), "it must not be loaded together with another model")
        await world.operations.wake(world.version(1))
        assert world.routing.answers("chat@1") and world.routing.routes()[0].listed

    run(scenario)
