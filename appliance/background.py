"""Background tasks and timers on the event loop, delays before process restarts, and limits on processing
time."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import random
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

log = logging.getLogger(__name__)

_FIRST_DELAY_S = 0.1
_MAX_DELAY_S = 5.0
_HEALTHY_S = 30.0
_JITTER = 0.2
"""Maximum jitter, as a fraction of the delay. Without jitter, processes that exited together would keep
restarting at the same moment."""
_POLL_S = 0.05


Result = TypeVar("Result")


async def in_own_thread(work: Callable[[], Result], timeout_s: float) -> Result:
    """In a separate thread, run a function that may hang, and return its result. Raises TimeoutError after
    `timeout_s`. The thread then keeps running, but it neither takes up one of the few `asyncio.to_thread`
    threads nor delays process exit."""
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    async with asyncio.timeout(timeout_s):
        return await asyncio.wrap_future(future)


async def wait_until(done: Callable[[], bool], timeout_s: float | None) -> None:
    """Wait until `done` returns true or `timeout_s` seconds have passed. A `timeout_s` of None means no
    limit."""
    deadline = asyncio.get_running_loop().time() + (float("inf") if timeout_s is None else timeout_s)
    while not done() and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(_POLL_S)


class Background:
    """Runs tasks in the background. The event loop keeps only weak references to tasks, so this object keeps
    a reference to each task until the task finishes. Failed tasks are logged."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a task. Must be called from the thread of a running event loop."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    async def ended(self) -> None:
        """Wait until all tasks started so far have finished."""
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        with contextlib.suppress(asyncio.CancelledError):
            if task.exception() is not None:
                log.error("a background task failed with an unexpected error", exc_info=task.exception())


class Timer:
    """Calls a function once after a delay."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, delay_s: float, late: Callable[[], object]) -> None:
        """Call `late` after the delay, unless `start` or `stop` is called before then."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(delay_s, late)

    def stop(self) -> None:
        """Cancel the pending call, if any."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Backoff:
    """Computes the delay before each process restart. The delay doubles with each restart, up to a limit, and
    varies randomly by up to 20%. Once a process has been in service for 30 s, the delay is reset."""

    def __init__(
        self,
        first_s: float = _FIRST_DELAY_S,
        max_s: float = _MAX_DELAY_S,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` returns a random number between 0 and 1."""
        self._first_s = self._next_s = first_s
        self._max_s = max_s
        self._draw = draw

    def reset(self) -> None:
        """Reset the delay to its initial value."""
        self._next_s = self._first_s

    def delay_s(self, served_s: float) -> float:
        """Return the delay before the next restart. `served_s` is how long the process was in service, in
        seconds, or 0 if it never was."""
        if served_s >= _HEALTHY_S:
            self.reset()
        delay, self._next_s = self._next_s, min(self._next_s * 2, self._max_s)
        return delay * (1 + _JITTER * (2 * self._draw() - 1))


class TimeBudgets:
    """Limits each user's average share of a thread's time. All times are in seconds on the same clock."""

    def __init__(self, max_share: float, burst_s: float) -> None:
        """`max_share` is between 0 and 1. A user that has been idle for `burst_s` seconds may spend its share
        of that time in one burst."""
        self._max_share = max_share
        self._burst_s = burst_s
        self._rests_until: dict[str, float] = {}
        """For each recent user of the thread, the time when the user's average will be within its share
        again."""

    def rest_s(self, user: str, now: float) -> float:
        """Return how many seconds the user must pause, or 0 if the user is within its share."""
        return max(0.0, self._rests_until.get(user, 0.0) - now)

    def charge(self, user: str, taken_s: float, now: float) -> None:
        """Charge `taken_s` seconds of the thread's time to the user."""
        since = max(self._rests_until.get(user, 0.0), now - self._burst_s)
        self._rests_until[user] = since + taken_s / self._max_share

    def forget_unused(self, now: float) -> None:
        """Remove the records of users whose full burst is available again."""
        earliest = now - self._burst_s
        self._rests_until = {user: until for user, until in self._rests_until.items() if until > earliest}
