"""Tests of loading on demand with simulated replicas, fronts and requests, and a simulated clock."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path

import pytest

from appliance.models import on_demand, restarts
from appliance.models.load_errors import LoadError
from appliance.settings import GroupSettings, Settings
from tests.models.on_demand_site import Site, optional, play, quick  # noqa: F401


def test_a_version_is_announced_on_demand_and_loaded_and_forgotten_when_unused(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())

    async def scenario() -> None:
        [route] = site.routing.routes()
        assert (route.unit, route.on_demand, route.listed) == ("", True, True)
        site.on_demand.wanted("chat")
        site.on_demand.wanted("chat")
        await site.until(lambda: site.routing.unit_of("chat") == "chat@1", "the introduction")
        assert site.manager.history == []
        site.ask("chat@1", keep_alive_s=60.0)
        await site.loaded("chat@1")
        site.answer("chat@1")
        ended = site.now
        await site.until(lambda: site.manager.is_parked("chat@1"), "the end of the time to live", 5.0)
        assert site.now >= ended + 60.0 and site.routing.unit_of("chat") == "chat@1"
        await site.until(lambda: "chat@1" not in site.manager.models, "the tokenizer's removal", 20.0)
        assert site.now >= ended + 600.0
        assert site.on_demand.stats("chat@1").evictions["idle"] == 1
        [route] = site.routing.routes()
        assert (route.unit, route.on_demand) == ("", True)

    play(site, scenario)


def test_the_next_turn_comes_late_unless_a_request_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_IDLE_POLL_S", 3600.0)
    site, turns = Site(tmp_path, Settings()), itertools.count()
    turn = site.on_demand._turn

    async def counted() -> None:
        next(turns)
        await turn()

    monkeypatch.setattr(site.on_demand, "_turn", counted)

    async def scenario() -> None:
        site.on_demand.wanted("chat")
        await site.until(lambda: site.routing.unit_of("chat") == "chat@1", "the introduction")
        await asyncio.sleep(0.2)
        assert next(turns) <= 2
        site.ask("chat@1")
        await site.loaded("chat@1")

    play(site, scenario)


def test_a_tenant_does_not_unload_a_model_that_another_tenant_uses(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings(models={"a": optional(idle_unload_s=60.0)}))

    async def scenario() -> None:
        site.ask("a", "acme")
        await site.loaded("a")
        site.answer("a", "acme")
        ended = site.now
        site.ask("a", "other", keep_alive_s=0.0)
        site.answer("a", "other")
        await site.until(lambda: site.manager.is_parked("a"), "the end of the time to live")
        assert ended + 60.0 <= site.now < ended + 120.0
        # Tenant "acme" no longer uses the model, so the model is unloaded when tenant "other"'s `keep_alive`
        # expires.
        site.ask("a", "other", keep_alive_s=0.0)
        await site.loaded("a")
        site.answer("a", "other")
        ended = site.now
        await site.until(lambda: site.manager.is_parked("a"), "the second end")
        assert site.now < ended + 60.0

    play(site, scenario)


def test_a_failed_load_refuses_requests_for_a_while_and_is_then_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_RETRY_S", 0.5)
    site = Site(tmp_path, Settings())
    fail_model = site.requests.fail_model

    def fail_once(unit: str, reason: str) -> None:
        fail_model(unit, reason)
        site.manager.broken.clear()

    async def scenario() -> None:
        site.on_demand.wanted("chat")
        await site.until(lambda: site.routing.unit_of("chat") == "chat@1", "the introduction")
        site.manager.broken.add("chat@1")
        site.requests.fail_model = fail_once
        site.ask("chat@1")
        await site.until(lambda: bool(site.requests.refused_s), "the end of the refusals")
        assert len(site.requests.refusals) == 1 and "the weights are broken" in site.requests.refusals[0]
        assert site.requests.refused_s[0] > 0.49 and site.traffic("chat@1").failure is None
        assert site.manager.is_parked("chat@1")
        assert not site.routing.routes()[0].listed
        site.ask("chat@1")
        await site.loaded("chat@1")
        await site.until(lambda: site.routing.routes()[0].listed, "the listing")

    play(site, scenario)


def test_a_second_failure_refuses_requests_for_the_whole_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_demand, "_RETRY_S", 0.5)
    site = Site(tmp_path, Settings())

    async def scenario() -> None:
        await site.operations.introduce(site.version(1))
        site.on_demand._fail("chat@1", "the weights are broken")
        await asyncio.sleep(0.3)
        site.on_demand._repaired("chat@1")
        site.on_demand._fail("chat@1", "the weights are broken again")
        await site.until(lambda: len(site.requests.refused_s) == 2, "the end of the refusals")
        assert site.requests.refused_s[1] > 0.49

    play(site, scenario)


@pytest.mark.parametrize("by_command", [True, False])
def test_a_change_of_its_files_ends_the_failure_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by_command: bool
) -> None:
    monkeypatch.setattr(restarts, "WATCH_S", 0.02)
    monkeypatch.setattr(on_demand, "_RETRY_S", 3600.0)
    site = Site(tmp_path, Settings())

    async def scenario() -> None:
        site.manager.broken.add("chat@1")
        if by_command:
            with pytest.raises(LoadError, match="the weights are broken"):
                await site.on_demand.load(site.version(1))
        else:
            site.on_demand.wanted("chat")
            await site.until(lambda: site.routing.unit_of("chat") == "chat@1", "the introduction")
            site.ask("chat@1")
        await site.until(lambda: "chat@1" in site.routing.failures, "the failure")
        site.manager.broken.clear()
        await asyncio.sleep(0.1)
        assert not site.routing.routes()[0].listed

        def copied_again() -> bool:
            """Change the file's time, which may happen before the watch has read it, and look again."""
            os.utime(site.folders[0] / "config.json", (0, next(times)))
            return site.routing.routes()[0].listed

        times = itertools.count()
        await site.until(copied_again, "the listing")
        if by_command:
            await site.loaded("chat@1")
        else:
            assert site.traffic("chat@1").failure is None and site.manager.is_parked("chat@1")

    play(site, scenario)


