"""Tests of the delays before restarts, of the circuit breaker, and of starts after files have changed."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from appliance.models import restarts as module
from appliance.models.replica_connections import ReplicaConnections
from appliance.models.restarts import Exit, Restarts, StartTimer, Watch
from appliance.settings import RestartSettings

RULES = RestartSettings(max_deaths=3, window_s=60.0, retry_s=300.0)
KILLED = "rank 0 (pid 7) was killed by SIGKILL"


def killed(served_s: float | None) -> Exit:
    return Exit(KILLED, None, served_s)


@pytest.fixture
def restarts() -> Restarts:
    return Restarts(lambda: RULES, draw=lambda: 0.5)


def test_the_breaker_opens_after_repeated_deaths_and_says_why(restarts: Restarts) -> None:
    assert restarts.exited(killed(100.0)).delay_s == pytest.approx(0.1)
    assert restarts.exited(killed(20.0)) == (pytest.approx(0.2), "", False)
    assert restarts.breaker(True, 0.0) == "closed"
    opened = restarts.exited(killed(20.0))
    assert restarts.breaker(True, 0.0) == "open"
    assert opened.delay_s == RULES.retry_s
    assert "exited 3 times within 60 s" in opened.failure and KILLED in opened.failure


def test_deaths_outside_the_window_never_open_the_breaker(restarts: Restarts) -> None:
    for _ in range(20):
        assert not restarts.exited(killed(31.0)).failure
    assert restarts.breaker(True, 0.0) == "closed" and restarts.deaths(0.0) == 2


def test_a_replica_that_never_becomes_ready_opens_the_breaker_however_long_its_loads_take(
    restarts: Restarts,
) -> None:
    assert [bool(restarts.exited(killed(None)).failure) for _ in range(3)] == [False, False, True]


def test_a_death_in_the_half_open_state_opens_the_breaker_again(restarts: Restarts) -> None:
    for _ in range(3):
        restarts.exited(killed(1.0))
    restarts.ready()
    assert restarts.breaker(False, 59.0) == "half-open"
    assert "exited again within 60 s" in restarts.exited(killed(59.0)).failure


def test_the_breaker_closes_after_a_window_of_service(restarts: Restarts) -> None:
    for _ in range(3):
        restarts.exited(killed(1.0))
    assert restarts.breaker(False, 60.0) == "closed" and restarts.deaths(60.0) == 0
    assert not restarts.exited(killed(60.0)).failure


def test_a_reset_closes_the_breaker(restarts: Restarts) -> None:
    for _ in range(3):
        restarts.exited(killed(1.0))
    restarts.reset()
    assert restarts.breaker(True, 0.0) == "closed" and restarts.deaths(0.0) == 0
    assert restarts.exited(killed(1.0)) == (pytest.approx(0.1), "", False)


def test_a_bad_checkpoint_fails_at_once_and_missing_memory_at_the_second_start(restarts: Restarts) -> None:
    assert restarts.exited(Exit("no shard", "checkpoint", None)) == (pytest.approx(5.0), "no shard", True)
    restarts.ready()
    assert restarts.exited(Exit("3 blocks", "memory", None)).failure == ""
    second = restarts.exited(Exit("3 blocks", "memory", None))
    assert (second.failure, second.bad_checkpoint) == ("3 blocks", False)
    assert restarts.breaker(True, 0.0) == "closed" and restarts.deaths(0.0) == 0


def test_a_start_waits_for_its_delay_unless_the_files_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.01)

    async def scenario() -> None:
        timer, begun, changed = StartTimer(), asyncio.Event(), asyncio.Event()
        watch = Watch(str(tmp_path), changed.set)
        timer.start(3600.0, begun.set, watch)
        assert not await watch.has_changed()
        await asyncio.sleep(0.2)
        assert 3500.0 < timer.left_s < 3600.0 and not begun.is_set()
        (tmp_path / "config.json").touch()
        async with asyncio.timeout(60):
            await begun.wait()
        assert changed.is_set()

        begun.clear(), changed.clear()
        timer.start(0.02, begun.set, Watch(str(tmp_path), changed.set))
        async with asyncio.timeout(60):
            await begun.wait()
        assert not changed.is_set()

        begun.clear()
        timer.start(0.02, begun.set)
        timer.stop()
        await asyncio.sleep(0.2)
        assert not begun.is_set()

    asyncio.run(scenario())


def test_a_model_disk_that_does_not_respond_blocks_no_shared_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    released, nothing = threading.Event(), cast(Any, None)

    def hangs(*arguments: object) -> None:
        released.wait()

    monkeypatch.setattr(module, "_files", hangs)
    monkeypatch.setattr("appliance.models.replica_connections.describe", hangs)

    async def scenario() -> None:
        asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
        Watch("/m", lambda: None)
        connections = ReplicaConnections({}, *[nothing] * 5)
        replica: Any = SimpleNamespace(model="m", settings=None, incarnation=1, load_timeout_s=60.0)
        connections.replica_starting(replica)
        await asyncio.sleep(0)
        try:
            await asyncio.wait_for(asyncio.to_thread(int), 5.0)
        finally:
            released.set()

    asyncio.run(scenario())
