"""Runs a load in several client processes and collects their records."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from appliance.bench.load import BenchProgress, Load, Record
from engine.client import module_command, module_environment

START_DELAY_S = 0.05
"""How far ahead the start time is announced, in seconds, so that all client processes can start together."""


class BenchError(Exception):
    """Raised if the benchmark cannot run. The message gives the reason and the remedy."""


@dataclass(slots=True)
class RawRun:
    """The records of a benchmark run, which may still be in progress."""

    started_at: float
    workers: int
    records: list[Record] = field(default_factory=list)
    running: int = 0
    chunks: int = 0
    busiest_worker_cpu: float = 0.0
    """CPU time of the busiest client process, as a fraction of the elapsed time. Near 1.0, the client may be
    the bottleneck."""


def default_workers(streams: int) -> int:
    """Return the number of client processes: one per 64 streams, but at most one per two cores."""
    return max(1, min(len(os.sched_getaffinity(0)) // 2, -(-streams // 64)))


def run_load(load: Load, workers: int | None, show: Callable[[RawRun], None]) -> RawRun:
    """Run a load and wait until all its requests have finished. `show` is called several times per second to
    show progress. Raises BenchError if a client process dies."""
    workers = min(workers or default_workers(load.streams), load.streams)
    processes: list[subprocess.Popen[bytes]] = []
    pipes: list[Connection] = []
    try:
        for worker in range(workers):
            process, pipe = _start_worker()
            processes.append(process)
            pipes.append(pipe)
            pipe.send((load, worker, workers))
        for pipe in pipes:
            pipe.recv()  # the client process is ready
        run = RawRun(time.monotonic() + START_DELAY_S, workers)
        for pipe in pipes:
            pipe.send(run.started_at)
        latest = {pipe: BenchProgress([], 0, 0, 0.0, is_done=False) for pipe in pipes}
        while unfinished := [pipe for pipe in pipes if not latest[pipe].is_done]:
            readable = wait(unfinished)
            for pipe in (one for one in unfinished if one in readable):
                latest[pipe] = pipe.recv()
                run.records += latest[pipe].records
            run.running = sum(progress.running for progress in latest.values())
            run.chunks = sum(progress.chunks for progress in latest.values())
            show(run)
        run.busiest_worker_cpu = max(progress.cpu_share for progress in latest.values())
        return run
    except (EOFError, ConnectionError):
        raise BenchError("a client process exited unexpectedly; the reason is printed above") from None
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            pipe.close()
            process.kill()
            process.wait()


def _start_worker() -> tuple[subprocess.Popen[bytes], Connection]:
    ours, theirs = Pipe()
    try:
        process = subprocess.Popen(
            [*module_command("appliance.bench.worker"), str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
            env=module_environment(),
        )
    except OSError as error:
        ours.close()
        raise BenchError(f"a client process could not be started: {error}") from error
    finally:
        theirs.close()
    return process, ours
