"""Reads the load of the machine and its GPUs in a separate thread, for all snapshots."""

from __future__ import annotations

import asyncio
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from appliance.monitoring.gpu_reader import GpuReader
from appliance.monitoring.host import HostReader, ServiceProcess
from appliance.snapshot import Gpu, Host

log = logging.getLogger(__name__)

_EVERY_S = 2.0


class MachineStats(NamedTuple):
    """The machine's load."""

    host: Host
    gpus: list[Gpu]
    gpu_error: str
    """Reason why the GPUs could not be read, or an empty string."""


_UNKNOWN = MachineStats(Host(), [], "")


class MachineReader:
    """Keeps the machine's latest measurements, so that callers never wait for an unresponsive disk or driver.
    Must be used on the event loop thread."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._stats = _UNKNOWN
        self._logged = ""
        """The error of the latest read. An error is logged again only after a different result."""
        self._begun_at = float("-inf")
        self._reading: asyncio.Future[MachineStats] | None = None
        self._host: HostReader | None = None
        self._gpus: GpuReader | None = None

    def stats(self, state_dir: str, processes: list[ServiceProcess]) -> MachineStats:
        """Return the machine's latest measurements. If they are old, start a new read in the thread."""
        if self._reading is not None and self._reading.done():
            error = self._reading.exception()
            if error is None:
                self._stats = self._reading.result()
            else:
                self._stats = _UNKNOWN
                if repr(error) != self._logged:
                    log.error("failed to read the machine's load", exc_info=error)
            self._logged = repr(error)
            self._reading = None
        now = time.monotonic()
        if self._reading is None and now - self._begun_at > _EVERY_S:
            self._begun_at = now
            loop = asyncio.get_running_loop()
            self._reading = loop.run_in_executor(self._threads, self._look, state_dir, processes)
        return self._stats

    def _look(self, state_dir: str, processes: list[ServiceProcess]) -> MachineStats:
        # Only one thread at a time uses the two readers, because a new read starts only after the previous
        # one has ended.
        self._host = self._host or HostReader(state_dir)
        self._gpus = self._gpus or GpuReader()
        gpus = self._gpus.read()
        return MachineStats(self._host.read(processes), gpus, self._gpus.error)
