"""Puts a replica to sleep and wakes it: releases the device memory of its weights and KV cache, and later
restores it at the same addresses, so that captured CUDA graphs stay valid. `RankSleep` does this on one rank,
together with the other ranks. `SleepControl` runs on rank 0 and starts operations between steps. While an
operation runs, the step loop continues to send reports.

The device code is passed in, so this module does not load torch.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

from engine.core import EngineCore
from engine.plan import MemoryPlan
from engine.rank_messages import MemoryChanged

if TYPE_CHECKING:
    from engine.rank_memory import RankMemory

log = logging.getLogger(__name__)

Totals = Callable[[Sequence[int]], list[int]]
"""Function that sums each number over all ranks. All ranks must call it at the same time."""


class MemoryRunner(Protocol):
    """Releases and restores a rank's memory. Implemented by `engine.runner.ModelRunner`."""

    def change_memory(self, asleep: bool) -> Future[MemoryChanged]:
        """Start releasing the memory if `asleep` is true, otherwise start restoring it. The operation begins
        once all launched steps have finished. Every rank must call this method. The returned future raises an
        exception if the rank cannot continue."""


class RankSleep:
    """Releases and restores one rank's memory. If the operation fails on any rank, all ranks undo it."""

    def __init__(self, memory: RankMemory, ranks: int, totals: Totals) -> None:
        self.memory = memory
        self.asleep = False
        self._ranks = ranks
        self._totals = totals

    def change(self, asleep: bool) -> MemoryChanged:
        """Release the memory if `asleep` is true, otherwise restore it. All ranks must call this method."""
        began = time.monotonic()
        if asleep == self.asleep:
            return MemoryChanged(asleep)
        problem, freed = self._sleep() if asleep else self._wake()
        if not problem:
            self.asleep = asleep
        freed_bytes, host_bytes = self._totals((freed, self.memory.host_bytes))
        return MemoryChanged(
            self.asleep,
            problem=problem,
            freed_bytes=freed_bytes,
            host_bytes=host_bytes,
            seconds=time.monotonic() - began,
        )

    def _sleep(self) -> tuple[str, int]:
        memory = self.memory
        if problem := self._agree(lambda: memory.check(self._ranks)):
            return problem, 0
        if problem := self._agree(memory.save):
            memory.forget()
            return problem, 0
        return "", memory.release()

    def _wake(self) -> tuple[str, int]:
        if problem := self._agree(self.memory.restore):
            self.memory.release()
            return problem, 0
        self.memory.forget()
        return "", 0

    def _agree(self, attempt: Callable[[], None]) -> str:
        """Call `attempt` on every rank. Returns the reason for the failure if any call failed, otherwise an
        empty string."""
        problem = ""
        try:
            attempt()
        except MemoryError as error:  # SleepError is a MemoryError
            problem = str(error)
        (failed,) = self._totals((bool(problem),))
        if failed and not problem:
            return f"{failed} of {self._ranks} ranks failed: see the replica's log"
        if problem and self._ranks > 1:
            log.warning("%s", problem)
        return problem


class SleepControl:
    """Runs on rank 0 and executes requests to put the replica to sleep or wake it, one at a time.

    No step is planned during an operation or while the replica sleeps. Submissions that arrive during this
    time wait in the scheduler until the replica is awake.
    """

    def __init__(self, engine: EngineCore, runner: MemoryRunner) -> None:
        self._engine = engine
        self._runner = runner
        self._requests: deque[bool] = deque()
        self._running: Future[MemoryChanged] | None = None
        self._asleep = False
        self._ended = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return a descriptor that becomes readable when an operation has ended. `poll` then returns the
        operation's result."""
        return self._ended

    def close(self) -> None:
        os.close(self._ended)

    def request(self, asleep: bool) -> None:
        """Queue an operation: going to sleep if `asleep` is true, otherwise waking up. Operations run in the
        order requested."""
        self._requests.append(asleep)

    def poll(self) -> MemoryChanged | None:
        """Start the next operation if possible. Returns the result of an operation that has ended, or None. A
        replica with unfinished sequences cannot sleep; the result then contains the reason. If an operation
        fails and the replica cannot continue, the exception is raised.
        """
        if self._running is None and self._requests and (refused := self._start()):
            return refused
        if self._running is None or not self._running.done():
            return None
        os.eventfd_read(self._ended)
        changed, self._running = self._running.result(), None
        if changed.asleep and not self._asleep:
            self._engine.scheduler.pool.clear()
        self._asleep = self._engine.paused = changed.asleep
        return changed

    def _start(self) -> MemoryChanged | None:
        """Start the next operation, unless steps are in flight. Returns a failure result if the operation
        cannot start, otherwise None."""
        asleep = self._requests[0]
        engine = self._engine
        if asleep and not self._asleep and engine.scheduler.has_work:
            self._requests.popleft()
            open_samples = engine.scheduler.running + engine.scheduler.waiting
            return MemoryChanged(False, problem=f"unfinished sequences: {open_samples}")
        if engine.steps_in_flight:
            return None
        self._requests.popleft()
        engine.paused = True
        if asleep != self._asleep:
            engine.change_memory(MemoryPlan(engine.last_step, asleep))
        self._running = self._runner.change_memory(asleep)
        self._running.add_done_callback(lambda _: os.eventfd_write(self._ended, 1))
        return None
