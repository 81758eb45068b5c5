"""Tests of models that sleep instead of being unloaded, with simulated replicas and a simulated clock."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from appliance.models.load_errors import LoadError
from appliance.settings import GroupSettings, Settings
from tests.models.on_demand_site import Site, optional, play, quick, sleepy  # noqa: F401


def test_a_model_whose_memory_is_needed_sleeps_and_its_next_request_wakes_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = Site(tmp_path, sleepy(a=optional(), b=optional()))

    async def scenario() -> None:
        await site.exchange("a", "b")
        assert not site.on_demand.stats("a").in_memory and site.on_demand.expires_at("a") is None
        assert site.on_demand.stats("a").evictions["memory"] == 1
        site.ask("a")
        await site.loaded("a")
        assert site.manager.history == ["load a", "sleep a", "load b", "sleep b", "wake a"]

    with caplog.at_level("INFO"):
        play(site, scenario)
    assert "loading b because requests are waiting for b" in caplog.messages
    assert "waking a because requests are waiting for a" in caplog.messages


def test_a_command_keeps_a_version_asleep_that_sleeps_without_one(tmp_path: Path) -> None:
    site = Site(tmp_path, sleepy())
    version = site.version(1)

    async def scenario() -> None:
        await site.operations.load(version)
        site.manager.park("chat@1", asleep=True)
        await site.operations.sleep(version, 60.0)
        assert site.operations.asleep == {"chat@1"} and site.manager.parked_host_bytes() == {}
        assert not site.routing.unit_of("chat") and site.version(1).loaded_at is None
        await site.on_demand.load(version)
        assert site.routing.unit_of("chat") == "chat@1"
        assert site.manager.history == ["load chat@1", "sleep chat@1", "wake chat@1"]
        site.manager.park("chat@1")
        with pytest.raises(LoadError, match="chat@1 is not loaded; load it first"):
            await site.operations.sleep(version, 60.0)

    play(site, scenario)


def test_a_version_that_was_unloaded_without_a_command_cannot_be_woken(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())
    version = site.version(1)

    async def scenario() -> None:
        await site.operations.load(version)
        await site.operations.wake(version)  # it is awake
        site.manager.park("chat@1")
        with pytest.raises(LoadError, match="chat@1 is not asleep; load it with: appliance models load"):
            await site.operations.wake(version)
        assert site.manager.history == ["load chat@1", "park chat@1"]

    play(site, scenario)


def test_a_version_that_sleeps_because_of_a_command_is_not_in_memory(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())

    async def scenario() -> None:
        await site.operations.load(site.version(1))
        assert site.on_demand.stats("chat@1").in_memory
        await site.operations.sleep(site.version(1), 60.0)
        assert not site.on_demand.stats("chat@1").in_memory

    play(site, scenario)


def test_a_model_sleeps_at_the_end_of_its_time_to_live(tmp_path: Path) -> None:
    site = Site(tmp_path, sleepy(a=optional(idle_unload_s=60.0)))

    async def scenario() -> None:
        await site.serve("a")
        await site.until(lambda: site.manager.is_parked("a"), "the end of the time to live", 5.0)
        ended = site.now
        await site.until(lambda: site.now > ended + 1200.0, "the time after which models are forgotten", 20.0)
        assert site.manager.history[-1] == "sleep a"

    play(site, scenario)


def test_models_on_the_cpu_do_not_sleep(tmp_path: Path) -> None:
    site = Site(tmp_path, sleepy(a=optional(), b=optional()))
    site.manager.on_gpus = False

    async def scenario() -> None:
        await site.exchange("a", "b")
        assert site.manager.history == ["load a", "park a", "load b"]

    play(site, scenario)


def test_the_least_recently_used_sleeping_model_is_unloaded_at_the_limit(tmp_path: Path) -> None:
    site = Site(tmp_path, sleepy(**{name: optional() for name in "abcd"}))

    async def scenario() -> None:
        for name in "abcd":
            await site.serve(name)
            await site.until(lambda end=site.now + 20.0: site.now > end, "the minimum residence")
        assert site.manager.asleep == {"b", "c"}
        assert site.manager.history[-3:] == ["park a", "sleep c", "load d"]
        site.settings = sleepy(1, **site.settings.models)
        await site.until(lambda: site.manager.asleep == {"c"}, "the lower limit to apply")

    play(site, scenario)


def test_a_sleeping_model_that_is_about_to_wake_is_not_unloaded_at_the_limit(tmp_path: Path) -> None:
    site = Site(tmp_path, sleepy(1, a=optional(), b=optional()))

    async def scenario() -> None:
        await site.exchange("a", "b")
        site.ask("a")
        await site.loaded("a")
        assert site.manager.history == ["load a", "sleep a", "load b", "park b", "wake a"]

    play(site, scenario)


def test_sleeping_models_are_unloaded_if_the_memory_that_they_still_hold_is_needed(tmp_path: Path) -> None:
    site = Site(tmp_path, sleepy(a=optional(), b=optional()))
    site.manager.held = True

    async def scenario() -> None:
        await site.exchange("a", "b")
        assert site.manager.history == ["load a", "sleep a", "park a", "load b"]
        assert site.on_demand.stats("a").evictions["memory"] == 1

    play(site, scenario)


def test_a_sleeping_model_that_cannot_wake_is_loaded_again(tmp_path: Path) -> None:
    site = Site(tmp_path, sleepy(a=optional(), b=optional()))
    site.manager.cannot_wake = True

    async def scenario() -> None:
        await site.exchange("a", "b")
        site.ask("a")
        await site.loaded("a")
        assert site.manager.history[2:] == ["load b", "park a", "sleep b", "load a"]

    play(site, scenario)


@pytest.mark.parametrize("busy", [False, True])
def test_a_command_loads_a_sleeping_model_on_other_gpus_if_it_cannot_wake(tmp_path: Path, busy: bool) -> None:
    site = Site(tmp_path, sleepy(a=optional(), b=optional()))
    site.manager.cannot_wake = True

    async def scenario() -> None:
        await site.exchange("a", "b")
        if busy:
            site.ask("b")
        loading = asyncio.ensure_future(site.on_demand.load_declared("a"))
        await site.until(loading.done, "the load")
        if busy:  # there is no memory on other GPUs either
            with pytest.raises(LoadError, match="a does not fit alongside the models that are loaded"):
                await loading
            assert site.manager.history[2:] == ["load b"] and site.manager.asleep == {"a"}
        else:
            await loading
            assert site.manager.history[2:] == ["load b", "park a", "sleep b", "load a"]

    play(site, scenario)


def test_a_sleeping_version_that_can_only_be_loaded_on_other_gpus_becomes_the_default_without_interruption(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path, Settings())
    site.manager.cannot_wake, site.manager.capacity = True, 2

    async def scenario() -> None:
        await site.operations.load(site.version(1))
        await site.operations.introduce(site.version(2))
        site.manager.park("chat@2", asleep=True)
        await site.make_default(2)
        await site.until(lambda: "chat@1" not in site.manager.models, "the end of the former version")
        assert site.manager.history[2:] == ["park chat@2", "load chat@2", "unload chat@1"]

    play(site, scenario)


def test_only_models_on_the_same_gpus_leave_for_a_model_that_wakes(tmp_path: Path) -> None:
    site = Site(tmp_path, sleepy(a=optional(), b=optional(), c=optional()))
    site.manager.gpus = {"a": [0], "b": [1], "c": [0]}
    site.manager.capacity = 2

    async def scenario() -> None:
        await site.exchange("b", "c")
        site.ask("a")
        await site.loaded("a")
        assert site.manager.history[2:] == ["sleep a", "load c", "sleep c", "wake a"]

    play(site, scenario)


def test_a_model_that_must_not_wake_beside_a_pinned_model_stays_asleep(tmp_path: Path) -> None:
    groups = {"rivals": GroupSettings(models=["a", "b"], load="one")}
    settings = msgspec.structs.replace(sleepy(a=optional(), b=optional(pinned=True)), groups=groups)
    site = Site(tmp_path, settings)
    site.manager.capacity = 9

    async def scenario() -> None:
        await site.exchange("a", "b")
        site.ask("a")
        await site.until(lambda: site.traffic("a").failure is not None, "the refusal")
        assert site.manager.history == ["load a", "sleep a", "load b"]

    play(site, scenario)


def test_a_sleeping_model_does_not_keep_another_model_of_its_group_from_loading(tmp_path: Path) -> None:
    groups = {"rivals": GroupSettings(models=["a", "b"], load="one")}
    settings = msgspec.structs.replace(sleepy(a=optional(), b=optional()), groups=groups)
    site = Site(tmp_path, settings)
    site.manager.capacity = 9

    async def scenario() -> None:
        await site.exchange("a", "b")
        assert site.manager.history == ["load a", "sleep a", "load b"]

    play(site, scenario)
