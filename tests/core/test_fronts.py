"""A front's start when this process has no descriptors, memory or processes left: it is tried again."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from appliance import fronts
from appliance.fronts import Front
from appliance.messages import Configure, Limits

pytestmark = pytest.mark.system


def too_many(*words: object, **options: object) -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


class Events:
    """Who is told; what is asked of a front needs nobody's answer here."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.ready = asyncio.Event()

    def front_started(self, front: Front) -> None:
        front.configure(Configure(front=front.name, models=[], limits=Limits(), ready=False, reason=""))

    def front_ready(self, front: Front) -> None:
        self.ready.set()

    def front_problem(self, front: Front, what: str) -> None:
        self.problems.append(what)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *words: None


def held() -> tuple[list[str], str]:
    """This process's descriptors and children."""
    return sorted(os.listdir("/proc/self/fd")), Path(f"/proc/self/task/{os.getpid()}/children").read_text()


@pytest.mark.parametrize(
    ("owner", "name", "said"),
    [
        (fronts, "socketpair", "it could not be started"),
        (subprocess, "Popen", "it could not be started"),
        (os, "pidfd_open", "it could not be started"),
        (Events, "front_started", "its channels could not be made"),
    ],
)
def test_a_front_that_cannot_be_started_leaves_nothing_behind_and_is_tried_again(
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
            assert held() == before
        async with asyncio.timeout(60):
            await events.ready.wait()
        assert front.state == "ready"
        front.begin_stop(0.0)
        await front.ended()
        assert held() == before

    asyncio.run(scenario())
