"""Tests of how the core manages fronts: failed starts, the choice of a front, and reports to operators."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import resource
import select
import socket
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest

from appliance.admin.current_problems import _front
from appliance.channel.core_messages import ClientConnection, Configure, Identities
from appliance.channel.front_messages import FrontReport
from appliance.channel.front_settings import Limits
from appliance.channel.identity import Identity
from appliance.front.capacity import RESERVED_DESCRIPTORS
from appliance.front_pool import front as front_module
from appliance.front_pool import front_child
from appliance.front_pool.balancer import ConnectionBalancer
from appliance.front_pool.front import Front, Untaken
from appliance.front_pool.refusals import RefusalWatch
from tests.waiting import until

pytestmark = pytest.mark.system


def too_many(*words: object, **options: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Events:
    """Records fronts' events and ignores their messages."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.ready = asyncio.Event()

    def front_started(self, front: Front) -> None:
        front.configure(Configure(front=front.name, models=[], limits=Limits(), ready=False, reason=""))

    def front_available(self, front: Front) -> None:
        if front.state == "ready":
            self.ready.set()

    def front_problem(self, front: Front, description: str) -> None:
        self.problems.append(description)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *words: None


def held() -> set[str]:
    """Return this process's open descriptors and its child processes. Some of them may belong to earlier
    tests and disappear at any time."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {f"descriptor {name}" for name in os.listdir("/proc/self/fd")} | {
        f"child {pid}" for pid in children
    }


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (front_child, "socketpair", "the front process could not be started"),
        (subprocess, "Popen", "the front process could not be started"),
        (os, "pidfd_open", "the front process could not be started"),
        (Events, "front_started", "its channels could not be created"),
    ],
)
def test_a_failed_start_of_a_front_releases_everything_and_is_retried(
    owner: Any, name: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        events: Any = Events()
        front = Front(0, events, hang_timeout_s=60, load_timeout_s=60, module="tests.core.fake_front")
        gc.collect()
        before = held()
        with monkeypatch.context() as shortage:
            shortage.setattr(owner, name, too_many)
            front.start()
            await front.ended()
            assert (front.state, front.pid, front.restarts) == ("restarting", None, 1)
            assert said in front.last_error and "Too many open files" in front.last_error
            assert events.problems == [front.last_error]
            assert held() <= before
        async with asyncio.timeout(60):
            await events.ready.wait()
        assert front.state == "ready"
        front.begin_stop(0.0)
        await front.ended()
        assert held() <= before

    asyncio.run(scenario())


def test_a_front_that_never_becomes_ready_is_a_problem_and_is_killed() -> None:
    class Unconfigured(Events):
        """A stand-in for the core that sends no configuration to its front, so the front sends reports but
        never becomes ready."""

        def front_started(self, front: Front) -> None: ...

    async def scenario() -> None:
        events: Any = Unconfigured()
        front = Front(0, events, hang_timeout_s=600, load_timeout_s=600, module="tests.core.fake_front")
        front.start()
        async with asyncio.timeout(60):
            while front._report is None:
                await asyncio.sleep(0.01)
        assert not list(_front(front.status()))
        front._started_at -= 100
        (problem,) = _front(front.status())
        assert problem.description.startswith("starting for") and problem.remedy
        assert (problem.where, "models' tokenizers" in problem.description) == ("front-0", True)
        front.check()
        assert front.state == "starting"
        front._started_at -= 600
        front.check()
        await front.ended()
        assert "it was not ready" in front.last_error and front.state == "restarting"
        front.begin_stop(0.0)

    asyncio.run(scenario())


def test_an_exit_is_noticed_even_if_the_last_messages_cannot_be_processed() -> None:
    class Failing(Events):
        def front_available(self, front: Front) -> None:
            raise RuntimeError("this message cannot be processed")

    async def scenario() -> None:
        events: Any = Failing()
        front = Front(0, events, hang_timeout_s=600, load_timeout_s=600, module="tests.core.fake_front")
        front.start()
        child = front._child
        assert child is not None
        select.select([child.channel], [], [], 60)
        child.kill("by the test")
        select.select([child._pidfd], [], [], 60)
        child._exited()
        assert front.state == "restarting" and "by the test" in front.last_error
        front.begin_stop(0.0)

    asyncio.run(scenario())


@pytest.mark.parametrize("limit", [1024, 80])
def test_a_front_that_takes_no_connections_is_given_a_bounded_number(
    limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))

    async def scenario(front: Front, process: psutil.Process) -> None:
        given = 0
        while front.takes_connections:
            front.give(connection())
            given += 1
        assert given == min(front_module._MAX_UNTAKEN, limit // 8)
        process.resume()
        await until(lambda: front.takes_connections)

    with_stopped_front(scenario, monkeypatch)


def test_a_front_keeps_enough_descriptors_free_for_the_connections_that_it_is_given() -> None:
    # The message carries one descriptor for each connection that is handed over, and one for each closed
    # connection that a new one replaces.
    assert 2 * front_module._MAX_UNTAKEN < RESERVED_DESCRIPTORS


def test_a_front_that_reads_nothing_is_given_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(front: Front, process: psutil.Process) -> None:
        sent = 0
        while front.takes_connections:
            front.send(Identities(keys={"k" * 1000: Identity(tenant="t")}, uids={}, any_uid=None))
            sent += 1
            assert sent < 10_000
        assert sent * 1000 > front_module._MAX_UNREAD_BYTES
        process.resume()
        await until(lambda: front.takes_connections)

    with_stopped_front(scenario, monkeypatch)


def with_stopped_front(
    scenario: Callable[[Front, psutil.Process], Awaitable[None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run the scenario with a ready front whose process is stopped. The core does not react to the process's
    silence."""
    monkeypatch.setattr(front_module, "_QUIET_S", 600.0)

    async def main() -> None:
        events: Any = Events()
        front = Front(0, events, hang_timeout_s=600, load_timeout_s=600, module="tests.core.fake_front")
        front.start()
        try:
            async with asyncio.timeout(120):
                await events.ready.wait()
                process = psutil.Process(front.pid)
                process.suspend()
                await scenario(front, process)
        finally:
            front.begin_stop(0.0)
            front.kill("the test is over")
            await front.ended()

    asyncio.run(main())


