"""Tests of a replica's sleep, with simulated processes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.models.cgroups import ReplicaCgroups
from appliance.models.placement import GpuPlacement
from appliance.models.replica import Replica
from appliance.models.replica_resources import ReplicaResources
from appliance.models.replica_status import replica_detail, replica_status
from appliance.models.restarts import Restarts
from appliance.models.start_checks import StartChecks
from appliance.models.topology import NO_TOPOLOGY
from appliance.models.unit_sleep import UnitSleep
from appliance.settings import ModelSettings, RestartSettings
from engine.messages import ReplicaInfo
from engine.rank_messages import MemoryChanged, Ready

WITHIN_S = 60.0
SLEPT = MemoryChanged(True, freed_bytes=3 << 20, host_bytes=2 << 20, seconds=0.5)


class Processes:
    """The processes of a replica. The test determines how they answer."""

    def __init__(self, on_message: Callable[[int, Any], None], on_end: Callable[[str], None]) -> None:
        self._on_message, self._on_end = on_message, on_end
        self.pids = [1]
        self.asked: list[bool] = []
        self.answers: list[MemoryChanged] = []

    def change_memory(self, asleep: bool) -> None:
        self.asked.append(asleep)
        if self.answers:
            self._on_message(0, self.answers.pop(0))

    def ready(self) -> None:
        self._on_message(0, Ready(info()))

    def kill(self, reason: str) -> None:
        self._on_end(reason)


class Events:
    """Ignores the events of a replica."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


def info() -> ReplicaInfo:
    numbers = dict.fromkeys(
        (
            *("parameters", "weight_bytes", "kv_bytes", "kv_blocks", "max_num_seqs", "max_model_len"),
            *("max_num_batched_tokens", "vocab_size", "predicted_bytes", "used_bytes"),
        ),
        1,
    )
    texts = dict.fromkeys(("replica", "model_type", "backend"), "x")
    texts |= dict.fromkeys(("dtype", "weights", "kv_cache_dtype"), "float32")
    return ReplicaInfo(**numbers, **texts, devices=["cpu"], tensor_parallel_size=1, load_seconds=1.0)


class Started:
    """A ready replica. `launches` contains the processes of each of its starts."""

    def __init__(self, load_timeout_s: float = WITHIN_S, name: str = "m-0") -> None:
        self.launches: list[Processes] = []

        def launch(spec: Any, on_message: Any, on_end: Any) -> Any:
            self.launches.append(Processes(on_message, on_end))
            return self.launches[-1]

        self.replica = Replica(
            "m",
            ModelSettings(folder="/m"),
            name,
            Events(),  # type: ignore[arg-type]
            resources=ReplicaResources(name, GpuPlacement(NO_TOPOLOGY), ReplicaCgroups(list), Path("/tmp")),
            hang_timeout_s=WITHIN_S,
            load_timeout_s=load_timeout_s,
            checks=StartChecks(lambda name, settings: "", lambda unit: ""),
            restarts=Restarts(RestartSettings),
            launch=launch,
        )
        self.replica.start()
        self.launches[0].ready()

    @property
    def processes(self) -> Processes:
        return self.launches[-1]

    async def sleep(self) -> None:
        self.processes.answers.append(SLEPT)
        assert await self.replica.sleep() == ""


