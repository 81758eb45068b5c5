"""Measures the resident memory, descriptors and threads of each of the service's processes, and fills the KV
cache of a replica."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from dataclasses import dataclass

import psutil

from tests.system.service import Service

MEGABYTE = 1 << 20
_PROMPT_BLOCKS = 30
"""Length of each prompt that `fill_kv_cache` sends, in blocks of 64 tokens. The demo model's context has 32
blocks."""


@dataclass(frozen=True)
class Usage:
    """The resource use of one process at one point in time."""

    rss_mb: float
    """Resident set size in MiB (`/proc/PID/statm`). Shared pages count in every process that maps them."""
    descriptors: int
    threads: int


def processes_of(running: Service) -> dict[str, psutil.Process]:
    """Return the processes of the core, the fronts and the ranks, keyed by a descriptive name."""
    status = running.status()
    found = {"core": running.process.pid}
    for number, front in enumerate(status["fronts"]):
        found[f"front {number + 1}"] = front["pid"]
    for model in status["models"]:
        for replica in model["replicas"]:
            for rank, pid in enumerate(replica["pids"]):
                found[f"replica {replica['name']} rank {rank}"] = pid
    return {name: psutil.Process(pid) for name, pid in found.items()}


def usage_of(process: psutil.Process) -> Usage:
    """Return the current resource use of the process. Raises psutil.Error if the process has exited."""
    with process.oneshot():
        return Usage(process.memory_info().rss / MEGABYTE, process.num_fds(), process.num_threads())


class PeakMemory(threading.Thread):
    """A thread that samples the resident memory of processes until `stop` is called."""

    def __init__(self, processes: dict[str, psutil.Process], interval_s: float = 0.1) -> None:
        super().__init__(daemon=True)
        self._processes, self._interval_s = processes, interval_s
        self.before_mb = self.now_mb()
        self.peak_mb = dict(self.before_mb)
        self._stopped = threading.Event()

    def now_mb(self) -> dict[str, float]:
        """Return the resident memory of each running process in MiB."""
        found = {}
        for name, process in self._processes.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                found[name] = process.memory_info().rss / MEGABYTE
        return found

    def run(self) -> None:
        while not self._stopped.wait(self._interval_s):
            self._note()

    def _note(self) -> None:
        for name, size in self.now_mb().items():
            self.peak_mb[name] = max(self.peak_mb[name], size)

    def stop(self) -> None:
        """Take a final sample and stop the thread."""
        self._stopped.set()
        self.join()
        self._note()

    def peak_growth_mb(self) -> dict[str, float]:
        """Return the maximum growth of each process's memory since its first sample."""
        return {name: self.peak_mb[name] - size for name, size in self.before_mb.items()}

    def growth_after_mb(self, seconds: float, expected_mb: float) -> dict[str, float]:
        """Wait for the given number of seconds, and return how much each process's memory has grown since its
        first sample. If a process has grown by more than `expected_mb`, wait up to a minute longer, because a
        busy machine may still be handling requests."""
        time.sleep(seconds)
        deadline = time.monotonic() + 60
        while True:
            growth = {name: size - self.before_mb[name] for name, size in self.now_mb().items()}
            if time.monotonic() > deadline or max(growth.values(), default=0.0) <= expected_mb:
                return growth
            time.sleep(0.5)


def fill_kv_cache(running: Service, blocks: int, draw: random.Random) -> float:
    """Run random prompts that together use at least the given number of KV blocks. Return the replica's
    resident memory in MiB."""
    with running.http() as http:
        for _ in range(blocks // _PROMPT_BLOCKS + 1):
            prompt = [draw.randrange(7, 5000) for _ in range(64 * _PROMPT_BLOCKS)]
            answer = http.post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1})
            if answer.status_code != 200:
                raise RuntimeError(f"status {answer.status_code}: {answer.text}")
    (pid,) = running.replica()["pids"]
    return usage_of(psutil.Process(pid)).rss_mb
