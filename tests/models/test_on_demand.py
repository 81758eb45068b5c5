"""Tests of loading on demand with simulated replicas, fronts and requests, and a simulated clock."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance import background
from appliance.channel.served_models import ServedModel
from appliance.models import bundles, on_demand, restarts
from appliance.models.fit import MemoryShortage
from appliance.models.load_errors import LoadError
from appliance.models.on_demand import OnDemand
from appliance.models.operations import ModelOperations
from appliance.models.routing import Routing
from appliance.settings import GroupSettings, ModelSettings, Settings
from appliance.settings.fields import OnDemandSettings
from appliance.traffic.model_uses import ModelUses
from tests.models.test_operations import SimulatedFronts, SimulatedManager, World, run

WEIGHT_BYTES = 1 << 40


class Traffic:
    """The requests for one unit (a version of a model)."""

    def __init__(self) -> None:
        self.running = self.queued = 0
        self.asked_at: float | None = None
        self.uses = ModelUses()
        self.failure: str | None = None
        self.since = 0.0

    def oldest_wait_s(self, now: float) -> float:
        return now - self.since


class Manager(SimulatedManager):
    """Loads and parks units immediately. A parked unit has no replicas but still accepts requests. `room` is
    the number of units that fit into memory."""

    def __init__(self, requests: Requests, declared: dict[str, ModelSettings]) -> None:
        super().__init__()
        self._requests = requests
        self._declared = declared
        self.parked = set(declared)
        self.asleep: set[str] = set()
        """Parked units that sleep."""
        self.on_gpus = True
        self.held = False
        """Whether sleeping units hold so much memory that they must be unloaded before another load."""
        self.leaving: set[str] = set()
        """Parked units whose replicas have not been stopped yet."""
        self.cannot_wake = False
        self.gpus: dict[str, list[int]] = {}
        self.replicas: list[Any] = []
        self.settings: dict[str, ModelSettings] = dict(declared)
        for name in declared:
            self.models[name] = served(name)
            requests.state.models[name] = Traffic()

    def load(self, unit: ServedModel, settings: ModelSettings) -> None:
        super().load(unit, settings)
        self.settings[unit.name] = settings
        self.parked.discard(unit.name)
        self._requests.state.models.setdefault(unit.name, Traffic())

    def introduce(self, unit: ServedModel, settings: ModelSettings) -> None:
        self.load(unit, settings)
        self.history.pop()
        self.parked.add(unit.name)

    async def unload(self, unit: str, grace_s: float) -> None:
        await super().unload(unit, grace_s)
        self.parked.discard(unit)
        self.asleep.discard(unit)
        self.settings.pop(unit, None)
        self._requests.state.models.pop(unit, None)

    def park(self, unit: str, *, asleep: bool = False) -> None:
        self.parked.add(unit)
        (self.asleep.add if asleep else self.asleep.discard)(unit)
        self.history.append(f"{'sleep' if asleep else 'park'} {unit}")

    def unpark(self, unit: str) -> None:
        self.parked.discard(unit)
        self.history.append(f"{'wake' if unit in self.asleep else 'load'} {unit}")
        self.asleep.discard(unit)

    def of(self, unit: str) -> list[Any]:
        in_memory = unit in self.models and (unit not in self.parked - self.leaving or unit in self.asleep)
        freed_bytes = WEIGHT_BYTES if unit in self.asleep else 0
        replica = SimpleNamespace(
            weight_bytes=WEIGHT_BYTES,
            kv_bytes=0,
            sleeping=SimpleNamespace(freed_bytes=freed_bytes, host_bytes=freed_bytes),
            on_gpus=self.on_gpus,
            resources=SimpleNamespace(gpus=self.gpus.get(unit, [])),
        )
        return [replica] if in_memory else []

    def is_parked_asleep(self, unit: str) -> bool:
        return unit in self.asleep

    def parked_host_bytes(self) -> dict[str, int]:
        return dict.fromkeys(self.asleep, WEIGHT_BYTES)

    def is_parked(self, unit: str) -> bool:
        return unit in self.parked

    def is_declared(self, name: str) -> bool:
        return name in self._declared

    def loaded(self, unit: str) -> bool:
        return super().loaded(unit) and unit not in self.parked

    def settings_of(self, unit: str) -> ModelSettings | None:
        return self.settings.get(unit)

    async def stay_asleep(self, unit: str) -> bool:
        if was_asleep := unit in self.asleep:
            self.asleep.discard(unit)
            self.parked.discard(unit)
        return was_asleep

    async def end_sleep(self, unit: str) -> None:
        if unit in self.asleep:
            self.park(unit)

    async def shortage_of(self, unit: str, settings: ModelSettings) -> MemoryShortage:
        if self.cannot_wake and unit in self.asleep:
            return MemoryShortage(1 << 60, "there is no room")
        return self._shortage(self.held and bool(self.asleep - {unit}))

    async def shortage(self, settings: ModelSettings) -> MemoryShortage:
        return self._shortage(self.held and bool(self.asleep))

    def _shortage(self, held: bool) -> MemoryShortage:
        used = sum(bool(self.of(unit)) and unit not in self.asleep for unit in self.models) + held
        return MemoryShortage(1, "there is no room") if used >= self.room else MemoryShortage()


class Requests:
    """A simulated request manager."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(models={})

    def fail_model(self, unit: str, why: str) -> None:
        self.state.models[unit].failure = why
        self.state.models[unit].queued = 0

    def recover_model(self, unit: str) -> None:
        self.state.models[unit].failure = None


