"""Tests of the model manager with parked models whose replicas sleep. The processes on the GPU are
simulated."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from appliance import background
from appliance.models import fit, retirement
from appliance.models import manager as manager_module
from appliance.models.gpus import DetectedGpu, GpuReport
from appliance.models.manager import ModelManager
from appliance.models.replica_heartbeat import SILENT_AFTER_S
from appliance.settings import ModelSettings, Settings
from engine.rank_messages import LongStep, MemoryChanged, Ready
from tests.models.on_demand_site import served
from tests.models.test_replica_sleep import SLEPT, Processes, info

WITHIN_S = 60.0


class GpuProcesses(Processes):
    """The processes of a replica on a GPU. They sleep and wake unless `problem` is set. If they are `slow`, a
    sleep or wake ends only when `finish` is called."""

    problem = ""
    slow = False
    stopped = False

    def change_memory(self, asleep: bool) -> None:
        super().change_memory(asleep)
        if not self.slow:
            self.finish()

    def finish(self) -> None:
        """Answer the latest command to sleep or to wake."""
        asleep = self.asked[-1]
        answer = SLEPT if asleep else MemoryChanged(False)
        if self.problem:
            answer = MemoryChanged(not asleep, problem=self.problem)
        self._on_message(0, answer)

    def report(self) -> None:
        self._on_message(0, LongStep(0.0))

    def ready(self) -> None:
        self._on_message(0, Ready(msgspec.structs.replace(info(), devices=["cuda:0 NVIDIA H200"])))

    def attach_front(self, front: str) -> None:
        return

    async def stop(self, grace_s: float) -> None:
        self.stopped = True
        self._on_end("stopped")


class Requests:
    """The requests for the model. `accounts` are the replicas that get requests."""

    def __init__(self) -> None:
        self.accounts: list[Any] = []
        self.added = 0
        self.running = False
        self.state = SimpleNamespace(
            models={}, occupied=lambda account: self.running, finished=lambda model: not self.running
        )
        self.preempted = 0

    def add_replica(self, account: Any) -> None:
        self.accounts.append(account)
        self.added += 1

    def retire_replica(self, account: Any) -> None:
        if account in self.accounts:
            self.accounts.remove(account)

    lose_replica = retire_replica

    def preempt(self, account: Any) -> None:
        self.preempted += self.running

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class Site:
    """A manager whose only model, `m`, has one replica."""

    def __init__(self, folder: Path) -> None:
        self.launches: list[GpuProcesses] = []
        self.settings = Settings(models={"m": ModelSettings(folder=str(folder))}, run_dir=str(folder))
        self.requests = Requests()
        requests: Any = self.requests
        nothing: Callable[..., None] = lambda *arguments: None  # noqa: E731
        channels: Any = SimpleNamespace(connect_replica=nothing, disconnect_replica=nothing)

        def launch(spec: Any, on_message: Any, on_end: Any) -> Any:
            self.launches.append(GpuProcesses(on_message, on_end))
            asyncio.get_running_loop().call_soon(self.launches[-1].ready)
            return self.launches[-1]

        self.manager = ModelManager(
            lambda: self.settings,
            [served("m")],
            requests=requests,
            channels=channels,
            publish=nothing,
            note=nothing,
            launch=launch,
            preflight=lambda name, settings: "",
            files_check=lambda unit: "",
            broken={},
        )

    def be_silent(self) -> None:
        """Let the replica stay silent for longer than allowed."""
        [replica] = self.manager.replicas
        replica.heartbeat._latest_at -= SILENT_AFTER_S + 1.0
        replica.check()
        assert replica.heartbeat.silent

    async def park(self) -> None:
        self.manager.park("m", asleep=True)
        await self.until(lambda: self.manager.is_parked_asleep("m"))

    async def begin_sleep(self) -> None:
        """Park the model, and wait until its engine has been told to sleep. The test completes the sleep
        later."""
        self.launches[0].slow = True
        self.manager.park("m", asleep=True)
        await self.until(lambda: self.launches[0].asked == [True])

    async def until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await asyncio.sleep(0.002)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    async def find_held(pids: list[int]) -> str:
        return ""

    monkeypatch.setattr(retirement, "find_held", find_held)
    monkeypatch.setattr(background, "_POLL_S", 0.002)
    monkeypatch.setattr(manager_module, "DRAIN_S", WITHIN_S)
    return Site(tmp_path)


def run(site: Site, scenario: Callable[[], Awaitable[None]]) -> None:
    """Run the scenario with a model that is loaded."""

    async def bounded() -> None:
        async with asyncio.timeout(WITHIN_S):
            site.manager.start()
            await site.until(lambda: site.manager.loaded("m"))
            await scenario()

    asyncio.run(bounded())


def test_a_parked_model_sleeps_and_is_woken_in_the_same_processes(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        await site.park()
        assert site.requests.accounts == [] and site.manager.parked_host_bytes() == {"m": 1}
        assert site.manager.load_failure("m") == "" and not site.manager.loaded("m")
        site.manager.unpark("m")
        await site.until(lambda: site.manager.loaded("m") and bool(site.requests.accounts))
        assert len(site.launches) == len(site.requests.accounts) == 1
        assert site.launches[0].asked == [True, False] and site.manager.parked_host_bytes() == {}

    with caplog.at_level("INFO"):
        run(site, scenario)
    assert "m is awake" in caplog.messages


def test_a_model_with_requests_that_take_too_long_is_unloaded_after_one_grace_period(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "DRAIN_S", 0.1)

    async def scenario() -> None:
        site.requests.running = True
        site.manager.park("m", asleep=True)
        await site.until(lambda: not site.manager.replicas)
        assert site.requests.preempted == 1 and site.launches[0].stopped
        assert site.launches[0].asked == [] and not site.manager.is_parked_asleep("m")

    run(site, scenario)


def test_a_model_that_cannot_sleep_is_unloaded(site: Site) -> None:
    async def scenario() -> None:
        site.launches[0].problem = "no host memory"
        site.manager.park("m", asleep=True)
        await site.until(lambda: not site.manager.replicas)
        assert site.launches[0].stopped and site.requests.accounts == []
        assert site.requests.added == 1  # at the model's start

    run(site, scenario)


def test_a_silent_replica_that_reports_again_gets_no_requests_while_its_model_leaves(site: Site) -> None:
    async def scenario() -> None:
        [processes] = site.launches
        processes.slow = site.requests.running = True
        site.manager.park("m", asleep=True)
        await site.until(lambda: not site.requests.accounts)
        site.be_silent()
        processes.report()
        assert site.requests.accounts == []
        site.requests.running = False
        await site.until(lambda: processes.asked == [True])
        site.be_silent()
        processes.finish()
        await site.until(lambda: site.manager.is_parked_asleep("m"))
        assert site.requests.accounts == []
        site.be_silent()
        processes.report()
        assert site.requests.accounts == []
        processes.slow = False
        site.manager.unpark("m")
        await site.until(lambda: site.manager.loaded("m"))
        assert len(site.requests.accounts) == 1

    run(site, scenario)


def test_a_silent_replica_that_reports_again_gets_no_requests_while_a_command_puts_it_to_sleep(
    site: Site,
) -> None:
    async def scenario() -> None:
        [processes] = site.launches
        processes.slow = True
        sleeping = asyncio.ensure_future(site.manager.sleeping.sleep("m"))
        await site.until(lambda: processes.asked == [True])
        site.be_silent()
        processes.finish()
        assert await sleeping == "" and site.requests.accounts == []

    run(site, scenario)


def test_a_silent_replica_that_reports_again_gets_no_requests_while_it_is_stopped(site: Site) -> None:
    async def scenario() -> None:
        site.requests.running = True
        site.manager.park("m")
        await site.until(lambda: not site.requests.accounts)
        site.be_silent()
        site.launches[0].report()
        assert site.requests.accounts == []

    run(site, scenario)


@pytest.mark.parametrize("ended", [True, False])
def test_a_model_that_cannot_wake_is_loaded_again(site: Site, ended: bool) -> None:
    async def scenario() -> None:
        await site.park()
        if ended:
            site.launches[0].kill("killed")
        else:
            site.launches[0].problem = "no device memory"
        site.manager.unpark("m")
        await site.until(lambda: site.manager.loaded("m"))
        assert len(site.launches) == 2 and len(site.requests.accounts) == 1

    run(site, scenario)


def test_a_model_whose_processes_end_while_it_wakes_is_loaded_again(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        await site.park()
        site.launches[0].slow = True
        site.manager.unpark("m")
        await site.until(lambda: site.launches[0].asked == [True, False])
        site.launches[0].kill("killed")
        await site.until(lambda: site.manager.loaded("m"))
        assert len(site.launches) == 2 and len(site.requests.accounts) == 1

    with caplog.at_level("INFO"):
        run(site, scenario)
    assert "m is awake" not in caplog.messages


def test_earlier_restarts_do_not_count_as_failed_loads(site: Site) -> None:
    async def scenario() -> None:
        [replica] = site.manager.replicas
        for number in range(1, 4):
            site.launches[-1].kill("killed")
            replica.retry()
            await site.until(lambda number=number: site.manager.loaded("m") and replica.restarts == number)
        assert await site.manager.sleeping.sleep("m") == ""
        site.launches[-1].kill("killed")
        assert await site.manager.sleeping.wake("m") == ""
        assert site.manager.load_failure("m") == ""
        await site.until(lambda: site.manager.loaded("m"))

    run(site, scenario)


def test_a_model_that_is_unparked_while_its_requests_finish_is_awake_afterwards(site: Site) -> None:
    async def scenario() -> None:
        site.requests.running = True
        site.manager.park("m", asleep=True)
        await site.until(lambda: not site.requests.accounts)
        site.manager.unpark("m")
        site.requests.running = False
        await site.until(lambda: site.launches[0].asked == [True, False])
        await site.until(lambda: site.manager.loaded("m") and bool(site.requests.accounts))
        assert len(site.launches) == 1

    run(site, scenario)


def test_a_model_that_is_unparked_during_long_requests_stays_awake(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manager_module, "DRAIN_S", 1.0)

    async def scenario() -> None:
        site.requests.running = True
        site.manager.park("m", asleep=True)
        await site.until(lambda: not site.requests.accounts)
        site.manager.unpark("m")
        await site.until(lambda: bool(site.requests.accounts))
        assert site.launches[0].asked == [] and site.manager.loaded("m")

    run(site, scenario)


def test_a_model_that_is_unparked_while_its_engine_goes_to_sleep_is_woken_afterwards(site: Site) -> None:
    async def scenario() -> None:
        [processes] = site.launches
        await site.begin_sleep()
        site.manager.unpark("m")
        await asyncio.sleep(0.02)
        assert processes.asked == [True] and not site.manager.loaded("m")
        processes.finish()
        await site.until(lambda: processes.asked == [True, False])
        assert site.requests.accounts == []
        processes.finish()
        await site.until(lambda: site.manager.loaded("m"))
        assert len(site.requests.accounts) == len(site.launches) == 1 and not processes.stopped

    run(site, scenario)


def test_a_model_that_is_parked_again_while_its_engine_wakes_sleeps_afterwards(site: Site) -> None:
    async def scenario() -> None:
        [processes] = site.launches
        await site.park()
        processes.slow = True
        site.manager.unpark("m")
        await site.until(lambda: processes.asked == [True, False])
        site.manager.park("m", asleep=True)
        await asyncio.sleep(0.02)
        assert processes.asked == [True, False]
        processes.finish()
        await site.until(lambda: processes.asked == [True, False, True])
        processes.finish()
        await site.until(lambda: site.manager.is_parked_asleep("m"))
        assert site.requests.accounts == [] and not processes.stopped

    run(site, scenario)


@pytest.mark.parametrize("slow", [False, True])
def test_a_model_that_sleeps_without_a_command_can_stay_asleep_until_it_is_woken(
    site: Site, slow: bool
) -> None:
    async def scenario() -> None:
        assert not await site.manager.stay_asleep("m")
        if slow:
            await site.begin_sleep()
        else:
            await site.park()
        staying = asyncio.ensure_future(site.manager.stay_asleep("m"))
        if slow:
            await asyncio.sleep(0.02)
            assert not staying.done()
            site.launches[0].finish()
            site.launches[0].slow = False
        assert await staying
        assert not site.manager.is_parked("m") and site.manager.parked_host_bytes() == {}
        assert site.manager.replicas[0].sleeping.asleep and site.requests.accounts == []
        assert await site.manager.sleeping.wake("m") == ""
        assert site.manager.loaded("m") and len(site.requests.accounts) == 1

    run(site, scenario)


@pytest.mark.parametrize("change", ["unload", "settings"])
def test_a_model_that_is_unloaded_or_changed_while_its_engine_goes_to_sleep_is_stopped_afterwards(
    site: Site, change: str
) -> None:
    async def scenario() -> None:
        await site.begin_sleep()
        if change == "unload":
            changing = asyncio.ensure_future(site.manager.unload("m", 0.0))
        else:
            settings = msgspec.structs.replace(site.settings.models["m"], kv_blocks=7, required=False)
            site.manager.change({"m": settings}, [])
            changing = asyncio.ensure_future(asyncio.sleep(0))
        await asyncio.sleep(0.02)
        assert not site.launches[0].stopped
        site.launches[0].finish()
        await site.until(lambda: not site.manager.replicas)
        await changing
        assert site.launches[0].stopped and site.launches[0].asked == [True]
        assert ("m" in site.manager.models) == (change == "settings")

    run(site, scenario)


def test_a_sleeping_model_whose_settings_change_is_unloaded(site: Site) -> None:
    async def scenario() -> None:
        await site.park()
        changed = ModelSettings(folder=site.settings.models["m"].folder, kv_blocks=7, required=False)
        site.manager.change({"m": changed}, [])
        await site.until(lambda: not site.manager.replicas)
        assert site.launches[0].stopped and site.manager.is_parked("m")

    run(site, scenario)


def test_waking_needs_the_released_memory_on_the_own_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [DetectedGpu(0, "H200", 100, 30, "9.0"), DetectedGpu(1, "H200", 100, 90, "9.0")]
    monkeypatch.setattr(fit, "find_gpus", lambda: GpuReport(gpus))
    assert fit.shortage_to_wake([([0], 70)]) == fit.MemoryShortage()
    assert fit.shortage_to_wake([([0], 71)]).bytes == 1
    assert fit.shortage_to_wake([([0], 40), ([0], 40)]).bytes == 10
    both = fit.shortage_to_wake([([0, 1], 40)])
    assert both.bytes == 10 and "needs 20 B on GPU 1, but only 10 B are free" in both.reason


def test_a_model_that_was_scaled_up_is_reloaded_with_its_initial_number_of_replicas(site: Site) -> None:
    settings = msgspec.structs.replace(site.settings.models["m"], min_replicas=1, max_replicas=3)
    site.requests.state.models["m"] = SimpleNamespace(
        demand=lambda: 3.0, replica_wait_s=lambda now: 0.0, ttft=SimpleNamespace(p99_s=lambda now: None)
    )

    async def scenario() -> None:
        site.manager.change({"m": settings}, [])
        await site.until(lambda: not site.manager._changes.in_progress("m"))
        site.manager.check()
        await site.until(lambda: len(site.manager.of("m")) == 3)
        site.manager.park("m")
        await site.until(lambda: not site.manager.of("m"))
        site.manager.unpark("m")
        await site.until(lambda: site.manager.loaded("m"))
        assert len(site.manager.of("m")) == 1

    run(site, scenario)
