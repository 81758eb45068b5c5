"""A control group with a memory limit, in which the kernel kills a chosen process for lack of memory."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

V1, V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
TAKES_MEMORY = """
import pathlib, sys, time
counters, taken = pathlib.Path(sys.argv[1]), []
before = counters.read_text()
while counters.read_text() == before and len(taken) < 300:
    taken.append(bytearray(b"x") * (2 << 20))
    time.sleep(0.05)
pathlib.Path(sys.argv[2]).write_text(sys.argv[3])
"""
"""A program that allocates memory until the control group's counters show that a process has been killed, and
then lifts the limit."""


class Group:
    """A control group (cgroup v1 or v2)."""

    def __init__(self) -> None:
        v1 = V1.exists()
        self.folder = (V1 if v1 else V2) / f"appliance-test-{os.getpid()}"
        self.folder.mkdir()
        self.limit = self.folder / ("memory.limit_in_bytes" if v1 else "memory.max")
        self.usage = self.folder / ("memory.usage_in_bytes" if v1 else "memory.current")
        self.counters = self.folder / ("memory.oom_control" if v1 else "memory.events")
        self.unlimited = "-1" if v1 else "max"
        if not (self.limit.exists() and "oom_kill " in self.counters.read_text()):
            self.folder.rmdir()
            raise OSError(f"{self.folder.parent} offers no memory limits")

    def add(self, pid: int) -> None:
        """Move a process into the group. The processes that it starts later are in the group too."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    def kill(self, pid: int, spared: Sequence[int] = ()) -> None:
        """Make the kernel kill this process by allocating memory in another process. First move the processes
        in `spared` out of the group, so that the kernel cannot choose them."""
        for one in spared:
            (self.folder.parent / "cgroup.procs").write_text(str(one))
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        enter = f"echo $$ >{self.folder}/cgroup.procs; echo 900 >/proc/self/oom_score_adj; exec "
        words = [
            sys.executable,
            "-I",
            "-c",
            TAKES_MEMORY,
            str(self.counters),
            str(self.limit),
            self.unlimited,
        ]
        # If memory runs out again before the killed process has exited, the kernel kills the process that
        # allocates memory.
        self.limit.write_text(str(int(self.usage.read_text()) + (20 << 20)))
        try:
            subprocess.run(["sh", "-c", enter + '"$@"', "sh", *words], check=False, timeout=600)
        finally:
            self.limit.write_text(self.unlimited)


@contextmanager
def memory_limit() -> Iterator[Group]:
    """Yield a control group. Its processes must end at the end of the block. If this user cannot create a
    group, skip the test."""
    try:
        made = Group()
        made.limit.write_text(made.unlimited)
    except OSError as error:
        pytest.skip(f"needs a control group with a memory limit that this user can set: {error}")
    yield made
    deadline = time.monotonic() + 60
    while (made.folder / "cgroup.procs").read_text():
        assert time.monotonic() < deadline, "processes are still in the control group"
        time.sleep(0.05)
    made.folder.rmdir()
