"""The parent's side: worker processes, and one run at a time spread over them."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType

from appliance.bench.messages import (
    Done,
    Go,
    Plan,
    Progress,
    Prompting,
    Ready,
    Record,
    Stop,
    Target,
    ToParent,
)
from engine.client import Channel, module_command, module_environment, socketpair

START_DELAY_S = 0.05
"""Between the word to begin and the beginning, so that all workers begin at once."""


class BenchError(Exception):
    """The benchmark cannot be run; the message says why, and what to do."""


def default_workers(streams: int) -> int:
    """Worker processes for so many streams at once: one per 64, on at most half of the cores."""
    return max(1, min(len(os.sched_getaffinity(0)) // 2, -(-streams // 64)))


@dataclass(frozen=True, slots=True)
class Load:
    """A run's requests, before they are spread over workers."""

    target: Target
    prompting: Prompting
    requests: int
    concurrency: int = 0
    arrivals: Sequence[float] = ()
    timeout_s: float = 600.0
    ttft_limit_s: float = math.inf
    e2e_limit_s: float = math.inf

    def plans(self, workers: int) -> list[Plan]:
        """One plan for each worker that has anything to do. Streams are dealt in turn, requests by stream: a
        worker with half of the streams gets half of the requests."""
        streams = min(self.concurrency, self.requests) or self.requests
        workers = min(workers, streams)
        plans = []
        for index in range(workers):
            mine = [number for number in range(self.requests) if number % streams % workers == index]
            plans.append(
                Plan(
                    target=self.target,
                    prompting=self.prompting,
                    requests=mine,
                    concurrency=len(range(index, streams, workers)) if self.concurrency else 0,
                    arrivals=[self.arrivals[number] for number in mine] if self.arrivals else [],
                    timeout_s=self.timeout_s,
                    ttft_limit_s=self.ttft_limit_s,
                    e2e_limit_s=self.e2e_limit_s,
                )
            )
        return plans


@dataclass(slots=True)
class Standing:
    """A run, as far as it is known."""

    started_at: float
    records: list[Record] = field(default_factory=list)
    running: int = 0
    chunks: int = 0
    overdue: int = 0


@dataclass(slots=True)
class Raw:
    """A run that is over."""

    started_at: float
    records: list[Record]
    workers: int
    busiest_worker: float
    """CPU time ÷ wall time of the worker that used most: 1.0 is a whole core, and a client that is the
    bottleneck."""
    stopped: bool = False
    """It was given up before its end."""


Watch = Callable[[Standing], bool]
"""Told of a run several times a second; False gives it up."""


class _Worker:
    def __init__(self, on_message: Callable[[_Worker, ToParent], None], on_close: Callable[[], None]) -> None:
        ours, theirs = socketpair()
        try:
            self.process = subprocess.Popen(
                [*module_command("appliance.bench.worker"), "--channel", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                env=module_environment(),
            )
        except OSError as error:
            ours.close()
            raise BenchError(f"a worker process could not be started: {error}") from error
        finally:
            theirs.close()
        self.channel: Channel[ToParent] = Channel(ours, ToParent)
        self.channel.listen(lambda message: on_message(self, message), on_close)
        self.progress = Progress([], 0, 0, 0)
        self.done: Done | None = None


class Workers:
    """Worker processes; started when a run first needs them, ended with the context."""

    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._event = asyncio.Event()
        self._ready = 0
        self._lost = False
        self._standing = Standing(0.0)

    async def __aenter__(self) -> Workers:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # They end when their channel does; one that is deep in work is not waited for.
        for worker in self._workers:
            worker.channel.close()
            worker.process.kill()
            worker.process.wait()

    async def run(self, load: Load, workers: int, watch: Watch) -> Raw:
        """Send everything and wait for the end. Raises BenchError when a worker dies."""
        plans = load.plans(workers)
        while len(self._workers) < len(plans):
            self._workers.append(_Worker(self._hear, self._hear_end))
        chosen = self._workers[: len(plans)]
        self._ready = 0
        for worker, plan in zip(chosen, plans, strict=True):
            worker.progress, worker.done = Progress([], 0, 0, 0), None
            worker.channel.send(plan)
        while self._ready < len(chosen):
            await self._next()
        start = time.monotonic() + START_DELAY_S
        standing = self._standing = Standing(start)
        for worker in chosen:
            worker.channel.send(Go(start))
        stopped = False
        while any(worker.done is None for worker in chosen):
            await self._next()
            standing.running = sum(worker.progress.running for worker in chosen)
            standing.chunks = sum(worker.progress.chunks for worker in chosen)
            standing.overdue = sum(worker.progress.overdue for worker in chosen)
            if not stopped and not watch(standing):
                stopped = True
                for worker in chosen:
                    worker.channel.send(Stop())
        return Raw(
            started_at=start,
            records=standing.records,
            workers=len(chosen),
            busiest_worker=max(
                worker.done.cpu_s / max(worker.done.wall_s, 1e-9) for worker in chosen if worker.done
            ),
            stopped=stopped,
        )

    async def _next(self) -> None:
        await self._event.wait()
        self._event.clear()
        if self._lost:
            raise BenchError("a worker process died: what it said is above")

    def _hear(self, worker: _Worker, message: ToParent) -> None:
        if isinstance(message, Ready):
            self._ready += 1
        elif isinstance(message, Progress):
            worker.progress = message
            self._standing.records += message.records
        else:
            worker.done = message
        self._event.set()

    def _hear_end(self) -> None:
        self._lost = True
        self._event.set()
