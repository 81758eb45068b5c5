"""Work on clients' texts, shared fairly between tenants and bounded in memory and time."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

_MIN_BYTES = 4096
"""What any text counts at least: a request has more than its text."""

NICENESS = 10
"""Of the threads that encode: lower in priority than event loops, which must answer at once."""


class TooMuchWorkError(Exception):
    """A tenant has too much work under way; the message says what to do."""


class TenantQueue(Generic[Item]):
    """Takes the tenants in turn, and the items of each first in first out. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()

    def put(self, tenant: str, item: Item) -> None:
        """Append the item to its tenant's."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def put_back(self, tenant: str, item: Item) -> None:
        """Make the item its tenant's next one, to be taken after the other tenants' turns."""
        self._waiting.setdefault(tenant, deque()).appendleft(item)
        self._waiting.move_to_end(tenant)

    def take(self) -> Item | None:
        """The next item, or None."""
        if not self._waiting:
            return None
        tenant, items = self._waiting.popitem(last=False)
        item = items.popleft()
        if items:
            self._waiting[tenant] = items
        return item


class TextMemory:
    """Bounds the bytes of texts under work: in total, and for each tenant to an equal share of that.

    A tenant is refused only for what it has itself: one that has less than its share gets its share, even
    where others, who came when fewer tenants had work, exceed the total together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used: dict[str, int] = {}

    @contextmanager
    def reserved(self, tenant: str, size: int) -> Iterator[None]:
        """Count `size` bytes for the tenant meanwhile. Raises `TooMuchWorkError`."""
        size += _MIN_BYTES
        used = self._used.get(tenant, 0)
        share = self._max_bytes // len(self._used.keys() | {tenant})
        if used and used + size > share:
            raise TooMuchWorkError(
                f"tenant {tenant!r} has {used} bytes of prompts that wait for their tokens, and may have "
                f"{share}; send fewer or shorter prompts at a time"
            )
        self._used[tenant] = used + size
        try:
            yield
        finally:
            self._used[tenant] -= size
            if not self._used[tenant]:
                del self._used[tenant]


@dataclass(slots=True, eq=False)
class _Job:
    tenant: str
    steps: Generator[None, None, Any]
    result: asyncio.Future[Any]


def _lower_priority() -> None:
    """Lower the priority of this thread below that of the event loop."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class _Lane:
    """One thread that advances the tenants' jobs in turn, a step at a time."""

    def __init__(self, name: str) -> None:
        self._queue: TenantQueue[_Job] = TenantQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_lower_priority)
        self._busy = False

    def add(self, job: _Job) -> None:
        self._queue.put(job.tenant, job)
        self._advance()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _advance(self) -> None:
        if self._busy:
            return
        while (job := self._queue.take()) is not None:
            if not job.result.done():
                self._busy = True
                step = asyncio.get_running_loop().run_in_executor(self._thread, _step, job.steps)
                step.add_done_callback(lambda step, job=job: self._stepped(job, step))  # type: ignore[misc]
                return

    def _stepped(self, job: _Job, step: asyncio.Future[tuple[bool, Any]]) -> None:
        self._busy = False
        if step.cancelled():
            job.result.cancel()
        elif (error := step.exception()) is not None:
            if not job.result.done():
                job.result.set_exception(error)
        else:
            has_ended, value = step.result()
            if not has_ended:
                self._queue.put_back(job.tenant, job)
            elif not job.result.done():
                job.result.set_result(value)
        self._advance()


class WorkPool:
    """Runs work on texts in two threads: one for short work, one for long. Belongs to one event loop.

    A piece of work is a generator that yields after each step and returns its result. Steps of several
    tenants alternate. So short work waits for one short step of each tenant at most, however much long work
    there is.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._short, self._long = _Lane("short-texts"), _Lane("long-texts")

    async def run(self, tenant: str, steps: Generator[None, None, Result], is_long: bool) -> Result:
        """The result of `steps`, or what they raise. Raises `TooMuchWorkError` after `max_wait_s`."""
        job = _Job(tenant, steps, asyncio.get_running_loop().create_future())
        (self._long if is_long else self._short).add(job)
        try:
            return await asyncio.wait_for(job.result, self._max_wait_s)
        except TimeoutError:
            raise TooMuchWorkError(
                f"the tokens of the prompts were not ready after {self._max_wait_s:g} s; send shorter or "
                "fewer prompts at a time"
            ) from None

    def close(self) -> None:
        """End the threads after their current step."""
        self._short.close()
        self._long.close()


def _step(steps: Generator[None, None, Any]) -> tuple[bool, Any]:
    try:
        next(steps)
    except StopIteration as end:
        return True, end.value
    return False, None


def run_steps(steps: Generator[None, None, Result]) -> Result:
    """Do all of the work now, in the calling thread."""
    while True:
        has_ended, value = _step(steps)
        if has_ended:
            result: Result = value
            return result