class Site:
    """A registry with two versions of the model `chat`, models in the settings, and memory for one unit."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.world = World(folder)
        self.requests = Requests()
        self.manager = Manager(self.requests, settings.models)
        manager: Any = self.manager
        requests: Any = self.requests
        self.manager.room = 1
        self.routing = Routing(lambda: self.world.registry.current, manager)
        self.fronts = SimulatedFronts(lambda: self.routing)
        self.operations = ModelOperations(
            self.world.registry, manager, self.routing, self.fronts, lambda *_: None, {"device": "cpu"}
        )
        world: Any = self.world
        world.operations, world.manager = self.operations, self.manager
        world.routing, world.fronts = self.routing, self.fronts
        self.now, self.settings = 10_000.0, settings
        self.on_demand = OnDemand(
            lambda: self.settings,
            operations=self.operations,
            manager=manager,
            routing=self.routing,
            requests=requests,
            fronts=self.fronts,
            clock=lambda: self.now,
        )

    def traffic(self, unit: str) -> Traffic:
        found: Traffic = self.requests.state.models[unit]
        return found

    def ask(self, unit: str, tenant: str = "acme", keep_alive_s: float | None = None) -> None:
        """Queue a request for a unit."""
        traffic = self.traffic(unit)
        traffic.queued, traffic.since, traffic.asked_at = 1, self.now, self.now
        traffic.uses.accept(tenant, keep_alive_s, self.now)

    def answer(self, unit: str, tenant: str = "acme") -> None:
        self.traffic(unit).queued = 0
        self.traffic(unit).uses.end(tenant, self.now)

    async def exchange(self, loaded: str, wanted: str) -> None:
        """Wait until `loaded` is loaded, send a request that makes the service replace it with `wanted`, and
        answer the request."""
        await self.until(lambda: self.manager.loaded(loaded), f"the load of {loaded}")
        self.ask(wanted)
        await self.until(lambda: self.manager.loaded(wanted), f"the exchange for {wanted}")
        self.answer(wanted)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Advance the clock until the condition is true, for at most 60 s of real time. Simulated time
        is not limited, because files are read and the database is written in real time."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, f"{what} did not happen; history: {self.manager.history}"
            await asyncio.sleep(0.002)
            self.now += 0.5


def served(name: str) -> ServedModel:
    return ServedModel(name=name, folder="/", version="", created=0, max_model_len=0, vocab_size=0)


def play(site: Site, scenario: Callable[[], Any]) -> None:
    async def started() -> None:
        site.on_demand.start()
        try:
            await scenario()
        finally:
            site.on_demand.stop()

    try:
        run(started)
    finally:
        site.world.control.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loop run every millisecond, and shorten the time for which failures are remembered."""
    monkeypatch.setattr(on_demand, "_POLL_S", 0.001)
    monkeypatch.setattr(background, "_POLL_S", 0.001)
    monkeypatch.setattr(on_demand, "_RETRY_S", 1.0)
    monkeypatch.setattr(bundles, "_host_bytes", lambda settings: dict.fromkeys(settings, 0))


def optional(**fields: Any) -> ModelSettings:
    return ModelSettings(folder="/", required=False, **fields)


def sleepy(count: int = 2, **models: ModelSettings) -> Settings:
    """Return settings with host memory for `count` sleeping units."""
    limit_gb = count * WEIGHT_BYTES / 1e9 + 0.1
    return Settings(models=models, on_demand=OnDemandSettings(sleeping_memory_gb=limit_gb))


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
        await site.until(lambda: site.manager.loaded("chat@1"), "the load")
        site.answer("chat@1")
        ended = site.now
        await site.until(lambda: site.manager.is_parked("chat@1"), "the end of the time to live")
        assert site.now >= ended + 60.0 and site.routing.unit_of("chat") == "chat@1"
        await site.until(lambda: "chat@1" not in site.manager.models, "the tokenizer's removal")
        assert site.now >= ended + 600.0
        assert site.on_demand.stats("chat@1").evictions["idle"] == 1
        [route] = site.routing.routes()
        assert (route.unit, route.on_demand) == ("", True)

    play(site, scenario)


