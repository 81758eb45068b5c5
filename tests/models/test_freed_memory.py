"""Tests of the check that a replica's memory was returned, with real processes and simulated GPUs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

from appliance.models.freed_memory import HeldMemory, held_memory, why_held

GIB = 1 << 30


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
    held = held_memory([rank.pid], [], 0)
    why = why_held(held, 0.0)
    assert f"{rank.pid} (state " in why and f"{child} (state S)" in why
    rank.kill()
    rank.wait()
    assert f"still exist although they were killed: {child} (state S): " in why_held(held, 0.0)
    os.kill(child, signal.SIGKILL)
    assert why_held(held, 60.0) == ""


def test_memory_that_a_gpu_still_has_in_use_is_reported() -> None:
    used: dict[int, int] = {0: 1 * GIB, 1: 71 * GIB, 2: 75 * GIB}

    def read() -> Mapping[int, int]:
        return dict(used)

    held = held_memory([], [1, 2], 70 * GIB, read)
    assert held == HeldMemory([], {1: 8 * GIB, 2: 12 * GIB})
    used |= {1: 1 * GIB}
    why = why_held(held, 0.0, read)
    assert "the memory of GPU 2 was not returned: 75.0 GiB are in use" in why and "at most 12.0 GiB" in why
    used |= {2: 6 * GIB}
    assert why_held(held, 0.0, read) == ""


def test_the_check_waits_for_memory_that_is_returned_late() -> None:
    reads = iter([71 * GIB, 71 * GIB, 71 * GIB, 1 * GIB])
    held = HeldMemory([], {0: 8 * GIB})
    assert why_held(held, 60.0, lambda: {0: next(reads)}) == ""
    assert next(reads, None) is None
