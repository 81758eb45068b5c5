"""Tests of loads, unloads and swaps with simulated replicas and fronts."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.actions.parameters import PruneModels
from appliance.admin.models import ModelAdmin
from appliance.channel.served_models import ServedModel
from appliance.models.fit import MemoryShortage
from appliance.models.load_errors import LoadError
from appliance.models.manifest import read_manifest
from appliance.models.operations import ModelOperations
from appliance.models.routing import Routing
from appliance.models.version_swaps import VersionSwaps
from appliance.settings import ModelSettings
from store.audit import Actor
from store.control import ControlStore
from store.models import VersionRecord
from store.registry import ModelRegistry

WITHIN_S = 60.0


class SimulatedManager:
    """Loads units immediately. `capacity` is the number of units that fit into memory."""

    def __init__(self) -> None:
        self.models: dict[str, ServedModel] = {}
        self.capacity = 2
        self.load_timeout_s = WITHIN_S
        self.broken: set[str] = set()
        self.slow: set[str] = set()
        """Units that never become ready."""
        self.busy: set[str] = set()
        """Units with unfinished requests."""
        self.history: list[str] = []
        self.sleeping = self
        self.stuck = ""
        """The reason why units cannot sleep or wake; empty if they can."""
        self._released: set[str] = set()
        """Units that have released their memory."""

    async def sleep(self, unit: str) -> str:
        self.history.append(f"sleep {unit}")
        if not self.stuck:
            self._released.add(unit)
        return self.stuck

    async def wake(self, unit: str) -> str:
        self.history.append(f"wake {unit}")
        if self.stuck and unit in self._released:
            return self.stuck
        self._released.discard(unit)
        return ""

    def load(self, unit: ServedModel, settings: ModelSettings) -> None:
        self.models[unit.name] = unit
        self.history.append(f"load {unit.name}")

    async def unload(self, unit: str, grace_s: float) -> None:
        if self.models.pop(unit, None) is not None:
            self.history.append(f"unload {unit}")

    def loaded(self, unit: str) -> bool:
        return unit in self.models and unit not in self.slow | self.broken

    def load_failure(self, unit: str) -> str:
        return "the weights are broken" if unit in self.broken else ""

    failure = load_failure

    def fallback(self, unit: str) -> str:
        return ""

    def finished(self, unit: str) -> bool:
        return unit not in self.busy

    def is_declared(self, name: str) -> bool:
        return False

    def is_parked(self, unit: str) -> bool:
        return False

    is_parked_asleep = accepts_early = is_parked

    def parked_host_bytes(self) -> dict[str, int]:
        return {}

    async def stay_asleep(self, unit: str) -> bool:
        return False

    async def shortage_of(self, unit: str, settings: ModelSettings) -> MemoryShortage:
        return (
            MemoryShortage(1, "each rank needs 2 GB")
            if len(self.models) >= self.capacity
            else MemoryShortage()
        )


class SimulatedFronts:
    """Applies routes immediately, and records them."""

    def __init__(self, routing: Callable[[], Routing]) -> None:
        self._routing = routing
        self.routes: list[dict[str, str]] = []
        self.preparing: set[str] = set()
        self.broken: set[str] = set()

    def publish_configuration(self) -> None:
        routes = {route.name: route.unit for route in self._routing().routes()}
        if not self.routes or routes != self.routes[-1]:
            self.routes.append(routes)

    async def applied(self, timeout_s: float) -> bool:
        self.publish_configuration()
        return True

    async def routed(self) -> None:
        self.publish_configuration()

    def prepares(self, unit: str) -> bool:
        return unit in self.preparing

    def problem_with(self, unit: str) -> str:
        return "front-0: a front cannot read it" if unit in self.broken else ""


class World:
    """A registry with two versions of the model `chat`. Version 1 is the default."""

    def __init__(
        self,
        folder: Path,
        manager: Any = None,
        fronts: Callable[[Callable[[], Routing]], SimulatedFronts] = SimulatedFronts,
    ) -> None:
        self.control = ControlStore(folder / "control.db")
        self.control.start()
        self.registry = ModelRegistry(self.control)
        self.manager, self.notes = manager or SimulatedManager(), list[str]()
        self.routing = Routing(self.registry, self.manager)
        self.fronts = fronts(lambda: self.routing)
        self.folders = []
        for number in (1, 2):
            checkpoint = folder / f"chat-{number}"
            checkpoint.mkdir()
            (checkpoint / "config.json").write_text("{}")
            self.folders.append(checkpoint)
            self.registry.add_version(
                actor="test",
                model="chat",
                folder=str(checkpoint),
                files=read_manifest(str(checkpoint)),
                settings={},
            ).result(WITHIN_S)
        self.operations = ModelOperations(
            self.registry,
            self.manager,
            self.manager,  # knows which versions have unfinished requests
            self.routing,
            self.fronts,
            self.note,
            {"device": "cpu"},
        )

    def note(self, where: str, description: str) -> None:
        self.notes.append(f"{where}: {description}")

    def version(self, number: int) -> VersionRecord:
        return self.registry.current.versions[("chat", number)]

    @property
    def unit(self) -> str:
        """The unit that answers requests for `chat`."""
        return self.routing.unit_of("chat")

    async def make_default(self, number: int, commit_fails: bool = False) -> None:
        former = self.version(self.registry.current.models["chat"].default_version)

        async def commit() -> None:
            if commit_fails:
                raise OSError("the disk is full")
            changed = self.registry.set_default(
                actor="test", action="models.default", model="chat", version=number
            )
            await asyncio.wrap_future(changed)

        swaps = VersionSwaps(
            self.registry, self.operations, self.manager, self.routing, self.fronts, self.note
        )
        await swaps.set_default(former, self.version(number), commit, WITHIN_S)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.control.close()


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WITHIN_S):
            await scenario()

    asyncio.run(bounded())


def test_a_swap_loads_the_new_version_before_the_old_one_ends(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        await world.make_default(2)
        assert world.unit == "chat@2"
        await world.until(lambda: list(world.manager.models) == ["chat@2"])
        assert world.manager.history == ["load chat@1", "load chat@2", "unload chat@1"]
        assert world.version(2).loaded_at is not None
        await world.until(lambda: world.version(1).loaded_at is None)

    run(scenario)


def test_the_old_version_stays_until_no_request_uses_it(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        world.fronts.preparing.add("chat@1")
        await world.make_default(2)
        await asyncio.sleep(0.1)
        assert "chat@1" in world.manager.models and "chat@1" in world.operations.draining
        world.manager.busy.add("chat@1")
        world.fronts.preparing.clear()
        await asyncio.sleep(0.1)
        assert "chat@1" in world.manager.models
        world.manager.busy.clear()
        await world.until(lambda: "chat@1" not in world.manager.models)
        await world.until(lambda: not world.operations.draining)

    run(scenario)


def test_a_rollback_uses_a_version_again_that_is_still_draining(world: World) -> None:
    async def scenario() -> None:
        await world.operations.load(world.version(1))
        world.manager.busy.add("chat@1")
        await world.make_default(2)
        await world.make_default(1)
        assert world.unit == "chat@1"
        await world.until(lambda: list(world.manager.models) == ["chat@1"])
        assert world.manager.history == ["load chat@1", "load chat@2", "unload chat@2"]

    run(scenario)


def test_a_swap_without_enough_memory_holds_requests_until_the_new_version_is_loaded(world: World) -> None:
    async def scenario() -> None:
        world.manager.capacity = 1
        await world.operations.load(world.version(1))
        world.fronts.routes.clear()
        await world.make_default(2)
        assert world.manager.history == ["load chat@1", "unload chat@1", "load chat@2"]
        assert world.fronts.routes == [{"chat": ""}, {"chat": "chat@2"}]

    run(scenario)


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_version_that_cannot_be_loaded_leaves_the_former_one_in_place(world: World, capacity: int) -> None:
    async def scenario() -> None:
        world.manager.capacity = capacity
        await world.operations.load(world.version(1))
        world.manager.broken.add("chat@2")
        with pytest.raises(LoadError, match="the weights are broken"):
            await world.make_default(2)
        assert world.unit == "chat@1" and list(world.manager.models) == ["chat@1"]
        assert world.registry.current.models["chat"].default_version == 1
        assert "the weights are broken" in world.routing.failures["chat@2"]

    run(scenario)


@pytest.mark.parametrize("capacity", [1, 2])
def test_a_change_that_cannot_be_stored_is_undone(world: World, capacity: int) -> None:
    async def scenario() -> None:
        world.manager.capacity = capacity
        await world.operations.load(world.version(1))
        with pytest.raises(OSError, match="disk is full"):
            await world.make_default(2, commit_fails=True)
        await world.until(lambda: list(world.manager.models) == ["chat@1"])
        assert world.unit == "chat@1"

    run(scenario)


def test_a_version_whose_tokenizer_a_front_cannot_read_is_not_routed_to(world: World) -> None:
    async def scenario() -> None:
        world.fronts.broken.add("chat@1")
        with pytest.raises(LoadError, match="a front cannot read it"):
            await world.operations.load(world.version(1))
        assert world.unit == "" and not world.manager.models

    run(scenario)


def test_a_model_stays_listed_while_its_requests_wait_for_a_load(world: World) -> None:
    async def scenario() -> None:
        world.manager.slow.add("chat@1")
        loading = asyncio.ensure_future(world.operations.load(world.version(1)))
        await world.until(lambda: "chat@1" in world.manager.models)
        (route,) = world.routing.routes()
        assert (route.unit, route.on_demand, route.listed) == ("", False, True)
        await world.operations.unload(world.version(1), 0.0)
        with pytest.raises(LoadError, match="cancelled"):
            await loading

    run(scenario)


def test_an_unload_cancels_a_load(world: World) -> None:
    async def scenario() -> None:
        world.manager.slow.add("chat@1")
        loading = asyncio.ensure_future(world.operations.load(world.version(1)))
        await world.until(lambda: "chat@1" in world.manager.models)
        assert world.fronts.routes[-1] == {"chat": ""}
        await world.operations.unload(world.version(1), 0.0)
        with pytest.raises(LoadError, match="cancelled"):
            await loading
        assert not world.manager.models and world.fronts.routes[-1] == {"chat": ""}

    run(scenario)


def test_a_version_that_an_alias_names_stays_loaded_after_a_swap(world: World) -> None:
    async def scenario() -> None:
        world.registry.set_alias(actor="test", name="old", target="chat@1").result(WITHIN_S)
        await world.operations.load(world.version(1))
        await world.make_default(2)
        await asyncio.sleep(0.1)
        assert set(world.manager.models) == {"chat@1", "chat@2"}
        assert world.fronts.routes[-1] == {"chat": "chat@2", "old": "chat@1"}

    run(scenario)


def test_the_arms_of_a_split_answer_until_another_version_is_the_default(world: World) -> None:
    def split(**weights: float) -> None:
        targets = {f"chat@{version[1:]}": weight for version, weight in weights.items()}
        world.registry.set_split(actor="test", name="chat", weights=targets).result(WITHIN_S)

    def arms() -> dict[str, float]:
        [route] = world.routing.routes()
        return {arm.unit: arm.weight for arm in route.arms}

    async def scenario() -> None:
        for number in (1, 2):
            await world.operations.load(world.version(number))
        split(v1=90, v2=10)
        assert arms() == {"chat@1": 90, "chat@2": 10} and world.unit == "chat@1"
        assert world.routing.names_of("chat@2") == ["chat"]
        world.manager.broken.add("chat@1")
        assert arms() == {"chat@2": 10} and world.unit == "chat@2"
        world.manager.broken.clear()
        await world.operations.unload(world.version(2), 0.0)
        assert arms() == {"chat@1": 90}
        await world.operations.load(world.version(2))
        await world.make_default(2)
        assert arms() == {} and world.unit == "chat@2"
        await world.until(lambda: list(world.manager.models) == ["chat@2"])

    run(scenario)


def test_requests_wait_for_the_first_arm_that_is_loaded(world: World) -> None:
    async def scenario() -> None:
        world.registry.set_split(actor="test", name="chat", weights={"chat@2": 1}).result(WITHIN_S)
        world.manager.slow.add("chat@2")
        loading = asyncio.ensure_future(world.operations.load(world.version(2)))
        await world.until(lambda: "chat@2" in world.manager.models)
        assert world.fronts.routes[-1] == {"chat": ""}
        world.manager.slow.clear()
        await loading
        assert world.unit == "chat@2"

    run(scenario)


def test_a_file_that_changed_after_the_manifest_is_named(world: World) -> None:
    async def scenario() -> None:
        (world.folders[0] / "config.json").write_text("{ }")
        with pytest.raises(LoadError, match="has changed from 2 to 3 bytes since"):
            await world.operations.load(world.version(1))
        (world.folders[0] / "config.json").write_text("[]")
        with pytest.raises(LoadError, match="has changed since"):
            await world.operations.load(world.version(1))

    run(scenario)


def test_loaded_versions_are_loaded_again_at_the_next_start(world: World) -> None:
    async def scenario() -> None:
        world.registry.set_loaded("chat", 1, True).result(WITHIN_S)
        world.operations.restore()
        await world.until(lambda: world.unit == "chat@1")

    run(scenario)


@pytest.mark.parametrize("function", ["difference", "describe"])
def test_a_load_ends_although_the_disk_does_not_respond(
    world: World, monkeypatch: pytest.MonkeyPatch, function: str
) -> None:
    released = threading.Event()

    def hangs(*arguments: object) -> None:
        released.wait()

    async def scenario() -> None:
        world.manager.load_timeout_s = 0.05
        with monkeypatch.context() as patched:
            patched.setattr(f"appliance.models.operations.{function}", hangs)
            with pytest.raises(LoadError, match=r"chat-1 could not be read within 0.05 s: check that their"):
                await world.operations.load(world.version(1))
        world.manager.load_timeout_s = WITHIN_S
        await world.operations.load(world.version(1))
        assert world.unit == "chat@1"

    try:
        run(scenario)
    finally:
        released.set()


def test_the_files_of_a_pruned_version_are_no_longer_watched(world: World) -> None:
    nothing: Any = None
    manager: Any = SimpleNamespace(retirements=SimpleNamespace(unreturned={}))
    states: Any = SimpleNamespace(is_loaded=lambda unit: False)
    admin = ModelAdmin(
        states=states,
        registry=world.registry,
        operations=world.operations,
        swaps=nothing,
        on_demand=nothing,
        manager=manager,
        routing=world.routing,
        fronts=world.fronts,
        check=nothing,
        settings=nothing,
        declared_in=lambda name: "",
    )

    async def scenario() -> None:
        world.operations.note_failure(world.version(2), "the weights are broken")
        await admin.prune(Actor("test"), PruneModels())
        assert set(world.registry.current.versions) == {("chat", 1)}
        assert not world.operations._watches and not world.routing.failures

    run(scenario)


def test_a_swap_without_enough_memory_unloads_a_former_default_that_is_asleep(world: World) -> None:
    async def scenario() -> None:
        world.registry.add_version(
            actor="test",
            model="chat",
            folder=str(world.folders[0]),
            files=read_manifest(str(world.folders[0])),
            settings={},
        ).result(WITHIN_S)
        weights = {"chat@1": 50.0, "chat@2": 50.0}
        world.registry.set_split(actor="test", name="chat", weights=weights).result(WITHIN_S)
        for number in (1, 2):
            await world.operations.load(world.version(number))
        await world.operations.sleep(world.version(1), WITHIN_S)
        await world.make_default(3)
        assert world.unit == "chat@3" and not world.operations.asleep
        assert world.manager.history[-2:] == ["unload chat@1", "load chat@3"]
        world.manager.capacity = 3
        await world.operations.load(world.version(1))
        assert world.manager.history[-1] == "load chat@1"

    run(scenario)
