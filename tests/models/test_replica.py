"""Tests of a replica with simulated processes: its limits, and its fallback to the CPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from appliance.models import replica as replica_module
from appliance.models import restarts
from appliance.models.placement import GpuPlacement
from appliance.models.replica import Replica
from appliance.models.replica_resources import ReplicaResources
from appliance.models.replica_status import replica_status
from appliance.models.restarts import Restarts
from appliance.models.start_checks import StartChecks
from appliance.models.topology import NO_TOPOLOGY
from appliance.settings import ModelSettings, RestartSettings
from engine.messages import ReplicaSpec
from engine.rank_messages import Fatal, Ready
from tests.models.test_replica_sleep import info


class Simulated:
    """A replica with simulated processes, which records the starts and reports of the replica."""

    def __init__(self, **settings: Any) -> None:
        self.specs: list[ReplicaSpec] = []
        self.problems: list[str] = []
        self.kills = 0
        """Number of processes that the kernel has killed because of the memory limit."""
        self.no_limits = ""
        self.changed = ""
        """How the files differ from their manifest."""
        self.files_check: Callable[[str], str] = lambda unit: self.changed
        nothing: Callable[..., None] = lambda *arguments: None  # noqa: E731
        events: Any = SimpleNamespace(
            replica_starting=nothing,
            replica_changed=nothing,
            replica_problem=lambda replica, description: self.problems.append(description),
        )
        cgroups: Any = SimpleNamespace(
            limit=lambda *arguments: self.no_limits, memory_kills=lambda name: self.kills, remove=nothing
        )
        self.replica = Replica(
            "m",
            ModelSettings(folder="/m", **settings),
            "m-0",
            events,
            resources=ReplicaResources("m-0", GpuPlacement(NO_TOPOLOGY), cgroups, Path("/")),
            hang_timeout_s=1.0,
            load_timeout_s=60.0,
            checks=StartChecks(lambda model, settings: "", lambda unit: self.files_check(unit)),
            restarts=Restarts(RestartSettings),
            launch=self._launch,
        )

    def _launch(self, spec: ReplicaSpec, on_message: Any, on_end: Any) -> Any:
        self.specs.append(spec)
        self.say, self.end = on_message, on_end
        return SimpleNamespace(pids=[7], kill=lambda reason: None)

    async def fail(self, kind: Any, text: str) -> None:
        """Make the load fail, and wait until the replica starts again."""
        starts = len(self.specs)
        self.say(0, Fatal(kind, text))
        self.end("rank 0 (pid 7) exited with status 1")
        async with asyncio.timeout(60):
            while len(self.specs) == starts:
                await asyncio.sleep(0.01)


def test_a_replica_without_its_gpu_falls_back_to_the_cpu_only_if_that_is_configured() -> None:
    async def scenario() -> None:
        allowed = Simulated(device="cuda", cpu_fallback=True)
        allowed.replica.start()
        await allowed.fail("device", "no GPU")
        await allowed.fail("device", "no GPU")
        assert [spec.device for spec in allowed.specs] == ["cuda", "cuda", "cpu"]
        assert allowed.replica.failure == ""
        [degraded] = replica_status(allowed.replica).degraded
        assert degraded.description == "runs on the CPU instead of a GPU: no GPU"
        refused = Simulated(device="cuda")
        refused.replica.start()
        await refused.fail("device", "no GPU")
        refused.say(0, Fatal("device", "no GPU"))
        refused.end("rank 0 (pid 7) exited with status 1")
        assert refused.replica.failure == "no GPU" and replica_status(refused.replica).degraded == []
        await refused.replica.stop(0.0)

    asyncio.run(scenario())


def test_a_file_that_is_corrected_before_the_load_fails_ends_the_delay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restarts, "WATCH_S", 0.01)
    monkeypatch.setattr(restarts, "_RETRY_FIRST_S", 600.0)

    async def scenario() -> None:
        simulated = Simulated()
        simulated.replica.spec = msgspec.structs.replace(simulated.replica.spec, model_path=str(tmp_path))
        simulated.replica.start()
        assert simulated.replica._watch is not None and await simulated.replica._watch._former == set()
        (tmp_path / "config.json").touch()
        await simulated.fail("checkpoint", "config.json does not exist")
        simulated.end("the test is over")
        await simulated.replica.stop(0.0)

    asyncio.run(scenario())


def test_a_replica_that_reaches_its_memory_limit_names_the_limit() -> None:
    async def scenario() -> None:
        simulated = Simulated(memory_limit_gb=2)
        simulated.replica.start()
        simulated.kills = 1
        simulated.end("rank 0 (pid 7) was killed by SIGKILL")
        expected = "rank 0 (pid 7) was killed by SIGKILL; it reached memory_limit_gb = 2"
        assert simulated.replica.last_error == expected and simulated.problems == [expected]
        await simulated.replica.stop(0.0)

    asyncio.run(scenario())


def test_limits_that_cannot_be_applied_are_a_problem_with_its_remedy() -> None:
    async def scenario() -> None:
        simulated = Simulated(cpu_limit=2)
        simulated.no_limits = "cpu_limit and memory_limit_gb have no effect: no cgroup v2"
        simulated.replica.start()
        [degraded] = replica_status(simulated.replica).degraded
        assert degraded.description == simulated.no_limits and "replica-limits.conf" in degraded.remedy
        assert simulated.problems == [simulated.no_limits]

    asyncio.run(scenario())


def test_a_replica_whose_files_have_changed_is_not_restarted_until_they_are_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("appliance.models.replica._CHECK_AGAIN_S", 0.05)

    async def scenario() -> None:
        simulated = Simulated()
        replica = simulated.replica
        replica.start()
        simulated.changed = "/m/model.safetensors has changed since this version was added"
        simulated.end("rank 0 (pid 7) was killed by SIGKILL")
        async with asyncio.timeout(60):
            while replica.state != "failed":
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)  # several checks of the files
        assert len(simulated.specs) == 1 and replica.failure == simulated.changed
        assert simulated.problems == ["rank 0 (pid 7) was killed by SIGKILL", simulated.changed]
        assert replica.retry() and replica.state == "failed"
        simulated.changed = ""
        async with asyncio.timeout(60):
            while len(simulated.specs) == 1:
                await asyncio.sleep(0.01)
        simulated.end("rank 0 (pid 7) was killed by SIGKILL")
        await replica.stop(0.0)

    asyncio.run(scenario())


def test_a_replica_whose_processes_survive_sigkill_stops_within_a_bound(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("appliance.models.replica.KILLED_WITHIN_S", 0.05)

    async def scenario() -> None:
        simulated = Simulated()
        simulated.replica.start()

        async def never_ends(grace_s: float) -> None:
            await asyncio.Event().wait()

        group: Any = simulated.replica.group
        group.stop = never_ends
        async with asyncio.timeout(60):
            await simulated.replica.stop(0.0)
        assert simulated.replica.state == "stopped"
        assert "not all of its processes (7) have exited" in caplog.text

    asyncio.run(scenario())


def test_a_replica_is_refused_if_the_disk_does_not_respond_and_starts_when_it_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("appliance.models.replica._CHECK_AGAIN_S", 0.05)
    released = threading.Event()

    async def scenario() -> None:
        simulated = Simulated()
        replica = simulated.replica

        def check(unit: str) -> str:
            released.wait()
            return ""

        simulated.files_check = check
        replica.start()
        replica.load_timeout_s = 0.05
        simulated.end("rank 0 (pid 7) was killed by SIGKILL")
        async with asyncio.timeout(60):
            while replica.state != "failed":
                await asyncio.sleep(0.01)
        assert "the files in /m could not be read within 0.05 s: check that their disk" in replica.failure
        replica.load_timeout_s = 60.0
        released.set()
        async with asyncio.timeout(60):
            while len(simulated.specs) == 1:
                await asyncio.sleep(0.01)
        simulated.end("rank 0 (pid 7) was killed by SIGKILL")
        await replica.stop(0.0)

    try:
        asyncio.run(scenario())
    finally:
        released.set()


def test_the_requests_of_a_replica_that_cannot_be_killed_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replica_module, "KILLED_WITHIN_S", 0.01)

    async def scenario() -> None:
        simulated, exits = Simulated(), list[str]()
        replica, events = simulated.replica, simulated.replica._events
        events.replica_ready = lambda replica: None  # type: ignore[method-assign]
        events.replica_exited = lambda replica: exits.append(replica.name)  # type: ignore[method-assign]
        replica.start()
        simulated.say(0, Ready(info()))
        assert replica.group is not None
        replica.group.stop = lambda grace_s: asyncio.sleep(60)  # type: ignore
        await replica.stop(0.0)
        assert exits == ["m-0"]
        simulated.end("rank 0 (pid 7) was killed by SIGKILL")
        assert exits == ["m-0"], "its account has already been given up"

    asyncio.run(scenario())