class Full(Front):
    """A front that can be marked as full."""

    def __init__(self, number: int, *, capacity: bool) -> None:
        super().__init__(number, Events(), hang_timeout_s=60, load_timeout_s=60)  # type: ignore[arg-type]
        self.capacity, self.got, self.fails = capacity, 0, False

    takes_connections = True

    @property
    def has_capacity(self) -> bool:
        return self.capacity

    def give(self, untaken: Untaken) -> None:
        if self.fails:
            too_many()
        untaken.close()
        self.got += 1


def connection() -> Untaken:
    """Return a connection with a descriptor."""
    return Untaken(ClientConnection(""), [socket.socket().detach()])


def note(location: str, problem: str) -> None:
    """Ignore a problem."""


def test_full_fronts_are_skipped_while_another_one_has_capacity() -> None:
    async def scenario() -> None:
        full, free = Full(0, capacity=False), Full(1, capacity=True)
        balancer = ConnectionBalancer([full, free], note)
        balancer.assign(*(connection() for _ in range(4)))
        assert (full.got, free.got) == (0, 4)
        free.capacity = False
        balancer.assign(*(connection() for _ in range(4)))
        assert (full.got, free.got) == (2, 6)

    asyncio.run(scenario())


def test_fronts_share_new_connections_after_a_pause_of_the_core(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("appliance.front_pool.front.time.monotonic", lambda: now[0])

    async def scenario() -> None:
        events: Any = Events()
        fronts = [Front(number, events, hang_timeout_s=600, load_timeout_s=600) for number in range(2)]
        for front in fronts:
            front.state, front._child = "ready", MagicMock()
            front._child.channel.backlog_bytes = 0
            front._message(report())
        now[0] += 30.0
        fronts[0]._message(report())
        connections = [connection() for _ in range(4)]
        ConnectionBalancer(fronts, note).assign(*connections)
        assert [len(front.take_back()) for front in fronts] == [2, 2]
        for one in connections:
            one.close()
        fronts[1].check()
        assert [front.takes_connections for front in fronts] == [True, False]

    asyncio.run(scenario())


def test_connections_wait_while_no_front_takes_any(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        front = Full(0, capacity=True)
        balancer = ConnectionBalancer([front], note)
        before = held()
        with monkeypatch.context() as closed:
            closed.setattr(Full, "takes_connections", False)
            balancer.assign(connection())
            balancer.assign()
            assert front.got == 0
        balancer.assign()
        assert front.got == 1
        assert held() <= before

    asyncio.run(scenario())


def test_connections_keep_waiting_while_too_many_files_are_open() -> None:
    async def scenario() -> None:
        front = Full(0, capacity=True)
        problems: list[str] = []
        balancer = ConnectionBalancer([front], lambda where, description: problems.append(description))
        before = held()
        front.fails = True
        for _ in range(3):
            balancer.assign(connection())
        assert front.got == 0
        assert not balancer.open
        front.fails = False
        balancer.assign()
        assert front.got == 3
        assert balancer.open
        (problem,) = problems
        assert "raise the open file limit" in problem
        assert held() <= before

    asyncio.run(scenario())


def report(**counts: int) -> FrontReport:
    return FrontReport(
        connections=0, streams=0, requests=0, tokens=0, cpu_seconds=0.0, **({"unauthenticated": 0} | counts)
    )


def test_refusals_are_reported_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("appliance.front_pool.refusals.time.monotonic", lambda: now[0])
    watch = RefusalWatch()
    assert not list(watch.problems(report()))
    (told,) = watch.problems(report(refused_connections=1, max_connections=40))
    assert "the limit of 40 connections," in told
    assert not list(watch.problems(report(refused_connections=9)))
    assert not list(watch.problems(report(refused_connections=9, unauthenticated=99)))
    (told,) = watch.problems(report(refused_connections=9, unauthenticated=100))
    assert "no valid key" in told
    now[0] += 61
    assert not list(watch.problems(report(refused_connections=9, unauthenticated=150)))
    (told,) = watch.problems(report(refused_connections=10, unauthenticated=150))
    assert "connections are refused" in told
    (told,) = watch.problems(report(refused_connections=10, unauthenticated=150, cut_off_connections=3))
    assert "did not read the responses" in told
    counts = {"refused_connections": 10, "unauthenticated": 150, "cut_off_connections": 4}
    assert not list(watch.problems(report(**counts)))
    (told,) = watch.problems(report(**counts, unreceived_connections=1))
    assert "raise the open file limit" in told
