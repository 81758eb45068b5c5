"""Tests of versions that cannot be woken, with a real model manager and simulated processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from appliance.models.load_errors import LoadError, MemoryShortageError
from appliance.models.operations import ModelOperations
from appliance.models.routing import Routing
from appliance.settings import ModelSettings
from tests.models.on_demand_site import served
from tests.models.test_operations import SimulatedFronts, World
from tests.models.test_park_asleep import GpuProcesses, Site, run, site  # noqa: F401

WITHIN_S = 60.0


class Sleeper:
    """A version, `chat@1`, with two replicas that are asleep."""

    def __init__(self, made: Site, world: World) -> None:
        self.manager, self.launches = made.manager, made.launches
        self.version = world.version(1)
        self.changed = ""
        """How the version's files have changed."""
        routing = Routing(world.registry, made.manager)
        self.operations = ModelOperations(
            world.registry,
            made.manager,
            made.requests.state,
            routing,
            SimulatedFronts(lambda: routing),
            world.note,
            {},
        )
        made.manager._factory._checks._files_check = lambda unit: self.changed

    async def start(self) -> None:
        settings = ModelSettings(folder=self.version.folder, replicas=2)
        self.manager.load(served("chat@1"), settings)
        await self.operations._until_loaded("chat@1")
        self.operations._routing.usable.add("chat@1")
        await self.operations.sleep(self.version, WITHIN_S)
        self.replicas = self.manager.of("chat@1")
        self.processes = self.launches[-2:]
        assert len(self.replicas) == 2 and all(one.sleeping.asleep for one in self.replicas)


def play(made: Site, folder: Path, scenario: Callable[[Sleeper], Awaitable[None]]) -> None:
    world = World(folder)

    async def started() -> None:
        sleeper = Sleeper(made, world)
        await sleeper.start()
        await scenario(sleeper)

    try:
        run(made, started)
    finally:
        world.control.close()


def test_changed_files_of_a_version_whose_processes_exited_are_no_shortage_of_memory(
    site: Site,  # noqa: F811
    tmp_path: Path,
) -> None:
    async def scenario(sleeper: Sleeper) -> None:
        sleeper.processes[0].kill("killed by SIGKILL")
        sleeper.changed = "config.json has changed"
        with pytest.raises(LoadError, match=r"config\.json has changed") as raised:
            await sleeper.operations.wake(sleeper.version)
        assert not isinstance(raised.value, MemoryShortageError)
        assert not sleeper.operations.asleep and not sleeper.manager.of("chat@1")

    play(site, tmp_path, scenario)


def test_a_version_that_does_not_wake_in_time_is_reloaded(
    site: Site,  # noqa: F811
    tmp_path: Path,
) -> None:
    async def scenario(sleeper: Sleeper) -> None:
        stuck = sleeper.processes[0]
        stuck.slow = True
        kill = stuck.kill
        # Processes exit shortly after they are killed.
        stuck.kill = lambda reason: asyncio.get_running_loop().call_later(0.01, kill, reason)
        sleeper.replicas[0].load_timeout_s = 0.05
        await sleeper.operations.wake(sleeper.version)
        assert sleeper.manager.loaded("chat@1") and len(sleeper.launches) == 4
        assert sleeper.replicas[0].restarts == 1

    play(site, tmp_path, scenario)


@pytest.mark.parametrize("first_replica", ["exited in its sleep", "exits", "stays awake"])
def test_if_one_replica_cannot_wake_another_one_that_cannot_sleep_again_is_stopped(
    site: Site,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first_replica: str,
) -> None:
    async def scenario(sleeper: Sleeper) -> None:
        (first, second), ready = sleeper.processes, GpuProcesses.ready
        if first_replica == "exited in its sleep":
            first.kill("killed by SIGKILL")
            monkeypatch.setattr(GpuProcesses, "ready", lambda processes: None)  # its load takes long
        else:
            second.slow = True
        first.slow = first_replica == "exits"
        second.problem = "no device memory"
        waking = asyncio.ensure_future(sleeper.operations.wake(sleeper.version))
        await site.until(lambda: second.asked == [True, False])
        if first_replica == "exits":
            first.kill("killed by SIGKILL")
        elif first_replica == "stays awake":
            first.problem = "no host memory"
        if second.slow:
            second.slow = False
            second.finish()
        with pytest.raises(MemoryShortageError, match="chat@1 stays asleep: no device memory"):
            await waking
        await asyncio.sleep(0.3)  # longer than the delay of a restart
        assert sleeper.operations.asleep == {"chat@1"}
        assert [one.operator_state for one in sleeper.replicas] == ["sleeping", "sleeping"]
        assert sleeper.replicas[0].group is None
        second.problem = ""
        monkeypatch.setattr(GpuProcesses, "ready", ready)
        await sleeper.operations.wake(sleeper.version)
        assert sleeper.manager.loaded("chat@1")

    play(site, tmp_path, scenario)


def test_a_version_is_asleep_if_one_replica_cannot_sleep_and_another_one_cannot_be_woken_again(
    site: Site,  # noqa: F811
    tmp_path: Path,
) -> None:
    async def scenario(sleeper: Sleeper) -> None:
        first, second = sleeper.processes
        await sleeper.operations.wake(sleeper.version)
        second.slow = True
        sleeping = asyncio.ensure_future(sleeper.operations.sleep(sleeper.version, WITHIN_S))
        await site.until(lambda: second.asked == [True, False, True])
        first.problem, second.problem, second.slow = "no device memory", "no host memory", False
        second.finish()
        await sleeping
        assert sleeper.operations.asleep == {"chat@1"}
        first.problem = ""
        await sleeper.operations.wake(sleeper.version)
        assert sleeper.manager.loaded("chat@1")

    play(site, tmp_path, scenario)