def test_a_tenant_does_not_unload_a_model_that_another_tenant_uses(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings(models={"a": optional(idle_unload_s=60.0)}))

    async def scenario() -> None:
        site.ask("a", "acme")
        await site.until(lambda: site.manager.loaded("a"), "the load")
        site.answer("a", "acme")
        ended = site.now
        site.ask("a", "other", keep_alive_s=0.0)
        site.answer("a", "other")
        await site.until(lambda: site.manager.is_parked("a"), "the end of the time to live")
        assert ended + 60.0 <= site.now < ended + 120.0
        # Tenant "acme" no longer uses the model, so the model is unloaded when the keep-alive of tenant
        # "other" ends.
        site.ask("a", "other", keep_alive_s=0.0)
        await site.until(lambda: site.manager.loaded("a"), "the second load")
        site.answer("a", "other")
        ended = site.now
        await site.until(lambda: site.manager.is_parked("a"), "the second end")
        assert site.now < ended + 60.0

    play(site, scenario)


def test_a_failed_load_refuses_requests_for_a_while_and_is_then_tried_again(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())

    async def scenario() -> None:
        site.on_demand.wanted("chat")
        await site.until(lambda: site.routing.unit_of("chat") == "chat@1", "the introduction")
        site.manager.broken.add("chat@1")
        site.ask("chat@1")
        await site.until(lambda: site.traffic("chat@1").failure is not None, "the failure")
        assert "the weights are broken" in (site.traffic("chat@1").failure or "")
        assert not site.routing.routes()[0].listed and site.manager.is_parked("chat@1")
        site.manager.broken.clear()
        await site.until(lambda: site.traffic("chat@1").failure is None, "the end of the refusals")
        assert not site.routing.routes()[0].listed
        site.ask("chat@1")
        await site.until(lambda: site.manager.loaded("chat@1"), "the load")
        await site.until(lambda: site.routing.routes()[0].listed, "the listing")

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
                await site.on_demand.load(site.world.version(1))
        else:
            site.on_demand.wanted("chat")
            await site.until(lambda: site.routing.unit_of("chat") == "chat@1", "the introduction")
            site.ask("chat@1")
        await site.until(lambda: "chat@1" in site.routing.failures, "the failure")
        site.manager.broken.clear()
        await asyncio.sleep(0.1)
        assert not site.routing.routes()[0].listed
        os.utime(site.world.folders[0] / "config.json", (0, 0))  # as if the file had been copied again
        await site.until(lambda: site.routing.routes()[0].listed, "the listing")
        if by_command:
            await site.until(lambda: site.manager.loaded("chat@1"), "the load")
        else:
            assert site.traffic("chat@1").failure is None and site.manager.is_parked("chat@1")

    play(site, scenario)


def test_an_unload_cancels_every_load_of_the_version_also_one_that_waits(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())

    async def scenario() -> None:
        site.manager.room = 2
        site.manager.slow.add("chat@1")
        first, second = site.world.version(1), site.world.version(2)
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
    site.manager.room = 2

    async def scenario() -> None:
        await site.until(lambda: site.manager.loaded("b"), "the second load")
        assert site.manager.history == ["load a", "load b"] and site.manager.is_parked("c")
        site.ask("c")
        await site.until(lambda: site.manager.loaded("c"), "the exchange")
        assert site.manager.history == ["load a", "load b", "park a", "load c"]

    play(site, scenario)


def test_a_command_loads_an_optional_model_of_the_settings(tmp_path: Path) -> None:
    site = Site(
        tmp_path, Settings(models={name: optional() for name in "ab"} | {"kept": optional(pinned=True)})
    )
    site.manager.room = 2

    async def scenario() -> None:
        await site.until(lambda: site.manager.loaded("b"), "the loads at startup")
        site.ask("kept")
        await site.until(lambda: site.manager.loaded("kept"), "the pinned model")
        site.answer("kept")
        loaded = [one for one in "ab" if site.manager.loaded(one)]
        [parked] = {"a", "b"} - set(loaded)
        loading = asyncio.ensure_future(site.on_demand.load_declared(parked))
        await site.until(loading.done, "the load")
        await loading
        assert site.manager.loaded(parked) and site.manager.is_parked(loaded[0])
        site.ask(parked)  # a model with requests is not unloaded to make room for the model of a command
        loading = asyncio.ensure_future(site.on_demand.load_declared(loaded[0]))
        await site.until(loading.done, "the refusal")
        with pytest.raises(LoadError, match="does not fit alongside the models that are loaded"):
            await loading

    play(site, scenario)


