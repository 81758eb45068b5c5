"""Counts the processes in this cgroup that the kernel has killed because memory ran out. A process killed by
the OOM killer ends with SIGKILL, like one killed by an operator; the cgroup's `oom_kill` counter
distinguishes the two.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def count_memory_kills(own_groups: Path = _OWN_GROUPS, root: Path = _ROOT) -> int:
    """Return the `oom_kill` counter of this process's cgroup, or 0 if there is none."""
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
    """Yield the files that may contain the `oom_kill` counter, for cgroup v1 and v2."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/") / "memory.oom_control"
        elif not controllers:
            yield root / path.lstrip("/") / "memory.events"


def memory_kill_note(returncode: int, count_at_start: int) -> str:
    """Return a note for an exit message, saying that the OOM killer may have killed the process. The note is
    empty if the process was not killed by SIGKILL, or if the counter is still at `count_at_start`, its value
    when the process started."""
    if returncode != -signal.SIGKILL:
        return ""
    killed = count_memory_kills() - count_at_start
    if killed <= 0:
        return ""
    processes = "a process" if killed == 1 else f"{killed} processes"
    return (
        f"; since it started, the kernel has killed {processes} of the service for lack of memory "
        f"(oom_kill): raise the memory limit (MemoryMax), or reduce the models' memory use"
    )