def test_an_unload_cancels_every_load_of_the_version_also_one_that_waits(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())

    async def scenario() -> None:
        site.manager.capacity = 2
        site.manager.slow.add("chat@1")
        first, second = site.version(1), site.version(2)
        loads = [asyncio.ensure_future(site.on_demand.load(one)) for one in (first, first, second)]
        await site.until(lambda: "chat@1" in site.manager.models, "the first load")
        assert site.on_demand.is_loading("chat@1") and site.on_demand.is_loading("chat@2")
        for record in (second, first):
            await site.on_demand.unload(record, 0.0)
        for load in loads:
            with pytest.raises(LoadError, match="cancelled"):
                await load
        await asyncio.sleep(0.1)
        assert site.manager.history == ["load chat@1", "unload chat@1"]

    play(site, scenario)


def test_optional_models_of_the_settings_are_loaded_at_startup_as_far_as_they_fit(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings(models={name: optional() for name in "abc"}))
    site.manager.capacity = 2

    async def scenario() -> None:
        await site.loaded("b")
        assert site.manager.history == ["load a", "load b"] and site.manager.is_parked("c")
        site.ask("c")
        await site.loaded("c")
        assert site.manager.history == ["load a", "load b", "park a", "load c"]

    play(site, scenario)


def test_a_command_loads_an_optional_model_of_the_settings(tmp_path: Path) -> None:
    site = Site(
        tmp_path, Settings(models={name: optional() for name in "ab"} | {"kept": optional(pinned=True)})
    )
    site.manager.capacity = 2

    async def scenario() -> None:
        await site.loaded("b")
        await site.serve("kept")
        loaded = [one for one in "ab" if site.manager.loaded(one)]
        [parked] = {"a", "b"} - set(loaded)
        loading = asyncio.ensure_future(site.on_demand.load_declared(parked))
        await site.until(loading.done, "the load")
        await loading
        assert site.manager.loaded(parked) and site.manager.is_parked(loaded[0])
        # a model that has requests is not unloaded to make room for the model that a command loads
        site.ask(parked)
        loading = asyncio.ensure_future(site.on_demand.load_declared(loaded[0]))
        await site.until(loading.done, "the refusal")
        with pytest.raises(LoadError, match="does not fit alongside the models that are loaded"):
            await loading

    play(site, scenario)


def test_a_command_unloads_idle_models_to_free_memory_but_no_pinned_ones(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings(models={"a": optional(), "b": optional(pinned=True)}))
    site.manager.capacity = 2

    async def scenario() -> None:
        await site.loaded("b")
        loading = asyncio.ensure_future(site.on_demand.load(site.version(1)))
        await site.until(loading.done, "the load")
        await loading
        assert site.manager.is_parked("a") and site.manager.loaded("b")
        assert site.manager.loaded("chat@1")
        assert site.on_demand.expires_at("b") is None

    play(site, scenario)


