"""Tests of the model manager with simulated processes: how replicas end, and NVML calls."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.models.fit import MemoryShortage
from appliance.models.manager import ModelManager
from appliance.settings import ModelSettings, Settings
from tests.models.on_demand_site import served

WITHIN_S = 60.0


class Started:
    """A manager whose only model, `m`, has one replica with simulated processes."""

    def __init__(self, folder: Path) -> None:
        self.stopped = 0
        """Number of times that the replica's processes were stopped."""
        self.stop_fails = False
        self.notes: list[str] = []
        nothing: Callable[..., None] = lambda *arguments, **named: None  # noqa: E731
        requests: Any = SimpleNamespace(
            add_model=nothing, state=SimpleNamespace(models={}), replica_restarting=nothing
        )
        channels: Any = SimpleNamespace()
        launch: Any = lambda *arguments: SimpleNamespace(pids=[7], stop=self._stop)  # noqa: E731
        settings = Settings(
            models={"m": ModelSettings(folder=str(folder), device="cpu")}, run_dir=str(folder)
        )
        self.manager = ModelManager(
            lambda: settings,
            [served("m")],
            requests=requests,
            channels=channels,
            publish=nothing,
            note=lambda where, description: self.notes.append(f"{where}: {description}"),
            launch=launch,
            preflight=lambda name, settings: "",
            files_check=lambda unit: "",
            broken={},
        )
        [self.replica] = self.manager.replicas

    async def _stop(self, grace_s: float) -> None:
        self.stopped += 1
        if self.stop_fails:
            raise OSError("no such process")

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not condition():
                await asyncio.sleep(0.005)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Started:
    made = Started(tmp_path)
    nothing: Callable[..., None] = lambda *arguments: None  # noqa: E731
    monkeypatch.setattr(made.manager.connections, "replica_starting", nothing)
    monkeypatch.setattr(made.replica.resources, "limit", nothing)
    return made


def test_a_unit_whose_memory_was_returned_late_is_no_longer_reported(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = ["process 7 still exists"]

    async def find_held(pids: list[int]) -> str:
        assert pids == [7]
        return held[0]

    monkeypatch.setattr("appliance.models.retirement.find_held", find_held)
    monkeypatch.setattr("appliance.models.retirement._RETURNED_AGAIN_S", 0.005)

    async def scenario() -> None:
        started.manager.start()
        started.manager.park("m")
        await started.until(lambda: not started.manager.replicas)
        assert started.stopped == 1
        assert started.notes == ["m-0: process 7 still exists"]
        await asyncio.sleep(0.05)  # several checks
        assert started.manager.retirements.unreturned == {"m": "process 7 still exists"}
        held[0] = ""
        await started.until(lambda: not started.manager.retirements.unreturned)

    asyncio.run(scenario())


def test_a_replica_that_cannot_be_stopped_is_removed(started: Started) -> None:
    started.stop_fails = True

    async def scenario() -> None:
        started.manager.start()
        started.manager.park("m")
        await started.until(lambda: not started.manager.replicas)
        assert started.stopped == 1
        await started.until(lambda: bool(started.notes))
        assert "failed to apply the new settings" in started.notes[0]

    asyncio.run(scenario())


def test_gpus_are_not_read_on_the_event_loop(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[threading.Thread] = []

    def choose(count: int) -> list[int]:
        threads.append(threading.current_thread())
        return []

    monkeypatch.setattr(started.manager._placement, "choose", choose)
    asyncio.run(started.manager.shortage(ModelSettings(folder="/no/such/folder", device="cpu")))
    assert len(threads) == 1 and threads[0] is not threading.current_thread()


def test_a_load_checks_the_memory_of_all_replicas_that_it_starts(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []

    def shortage_beside(model: ModelSettings, chosen: object, count: int, **others: object) -> MemoryShortage:
        counts.append(count)
        return MemoryShortage()

    monkeypatch.setattr("appliance.models.manager.shortage_beside", shortage_beside)
    for replicas, least, most in ((2, 1, 4), (1, 2, 4), (3, 1, 2), (3, None, None)):
        settings = ModelSettings(folder="/m", replicas=replicas, min_replicas=least, max_replicas=most)
        asyncio.run(started.manager.shortage(settings))
    assert counts == [2, 2, 2, 3]
