"""Tests of the check that a replica's memory was freed, with real processes and simulated GPUs."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.models.freed_memory import find_held, held_reason


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[str]]:
    """Start a process that leads a session and has a child process. The child's id is the first line of its
    output."""
    script = (
        "import subprocess; child = subprocess.Popen(['sleep', '600']); "
        "print(child.pid, flush=True); child.wait()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    yield process
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdout is not None
    process.stdout.close()


def test_processes_that_still_exist_are_named(rank: subprocess.Popen[str]) -> None:
    assert rank.stdout is not None
    child = int(rank.stdout.readline())
    reason = held_reason([rank.pid], 0.0)
    assert f"{rank.pid} (state " in reason and f"{child} (state " in reason
    rank.kill()
    rank.wait()
    assert f"were killed but still exist: {child} (state " in held_reason([rank.pid], 0.0)
    os.kill(child, signal.SIGKILL)
    assert held_reason([rank.pid], 60.0) == ""


def test_a_process_whose_main_thread_has_ended_but_not_its_other_threads_is_named() -> None:
    script = (
        "import ctypes, platform, threading, time; "
        "threading.Thread(target=time.sleep, args=(600,)).start(); "
        "exit_thread = {'x86_64': 60, 'aarch64': 93}[platform.machine()]; "
        "ctypes.CDLL(None).syscall(exit_thread, 0)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], start_new_session=True)
    try:
        deadline = time.monotonic() + 60
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert f"{process.pid} (state Z)" in held_reason([process.pid], 0.0)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert held_reason([process.pid], 0.0) == ""  # a zombie without threads
    process.wait()


def test_a_gpu_that_still_has_memory_of_an_ended_rank_is_reported() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    listed = {0: {1}, 1: {1, ended.pid}}
    reason = held_reason([ended.pid], 0.0, lambda: listed)
    assert f"the memory of GPU 1 was not freed: the driver still lists process {ended.pid}" in reason
    assert held_reason([], 0.0, lambda: listed) == ""
    listed[1] = {1}
    assert held_reason([ended.pid], 0.0, lambda: listed) == ""


def test_the_check_waits_for_memory_that_is_returned_late() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    reads = iter([{ended.pid}, {ended.pid}, {ended.pid}, {1}])
    assert held_reason([ended.pid], 60.0, lambda: {0: next(reads)}) == ""
    assert next(reads, None) is None


def test_a_check_that_hangs_or_fails_ends_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.models.freed_memory._CHECKED_WITHIN_S", 0.05)
    released = threading.Event()
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()

    def hangs() -> dict[int, set[int]]:
        released.wait()
        return {}

    def fails() -> dict[int, set[int]]:
        raise OSError("the driver was removed")

    async def scenario() -> None:
        async with asyncio.timeout(60):
            assert "the GPU driver did not respond within 0.05 s" in await find_held([ended.pid], hangs)
            monkeypatch.setattr("appliance.models.freed_memory._CHECKED_WITHIN_S", 60.0)
            reason = await find_held([ended.pid], fails)
            assert "not known whether their memory was freed: the driver was removed" in reason

    try:
        asyncio.run(scenario())
    finally:
        released.set()