def test_models_that_must_be_loaded_together_are_loaded_and_unloaded_together(tmp_path: Path) -> None:
    groups = {"pair": GroupSettings(models=["a", "chat"], load="all")}
    site = Site(tmp_path, Settings(models={"a": optional(), "b": optional()}, groups=groups))
    site.manager.capacity = 2

    async def scenario() -> None:
        await site.loaded("chat@1")
        assert site.manager.history == ["load a", "load chat@1"]
        site.ask("b")
        await site.loaded("b")
        assert site.manager.is_parked("a") and site.manager.is_parked("chat@1")
        site.answer("b")
        await site.serve("chat@1")
        await site.loaded("a")
        assert site.manager.is_parked("b")

    play(site, scenario)


def test_a_unit_that_is_still_being_removed_from_memory_is_not_loaded(tmp_path: Path) -> None:
    groups = {"pair": GroupSettings(models=["a", "b"], load="all")}
    site = Site(tmp_path, Settings(models={"a": optional(), "b": optional()}, groups=groups))
    site.manager.capacity = 9

    async def scenario() -> None:
        await site.loaded("b")
        async with site.on_demand._changing:
            site.manager.parked, site.manager.leaving = {"a", "b"}, {"a"}
            site.ask("b")
            for _ in range(2):
                found = list(site.on_demand._bundles.all())
                await site.on_demand._serve(found[0], found)
            assert site.manager.history == ["load a", "load b", "load b"]

    play(site, scenario)


def test_models_that_exclude_each_other_take_turns_although_both_fit(tmp_path: Path) -> None:
    groups = {"rivals": GroupSettings(models=["a", "b"], load="one")}
    site = Site(tmp_path, Settings(models={"a": optional(), "b": optional()}, groups=groups))
    site.manager.capacity = 9

    async def scenario() -> None:
        await site.loaded("a")
        assert site.manager.is_parked("b")
        site.ask("b")
        await site.loaded("b")
        assert site.manager.is_parked("a")
        assert site.on_demand.stats("a").evictions == {"memory": 0, "group": 1, "idle": 0}

    play(site, scenario)


def test_a_model_with_a_long_queue_does_not_get_its_memory_back_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings(models={"a": optional(), "b": optional()}))

    async def scenario() -> None:
        await site.loaded("a")
        site.ask("a")
        await site.until(lambda: site.now > 10_100.0, "the wait")
        site.ask("b")
        await site.loaded("b")
        assert site.manager.history == ["load a", "park a", "load b"]
        await site.loaded("a")

    play(site, scenario)


@pytest.mark.parametrize("fits", [True, False])
def test_a_request_wakes_a_sleeping_version_or_loads_it_again_if_it_does_not_fit(
    tmp_path: Path, fits: bool
) -> None:
    site = Site(tmp_path, Settings())
    version = site.version(1)

    async def scenario() -> None:
        await site.operations.load(version)
        await site.operations.sleep(version, 60.0)
        [route] = site.routing.routes()
        assert (route.unit, route.on_demand, route.listed) == ("", True, True)
        site.manager.stuck = "" if fits else "no memory"
        site.on_demand.wanted("chat")
        await site.until(lambda: site.routing.unit_of("chat") == "chat@1", "the request's unit")
        assert site.manager.loaded("chat@1") == fits and not site.operations.asleep
        site.ask("chat@1")
        await site.loaded("chat@1")
        ended = [] if fits else ["unload chat@1", "load chat@1"]
        assert site.manager.history == ["load chat@1", "sleep chat@1", "wake chat@1", *ended]

    play(site, scenario)


def test_an_eviction_ends_if_new_settings_keep_the_model_loaded(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings(models={"m": optional(), "other": optional()}))

    async def scenario() -> None:
        def park(unit: str, *, asleep: bool = False) -> None:
            """Park the unit, and simulate a reload that makes its model required while its requests
            finish."""
            site.manager.history.append(f"kept {unit}")

        await site.loaded("m")
        site.manager.park = park  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            await site.on_demand._evict(("m",), "memory", "a test needs the memory")
        assert site.manager.history[-1] == "kept m" and site.manager.of("m")

    play(site, scenario)


def test_a_parked_version_becomes_the_default_after_the_other_has_left_the_memory(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())

    async def scenario() -> None:
        await site.operations.load(site.version(1))
        await site.operations.introduce(site.version(2))
        await site.make_default(2)
        assert site.manager.history == ["load chat@1", "unload chat@1", "load chat@2"]

    play(site, scenario)
