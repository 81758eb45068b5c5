"""Limits replicas' CPU time and memory with control groups (cgroup v2).

The service manager must delegate the service's own cgroup to the service; systemd does so with `Delegate=`.
The service then creates this tree below its cgroup:

    service/        the core, the fronts and replicas without limits
    replica-NAME/   the ranks of one replica

All processes leave the service's own cgroup, because cgroup v2 does not allow processes in a cgroup that
enables controllers for its children."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from appliance.settings import ModelSettings

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_PERIOD_US = 100_000
LIMITS_REMEDY = (
    "install the drop-in examples/appliance.service.d/replica-limits.conf, which delegates the service's "
    "cgroup, and restart the service"
)


class ReplicaLimits(NamedTuple):
    """One replica's limits. Each limit applies to all of the replica's ranks combined."""

    cpus: float | None = None
    """CPU time per second, as a number of CPUs."""
    memory_bytes: int | None = None


def limits_of(settings: ModelSettings) -> ReplicaLimits:
    """Return the per-replica limits defined by a model's settings."""
    memory_gb = settings.memory_limit_gb
    return ReplicaLimits(settings.cpu_limit, None if memory_gb is None else int(memory_gb * 1e9))


class ReplicaCgroups:
    """All replicas' control groups."""

    def __init__(
        self,
        descendants: Callable[[], Iterable[int]],
        root: Path = _ROOT,
        own: Path = _OWN,
    ) -> None:
        """`descendants` returns the process ids of this process's descendants."""
        self._descendants = descendants
        self._root = root
        self._own = own
        self._base: Path | None = None
        """The service's own cgroup, or None until its controllers have been enabled for its children."""

    def limit(self, replica: str, pids: Iterable[int], limits: ReplicaLimits) -> str:
        """Apply limits to a replica's processes. If this is impossible, return the reason and let the
        processes run without limits."""
        if limits == ReplicaLimits():
            return ""
        try:
            if self._base is None:
                self._base = self._pass_on()
            group = self._base / _name(replica)
            group.mkdir(exist_ok=True)
            quota = "max" if limits.cpus is None else str(int(limits.cpus * _PERIOD_US))
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
            memory = "max" if limits.memory_bytes is None else str(limits.memory_bytes)
            (group / "memory.max").write_text(memory)
            # If memory runs out, make the kernel kill all ranks together. Otherwise, the surviving ranks
            # would wait for the killed ones.
            (group / "memory.oom.group").write_text("1")
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    (group / "cgroup.procs").write_text(str(pid))
        except OSError as error:
            return f"cpu_limit and memory_limit_gb have no effect: {error.filename}: {error.strerror}"
        except _NotPossibleError as error:
            return f"cpu_limit and memory_limit_gb have no effect: {error}"
        return ""

    def memory_kills(self, replica: str) -> int:
        """Return how many of the replica's processes the kernel has killed because of `memory_limit_gb`."""
        if self._base is None:
            return 0
        try:
            lines = (self._base / _name(replica) / "memory.events").read_text().splitlines()
        except OSError:
            return 0
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

    def remove(self, replica: str) -> None:
        """Remove the control group of a replica whose processes have exited."""
        if self._base is not None:
            with contextlib.suppress(OSError):
                (self._base / _name(replica)).rmdir()

    def _pass_on(self) -> Path:
        """Enable the controllers of the service's own cgroup for its children and return the cgroup. Raises
        OSError or _NotPossibleError if this fails."""
        base = self._find()
        controllers = (base / "cgroup.controllers").read_text().split()
        if missing := [name for name in ("cpu", "memory") if name not in controllers]:
            raise _NotPossibleError(f"{base} does not have the controllers {' and '.join(missing)}")
        service = base / "service"
        service.mkdir(exist_ok=True)
        for pid in (os.getpid(), *self._descendants()):
            with contextlib.suppress(ProcessLookupError):
                (service / "cgroup.procs").write_text(str(pid))
        if others := (base / "cgroup.procs").read_text().split():
            listed = ", ".join(others[:3])
            raise _NotPossibleError(f"{base} contains processes that do not belong to the service ({listed})")
        (base / "cgroup.subtree_control").write_text("+cpu +memory")
        return base

    def _find(self) -> Path:
        for line in self._own.read_text().splitlines():
            number, _, path = line.split(":", 2)
            if number == "0":
                return self._root / path.lstrip("/")
        raise _NotPossibleError("this system has no cgroup v2")


class _NotPossibleError(Exception):
    """Raised if no child cgroups with controllers can be created below the service's cgroup."""


def _name(replica: str) -> str:
    return "replica-" + re.sub(r"[^A-Za-z0-9._-]", "_", replica)


def descendants() -> list[int]:
    """Return the process ids of all descendants of this process."""
    import psutil

    return [child.pid for child in psutil.Process().children(recursive=True)]
