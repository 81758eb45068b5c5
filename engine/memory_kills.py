"""How many processes of this control group the kernel has killed for lack of memory.

A process that is killed for memory ends by SIGKILL, as one that an operator kills. The counter `oom_kill` of
the control group tells them apart.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

_OWN_GROUPS = Path("/proc/self/cgroup")
_ROOT = Path("/sys/fs/cgroup")


def count_memory_kills(own_groups: Path = _OWN_GROUPS, root: Path = _ROOT) -> int:
    """Return `oom_kill` of this process's control group; 0 where there is no such counter."""
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
    """The files with the counter, of cgroup v1 and v2; not every one exists."""
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/") / "memory.oom_control"
        elif not controllers:
            yield root / path.lstrip("/") / "memory.events"


def memory_kill_note(returncode: int, count_at_start: int) -> str:
    """Return what to add to the message that a process ended so, if the kernel may have killed it for memory;
    else nothing. `count_at_start` is the counter when the process started."""
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