def test_a_command_unloads_idle_models_to_make_room_but_no_pinned_ones(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings(models={"a": optional(), "b": optional(pinned=True)}))
    site.manager.room = 2

    async def scenario() -> None:
        await site.until(lambda: site.manager.loaded("b"), "the loads at startup")
        loading = asyncio.ensure_future(site.on_demand.load(site.world.version(1)))
        await site.until(loading.done, "the load")
        await loading
        assert site.manager.is_parked("a") and site.manager.loaded("b")
        assert site.manager.loaded("chat@1")
        assert site.on_demand.expires_at("b") is None

    play(site, scenario)


def test_models_that_must_be_loaded_together_are_loaded_and_unloaded_together(tmp_path: Path) -> None:
    groups = {"pair": GroupSettings(models=["a", "chat"], load="all")}
    site = Site(tmp_path, Settings(models={"a": optional(), "b": optional()}, groups=groups))
    site.manager.room = 2

    async def scenario() -> None:
        await site.until(lambda: site.manager.loaded("chat@1"), "the load of both at startup")
        assert site.manager.history == ["load a", "load chat@1"]
        site.ask("b")
        await site.until(lambda: site.manager.loaded("b"), "the exchange")
        assert site.manager.is_parked("a") and site.manager.is_parked("chat@1")
        site.answer("b")
        site.ask("chat@1")
        await site.until(lambda: site.manager.loaded("chat@1"), "the load of the first")
        site.answer("chat@1")
        await site.until(lambda: site.manager.loaded("a"), "the load of the second")
        assert site.manager.is_parked("b")

    play(site, scenario)


def test_a_unit_that_is_still_being_removed_from_memory_is_not_loaded(tmp_path: Path) -> None:
    groups = {"pair": GroupSettings(models=["a", "b"], load="all")}
    site = Site(tmp_path, Settings(models={"a": optional(), "b": optional()}, groups=groups))
    site.manager.room = 9

    async def scenario() -> None:
        await site.until(lambda: site.manager.loaded("b"), "the loads at startup")
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
    site.manager.room = 9

    async def scenario() -> None:
        await site.until(lambda: site.manager.loaded("a"), "the load at startup")
        assert site.manager.is_parked("b")
        site.ask("b")
        await site.until(lambda: site.manager.loaded("b"), "the exchange")
        assert site.manager.is_parked("a")
        assert site.on_demand.stats("a").evictions == {"memory": 0, "group": 1, "idle": 0}

    play(site, scenario)


def test_a_model_with_a_long_queue_does_not_get_its_memory_back_at_once(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings(models={"a": optional(), "b": optional()}))

    async def scenario() -> None:
        await site.until(lambda: site.manager.loaded("a"), "the load at startup")
        site.ask("a")
        await site.until(lambda: site.now > 10_100.0, "the wait")
        site.ask("b")
        await site.until(lambda: site.manager.loaded("b"), "the exchange")
        assert site.manager.history == ["load a", "park a", "load b"]
        await site.until(lambda: site.manager.loaded("a"), "the return")

    play(site, scenario)


@pytest.mark.parametrize("fits", [True, False])
def test_a_request_wakes_a_sleeping_version_or_loads_it_again_if_it_does_not_fit(
    tmp_path: Path, fits: bool
) -> None:
    site = Site(tmp_path, Settings())
    version = site.world.version(1)

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
        await site.until(lambda: site.manager.loaded("chat@1"), "the load")
        ended = [] if fits else ["unload chat@1", "load chat@1"]
        assert site.manager.history == ["load chat@1", "sleep chat@1", "wake chat@1", *ended]

    play(site, scenario)


def test_an_eviction_ends_if_new_settings_keep_the_model_loaded(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings(models={"m": optional(), "other": optional()}))

    async def scenario() -> None:
        def park(unit: str, *, asleep: bool = False) -> None:
            """Simulate a reload that makes the model required while its requests are finishing."""
            site.manager.history.append(f"kept {unit}")

        await site.until(lambda: site.manager.loaded("m"), "the load of m")
        site.manager.park = park  # type: ignore[method-assign]
        async with asyncio.timeout(60):
            await site.on_demand._evict(("m",), "memory", "a test needs the memory")
        assert site.manager.history[-1] == "kept m" and site.manager.of("m")

    play(site, scenario)


def test_a_parked_version_becomes_the_default_after_the_other_has_left_the_memory(tmp_path: Path) -> None:
    site = Site(tmp_path, Settings())

    async def scenario() -> None:
        await site.operations.load(site.world.version(1))
        await site.operations.introduce(site.world.version(2))
        await site.world.make_default(2)
        assert site.manager.history == ["load chat@1", "unload chat@1", "load chat@2"]

    play(site, scenario)
