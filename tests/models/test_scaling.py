"""Tests of adding and removing replicas with simulated models."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from appliance.models.fit import MemoryShortage
from appliance.models.scaling import ModelScaling
from appliance.settings import AutoscalingSettings, ModelSettings

SCALED = ModelSettings(folder="/m", min_replicas=1, max_replicas=3)
RULES = AutoscalingSettings(cooldown_s=5.0, idle_s=20.0)


class World:
    """Two models; only `m` is scaled. Replicas are ready immediately."""

    def __init__(self) -> None:
        self.now = 0.0
        self.demand, self.wait_s = 0.1, 0.0
        self.settings = {"m": SCALED, "fixed": ModelSettings(folder="/f")}
        self.running = {"m": 1, "fixed": 1}
        self.capacity = 10
        """Number of additional replicas that fit into memory."""
        self.notes: list[str] = []
        traffic: Any = SimpleNamespace(
            demand=lambda: self.demand,
            replica_wait_s=lambda now: self.wait_s,
            ttft=SimpleNamespace(p99_s=lambda now: None),
        )
        models: Any = self
        self.scaling = ModelScaling(
            models,
            lambda: {"m": traffic, "fixed": traffic},
            lambda: RULES,
            lambda where, description: self.notes.append(f"{where}: {description}"),
            lambda: self.now,
        )

    def scalable(self) -> dict[str, ModelSettings]:
        return self.settings

    def of(self, model: str) -> list[Any]:
        replica = SimpleNamespace(answers=True, retiring=False, ready_after_s=2.0)
        return [replica] * self.running[model]

    def begin_change(self, unit: str) -> None:
        self.running[unit] = self.scaling.count(unit, self.settings[unit])

    async def shortage(self, settings: ModelSettings, count: int) -> MemoryShortage:
        return MemoryShortage(1, f"{count} replicas need 9 GB") if count > self.capacity else MemoryShortage()

    async def advance(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.scaling.check()
            await asyncio.sleep(0)
            await asyncio.sleep(0)


def test_replicas_follow_the_load_and_the_changes_are_shown_with_their_reasons() -> None:
    async def scenario() -> None:
        world = World()
        await world.advance(3)
        assert world.running == {"m": 1, "fixed": 1}
        world.demand = 2.0
        await world.advance(20)
        assert world.running == {"m": 3, "fixed": 1}
        world.demand = 0.0
        await world.advance(60)
        assert world.running == {"m": 1, "fixed": 1}
        status = world.scaling.status("m", SCALED)
        assert status is not None
        assert (status.replicas, status.min_replicas, status.max_replicas) == (1, 1, 3)
        numbers = [(change.former, change.replicas) for change in status.changes]
        assert numbers[:2] == [(2, 1), (3, 2)] and numbers[-1][0] == 1
        assert all(change.reason for change in status.changes)
        assert world.scaling.status("fixed", world.settings["fixed"]) is None

    asyncio.run(scenario())


def test_only_as_many_replicas_are_added_as_fit_into_memory() -> None:
    async def scenario() -> None:
        world = World()
        world.capacity, world.demand = 1, 2.0
        await world.advance(15)
        assert world.running["m"] == 2
        [note] = world.notes
        assert note.startswith(
            "m: no replica can be added, although the load needs 2.0 replicas: 2 replicas need 9 GB"
        )
        status = world.scaling.status("m", SCALED)
        assert status is not None and status.refusal == "2 replicas need 9 GB"
        world.capacity = 10
        await world.advance(70)
        status = world.scaling.status("m", SCALED)
        assert world.running["m"] == 3 and status is not None and not status.refusal

    asyncio.run(scenario())


def test_waiting_requests_add_a_replica() -> None:
    async def scenario() -> None:
        world = World()
        world.wait_s = 3.0
        await world.advance(1)
        assert world.running["m"] == 2

    asyncio.run(scenario())


def test_new_limits_apply_at_once_and_a_fixed_number_ends_the_scaling() -> None:
    async def scenario() -> None:
        world = World()
        world.demand = 2.0
        await world.advance(2)
        assert world.running["m"] == 3
        world.settings["m"] = ModelSettings(folder="/m", max_replicas=2)
        assert world.scaling.count("m", world.settings["m"]) == 2
        world.settings["m"] = ModelSettings(folder="/m", replicas=1)
        assert world.scaling.count("m", world.settings["m"]) == 1
        await world.advance(2)
        assert world.scaling.status("m", world.settings["m"]) is None

    asyncio.run(scenario())


def test_no_replica_is_removed_just_after_a_model_was_unloaded_and_loaded_again() -> None:
    async def scenario() -> None:
        world = World()
        world.settings["m"] = ModelSettings(folder="/m", replicas=2, min_replicas=1, max_replicas=3)
        world.running["m"] = 2
        await world.advance(10)
        world.scaling.reset("m", world.settings["m"])
        world.now += 100.0
        await world.advance(10)
        assert world.running["m"] == 2
        await world.advance(20)
        assert world.running["m"] == 1

    asyncio.run(scenario())
