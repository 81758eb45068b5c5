"""Reads the load of the machine and the service's processes."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Sequence
from typing import NamedTuple

from appliance.snapshot import Host, Process, ProcessRole, ProcessState


class ServiceProcess(NamedTuple):
    """One of the service's processes, as known to the core."""

    name: str
    role: ProcessRole
    pid: int
    state: ProcessState
    restarts: int


class HostReader:
    """Reads the machine's load. Percentages cover the time since the previous call. Must not be used on an
    event loop, because an unresponsive disk would block it."""

    def __init__(self, state_dir: str) -> None:
        import psutil

        self._psutil = psutil
        self._state_dir = state_dir
        self._known: dict[int, psutil.Process] = {}
        psutil.cpu_percent()
        self._is_first = True

    def read(self, processes: Sequence[ServiceProcess]) -> Host:
        """Return the load of the machine and the given processes."""
        psutil = self._psutil
        memory = psutil.virtual_memory()
        try:
            disk = shutil.disk_usage(self._state_dir)
        except OSError:
            disk = None
        # The first interval began only a moment ago, when this object was created, so its value would be
        # meaningless.
        cpu_percent = psutil.cpu_percent()
        cpu_percent, self._is_first = None if self._is_first else cpu_percent, False
        pids = {process.pid for process in processes}
        self._known = {pid: known for pid, known in self._known.items() if pid in pids}
        return Host(
            name=socket.gethostname(),
            cpus=os.cpu_count(),
            cpu_percent=cpu_percent,
            load_1m=os.getloadavg()[0],
            memory_bytes=memory.total,
            memory_used_bytes=memory.total - memory.available,
            disk_bytes=None if disk is None else disk.total,
            disk_free_bytes=None if disk is None else disk.free,
            processes=[self._process(process) for process in processes],
        )

    def _process(self, process: ServiceProcess) -> Process:
        cpu_percent: float | None = None
        memory_bytes: int | None = None
        try:
            known = self._known.get(process.pid)
            if known is None:
                # The first call returns no meaningful value; it only starts the interval that the next call
                # measures.
                known = self._known[process.pid] = self._psutil.Process(process.pid)
                known.cpu_percent()
            else:
                cpu_percent = known.cpu_percent()
            memory_bytes = known.memory_info().rss
        except self._psutil.Error:
            self._known.pop(process.pid, None)  # the process has just exited
        return Process(
            name=process.name,
            role=process.role,
            pid=process.pid,
            state=process.state,
            cpu_percent=cpu_percent,
            memory_bytes=memory_bytes,
            restarts=process.restarts,
        )
