"""Tests of commands and requests that arrive while models are being unloaded or parked, with simulated
replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from appliance.models import on_demand
from appliance.models.load_errors import LoadError
from appliance.settings import GroupSettings, ModelSettings, Settings
from appliance.traffic.admission_pauses import AdmissionPause
from tests.models.on_demand_site import Site, optional, play, sleepy


def test_a_sleeping_model_with_waiting_requests_is_not_unloaded_so_that_an_idle_one_can_sleep(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, sleepy(1, a=optional(), b=optional()))

    async def scenario() -> None:
        await site.exchange("a", "b")
        async with site.on_demand._changing:
            site.ask("a")
            await site.on_demand._evict(("b",), "idle", "its time to live has expired")
            assert site.manager.history == ["load a", "sleep a", "load b", "park b"]

    play(site, scenario)


@pytest.mark.parametrize("command", ["unload", "require"])
def test_a_model_does_not_leave_the_memory_if_a_command_changes_it_while_another_is_unloaded(
    tmp_path: Path, command: str
) -> None:
    site = Site(tmp_path, sleepy(1, a=optional(), b=optional()))
    manager = site.manager

    async def scenario() -> None:
        await site.exchange("a", "b")
        park = manager.park

        def park_slowly(unit: str, *, asleep: bool = False) -> None:
            """Park a unit slowly, so that a command changes `b` in the meantime."""
            park(unit, asleep=asleep)
            if command == "unload":
                del manager.models["b"], manager.settings["b"]
            else:
                manager.settings["b"] = ModelSettings(folder="/")

        async with site.on_demand._changing:
            manager.park = park_slowly  # type: ignore[method-assign]
            await site.on_demand._evict(("b",), "idle", "its time to live has expired")
            assert manager.history == ["load a", "sleep a", "load b", "park a"]

    play(site, scenario)


def test_a_sleeping_model_that_a_command_unloads_is_not_unloaded_again_at_the_limit(tmp_path: Path) -> None:
    site = Site(tmp_path, sleepy(2, **{name: optional() for name in "abc"}))
    manager = site.manager

    async def scenario() -> None:
        for name in "abc":
            await site.serve(name)
            await site.until(lambda end=site.now + 20.0: site.now > end, "the minimum residence")
        assert manager.asleep == {"a", "b"}
        park = manager.park

        def park_slowly(unit: str, *, asleep: bool = False) -> None:
            """Park a unit slowly, so that a command unloads `b` in the meantime."""
            park(unit, asleep=asleep)
            manager.asleep.discard("b")
            del manager.models["b"], manager.settings["b"]

        async with site.on_demand._changing:
            manager.park = park_slowly  # type: ignore[method-assign]
            await site.on_demand._sleep_limit.unload_down_to(0)
            assert manager.history[-1] == "park a" and "park b" not in manager.history

    play(site, scenario)


@pytest.mark.parametrize("fits", [True, False])
def test_a_load_that_begins_while_the_fronts_read_the_tokenizer_ends_in_a_consistent_state(
    tmp_path: Path, fits: bool
) -> None:
    site = Site(tmp_path, Settings())
    unit, operations, may_read = "chat@1", site.operations, asyncio.Event()
    site.manager.capacity = int(fits)

    async def applied(timeout_s: float) -> bool:
        await may_read.wait()
        return True

    async def scenario() -> None:
        site.fronts.applied = applied  # type: ignore[method-assign]
        introduction = asyncio.create_task(operations.introduce(site.version(1)))
        await site.until(lambda: unit in site.manager.models, "the introduction")
        load = asyncio.create_task(operations.load(site.version(1)))
        await asyncio.wait([load], timeout=0.2)
        may_read.set()
        await introduction
        if fits:
            await load
        else:
            with pytest.raises(LoadError, match="there is no room"):
                await load
        assert site.manager.loaded(unit) is fits
        assert unit in site.routing.usable and site.routing.names_of(unit) == ["chat"]

    play(site, scenario)


def test_a_second_introduction_does_not_park_a_model_that_is_being_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = Site(tmp_path, Settings())
    unit, operations = "chat@2", site.operations
    described, may_end, calls = operations._described, asyncio.Event(), list[str]()

    async def second_is_slow(*arguments: Any) -> Any:
        calls.append(unit)
        if len(calls) == 2:
            await may_end.wait()
        return await described(*arguments)

    monkeypatch.setattr(operations, "_described", second_is_slow)

    async def scenario() -> None:
        first, second = (asyncio.create_task(operations.introduce(site.version(2))) for _ in range(2))
        await first
        await operations.bring_back(unit)
        may_end.set()
        await second
        assert site.manager.loaded(unit)

    play(site, scenario)


def test_a_load_waits_until_a_load_on_demand_has_ended(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())
    unit, operations = "chat@2", site.operations

    async def scenario() -> None:
        await operations.introduce(site.version(2))
        site.manager.slow.add(unit)
        first = asyncio.create_task(operations.bring_back(unit))
        await site.until(lambda: unit in site.manager.returning, "the load on demand")
        load = asyncio.create_task(operations.load(site.version(2)))
        await asyncio.wait([load], timeout=0.2)
        assert not load.done()
        site.manager.slow.clear()
        await first
        await load
        assert site.manager.loaded(unit)

    play(site, scenario)


def test_a_load_fails_if_the_model_is_unloaded_in_the_meantime(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())
    unit, operations = "chat@2", site.operations

    async def scenario() -> None:
        await operations.introduce(site.version(2))
        site.manager.slow.add(unit)
        load = asyncio.create_task(operations.load(site.version(2)))
        await site.until(lambda: unit in site.manager.returning, "the load")
        site.manager.park(unit)
        with pytest.raises(LoadError, match="chat@2 was unloaded while it was being loaded"):
            await load

    play(site, scenario)


def test_a_model_that_a_swap_loads_is_not_unloaded_for_another_one(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())
    unit, manager = "chat@2", site.manager

    async def scenario() -> None:
        for number in (1, 2):
            await site.operations.introduce(site.version(number))
        manager.slow.add(unit)
        load = asyncio.create_task(site.operations.load(site.version(2)))
        await site.until(lambda: unit in manager.returning, "the load")
        site.ask("chat@1")
        end = site.now + 60.0
        await site.until(lambda: site.now > end, "the minimum residence")
        assert f"park {unit}" not in manager.history
        manager.slow.clear()
        await load
        await site.loaded("chat@1")
        assert manager.history == [f"load {unit}", f"park {unit}", "load chat@1"]

    play(site, scenario)


def test_a_drained_version_is_not_forgotten_until_it_accepts_requests_again(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())
    pauses, unit = site.requests.state.pauses, "chat@2"

    async def scenario() -> None:
        await site.operations.introduce(site.version(2))
        pauses.begin(unit, AdmissionPause("model 'chat@2' is draining"))
        end = site.now + 2 * on_demand._FORGET_S
        await site.until(lambda: site.now > end, "the time after which versions are forgotten")
        assert unit in site.manager.models
        pauses.end(unit)
        await site.until(lambda: unit not in site.manager.models, "the end of the version")

    play(site, scenario)


def test_a_group_that_is_removed_during_its_load_leaves_no_work(tmp_path: Path) -> None:
    models = {"a": optional(), "b": optional()}
    group = GroupSettings(models=["a", "b"], load="all")
    site = Site(tmp_path, Settings(models=models, groups={"g": group}))
    site.manager.capacity = 2
    site.manager.slow.add("b")

    async def scenario() -> None:
        site.ask("a")
        await site.until(lambda: "b" in site.manager.returning, "the load of b")
        site.settings = Settings(models=models)
        site.manager.slow.clear()
        site.answer("a")
        await site.loaded("b")
        await site.until(lambda: not site.on_demand._has_work(), "the end of the work")

    play(site, scenario)
