"""Tasks that run in the background of the event loop, and the delay before a process is restarted."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_HEALTHY_S = 30.0


class Background:
    """Keeps a reference to each task until it ends, because the event loop keeps none. Logs tasks that
    fail."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task. Must be called on the thread of a running event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def ended(self) -> None:
        """Wait until all tasks that have been started so far have ended."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            if task.exception() is not None:
                log.error("a background task failed", exc_info=task.exception())


class Backoff:
    """Returns the delay before each restart of a process: it doubles up to a limit, and starts again at the
    first one after the process has been in service for 30 s."""

    def __init__(self, first_s: float = _FIRST_DELAY_S, max_s: float = _MAX_DELAY_S) -> None:
        self._first_s = self._next_s = first_s
        self._max_s = max_s

    def delay_s(self, served_s: float) -> float:
        """Return the delay before the next restart. `served_s`: for how long the process was in service
        before it ended; 0 if it never was."""
        if served_s >= _HEALTHY_S:
            self._next_s = self._first_s
        delay, self._next_s = self._next_s, min(self._next_s * 2, self._max_s)
        return delay
