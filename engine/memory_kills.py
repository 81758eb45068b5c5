"""Counts the processes of this control group that the kernel has killed for lack of memory.

A process that the kernel kills for lack of memory ends by SIGKILL, as does a process that an operator kills.
The counter `oom_kill` of the control group tells the two apart.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def count_memory_kills(own_groups: Path = _OWN_GROUPS, root: Path = _ROOT) -> int:
    """Return `oom_kill` of this process's control group; 0 if the counter does not exist."""
    try:
        lines = own_groups.read_text().splitlines()
    except OSError:
        return 0
    for counters in _counter_files(lines, root):
        try:
            fields = [line.split() for line in counters.read_text().splitlines()]
        except OSError:
            continue
        return next((int(field[1]) for field in fields if field[0] == "oom_kill"), 0)
    return 0


def _counter_files(lines: list[str], root: Path) -> Iterator[Path]:
    """The files that may hold the counter, of cgroup v1 and v2."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/") / "memory.oom_control"
        elif not controllers:
            yield root / path.lstrip("/") / "memory.events"


def memory_kill_note(returncode: int, count_at_start: int) -> str:
    """Return a suffix for the message that a process ended: it says that the kernel may have killed the
    process for lack of memory. Empty if the kernel killed none. `count_at_start` is the counter's value when
    the process started."""
    if returncode != -signal.SIGKILL:
        return ""
    killed = count_memory_kills() - count_at_start
    if killed <= 0:
        return ""
    processes = "a process" if killed == 1 else f"{killed} processes"
    return (
        f"; since it started, the kernel has killed {processes} of the service for lack of memory "
        f"(oom_kill): raise the memory limit (MemoryMax), or let the models use less"
    )