def run(scenario: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(WITHIN_S):
            await scenario()

    asyncio.run(bounded())


def test_a_sleeping_replica_gets_no_requests_and_shows_what_it_has_released() -> None:
    async def scenario() -> None:
        started = Started()
        replica = started.replica
        assert replica.answers and replica.operator_state == "ready"
        await started.sleep()
        status = replica_status(replica)
        assert not replica.answers and status.state == "sleeping"
        assert (status.freed_bytes, status.host_bytes, status.sleeps, status.wakes) == (
            3 << 20,
            2 << 20,
            1,
            0,
        )
        assert status.detail == "asleep for 0 min, 3.0 MiB released; weights in host memory: 2.0 MiB"
        started.processes.answers.append(MemoryChanged(False, seconds=0.25))
        assert await replica.wake() == ""
        status = replica_status(replica)
        assert replica.answers and status.state == "ready"
        assert (status.freed_bytes, status.host_bytes, status.wakes, status.wake_s) == (0, 0, 1, 0.25)
        assert await replica.wake() == "" and started.processes.asked == [True, False]

    run(scenario)


def test_the_reason_of_a_replica_that_cannot_sleep_or_wake_is_returned() -> None:
    async def scenario() -> None:
        started = Started()
        started.processes.answers.append(MemoryChanged(False, problem="no host memory"))
        assert await started.replica.sleep() == "no host memory"
        assert started.replica.answers and replica_status(started.replica).sleeps == 0
        await started.sleep()
        started.processes.answers.append(MemoryChanged(True, problem="no device memory"))
        assert await started.replica.wake() == "no device memory"
        status = replica_status(started.replica)
        assert status.state == "sleeping" and status.freed_bytes == 3 << 20 and status.wakes == 0

    run(scenario)


def test_a_replica_that_does_not_answer_is_killed() -> None:
    async def scenario() -> None:
        started = Started(load_timeout_s=0.1)
        assert await started.replica.sleep() == "it did not go to sleep within 0.1 s"
        assert started.replica.state == "restarting"
        started.replica.start()
        started.processes.ready()
        started.replica.load_timeout_s = WITHIN_S
        await started.sleep()
        started.replica.load_timeout_s = 0.1
        assert await started.replica.wake() == "it did not wake within 0.1 s"
        # The replica is loading again, so it is no longer asleep.
        assert started.replica.operator_state == "restarting"

    run(scenario)


def test_the_time_to_go_to_sleep_is_bounded_although_a_load_may_take_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("appliance.models.replica._SLEEP_WITHIN_S", 0.1)

    async def scenario() -> None:
        assert await Started().replica.sleep() == "it did not go to sleep within 0.1 s"

    run(scenario)


def test_a_replica_that_dies_in_its_sleep_starts_only_when_it_is_woken() -> None:
    async def scenario() -> None:
        started = Started()
        await started.sleep()
        started.processes.kill("killed by SIGKILL")
        await asyncio.sleep(0.2)
        assert started.replica.operator_state == "sleeping" and len(started.launches) == 1
        assert replica_status(started.replica).freed_bytes == 0
        assert "have exited" in replica_detail(started.replica)
        assert await started.replica.wake() == ""
        assert started.replica.operator_state == "starting" and len(started.launches) == 2
        started.processes.ready()
        assert started.replica.answers

    run(scenario)


def test_a_replica_that_dies_while_it_wakes_is_started_again() -> None:
    async def scenario() -> None:
        started = Started()
        await started.sleep()
        waking = asyncio.ensure_future(started.replica.wake())
        await asyncio.sleep(0)
        started.processes.kill("killed by SIGKILL")
        assert await waking == "killed by SIGKILL"
        assert started.replica.operator_state == "restarting"

    run(scenario)


class Accounts:
    """Records the replica accounts to which requests may be dispatched."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def add_replica(self, account: Any) -> None:
        self.names.append(account.replica)

    def retire_replica(self, account: Any) -> None:
        if account.replica in self.names:
            self.names.remove(account.replica)


class Unit:
    """A unit with two ready replicas."""

    def __init__(self) -> None:
        self.accounts = Accounts()
        self.started = [Started(), Started(name="m-1")]
        for started in self.started:
            self.accounts.add_replica(started.replica.account)
        self.sleep = UnitSleep(lambda unit: [one.replica for one in self.started], self._update, lambda: None)

    def _update(self, replica: Replica) -> None:
        self.accounts.retire_replica(replica.account)
        if replica.answers:
            self.accounts.add_replica(replica.account)

    def answer(self, *answers: MemoryChanged) -> None:
        for started, answer in zip(self.started, answers, strict=True):
            started.processes.answers.append(answer)


def test_all_replicas_of_a_unit_sleep_and_get_requests_when_they_are_awake() -> None:
    async def scenario() -> None:
        unit = Unit()
        unit.answer(SLEPT, SLEPT)
        assert await unit.sleep.sleep("m") == "" and unit.accounts.names == []
        unit.answer(MemoryChanged(False), MemoryChanged(False))
        assert await unit.sleep.wake("m") == "" and unit.accounts.names == ["m-0", "m-1"]

    run(scenario)


def test_if_one_replica_cannot_sleep_no_replica_gets_requests_until_the_unit_is_woken() -> None:
    async def scenario() -> None:
        unit = Unit()
        unit.answer(SLEPT, MemoryChanged(False, problem="no host memory"))
        unit.started[0].processes.answers.append(MemoryChanged(False))
        assert await unit.sleep.sleep("m") == "no host memory"
        assert unit.accounts.names == []
        assert await unit.sleep.wake("m") == ""
        assert unit.accounts.names == ["m-0", "m-1"]
        assert all(one.replica.answers for one in unit.started)

    run(scenario)


def test_if_one_replica_cannot_wake_all_replicas_stay_asleep() -> None:
    async def scenario() -> None:
        unit = Unit()
        unit.answer(SLEPT, SLEPT)
        assert await unit.sleep.sleep("m") == ""
        unit.answer(MemoryChanged(False), MemoryChanged(True, problem="no device memory"))
        unit.started[0].processes.answers.append(SLEPT)
        assert await unit.sleep.wake("m") == "no device memory"
        assert unit.accounts.names == []
        assert all(one.replica.sleeping.asleep for one in unit.started)

    run(scenario)
