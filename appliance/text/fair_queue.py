"""Processes client texts in threads shared fairly between tenants, with limits on memory and time."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from appliance.background import TimeBudgets
from appliance.text.panics import raise_panic

Item = TypeVar("Item")
Result = TypeVar("Result")

_MIN_BYTES = 4096
"""Bytes added to each text's size, to account for the rest of the request's memory."""

MAX_SHARE = 1 / 3
"""Maximum share of a thread's time that one tenant can use on average."""
BURST_S = 2.0
"""How long, in seconds, a previously idle tenant may use a thread without pausing. Long enough for 2 MiB of
text."""
NICENESS = 10
"""Nice value that gives the encoding threads a lower priority than the event loop's thread."""


class TooMuchWorkError(Exception):
    """Raised if a tenant has too much work in progress. The message says what to do."""


class TenantQueue(Generic[Item]):
    """A queue in which tenants take turns. Each tenant's items are served in order of arrival. Not
    thread-safe."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[Item]] = OrderedDict()

    def put(self, tenant: str, item: Item) -> None:
        """Append the item to its tenant's queue."""
        self._waiting.setdefault(tenant, deque()).append(item)

    def put_back(self, tenant: str, item: Item) -> None:
        """Put the item back at the head of its tenant's queue and let all other tenants go first."""
        self._waiting.setdefault(tenant, deque()).appendleft(item)
        self._waiting.move_to_end(tenant)

    @property
    def tenants(self) -> Iterable[str]:
        """Tenants with queued items, in the order in which the tenants take turns."""
        return self._waiting.keys()

    def take(self, may_take: Callable[[str], bool] = lambda tenant: True) -> Item | None:
        """Return the next item of the first tenant accepted by `may_take`, or None if it accepts none."""
        tenant = next(filter(may_take, self._waiting), None)
        if tenant is None:
            return None
        items = self._waiting.pop(tenant)
        item = items.popleft()
        if items:
            self._waiting[tenant] = items
        return item


class TextMemory:
    """Limits the bytes of text being processed. Each tenant gets an equal share of the limit and can always
    use its whole share: other tenants' texts never cause a refusal. The total can exceed the limit, because
    shares shrink as tenants are added.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._used: dict[str, int] = {}

    @contextmanager
    def reserved(self, tenant: str, size: int) -> Iterator[None]:
        """Count `size` bytes toward the tenant's share while the `with` block runs. Raises `TooMuchWorkError`
        if the tenant would exceed its share."""
        size += _MIN_BYTES
        used = self._used.get(tenant, 0)
        share = self._max_bytes // len(self._used.keys() | {tenant})
        if used and used + size > share:
            raise TooMuchWorkError(
                f"tenant {tenant!r} has {used} bytes of prompts waiting to be tokenized, and the "
                f"limit is {share} bytes; send fewer or shorter prompts at the same time"
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
    taken_s: float = 0.0
    """CPU time, in seconds, that the job's last step took."""


def _lower_priority() -> None:
    """Give this thread a lower priority than the event loop's thread."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


class _Lane:
    """A thread that runs one step of each tenant's work in turn. A tenant that has used up its share of the
    thread's time must pause, leaving the CPU to other tenants' requests."""

    def __init__(self, name: str) -> None:
        self._budgets = TimeBudgets(MAX_SHARE, BURST_S)
        self._wakes = False
        """Whether all tenants with work are paused. If so, the next step is scheduled for the end of the
        first pause."""
        self._queue: TenantQueue[_Job] = TenantQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name, initializer=_lower_priority)
        self._busy = False

    def add(self, job: _Job) -> None:
        self._queue.put(job.tenant, job)
        self._advance()

    def _advance(self) -> None:
        if self._busy:
            return
        loop, now = asyncio.get_running_loop(), time.monotonic()
        while (job := self._queue.take(lambda tenant: not self._budgets.rest_s(tenant, now))) is not None:
            if not job.result.done():
                self._busy = True
                step = loop.run_in_executor(self._thread, self._step, job)
                step.add_done_callback(lambda step, job=job: self._stepped(job, step))  # type: ignore[misc]
                return
        rests = [self._budgets.rest_s(tenant, now) for tenant in self._queue.tenants]
        if not rests:
            self._budgets.forget_unused(now)
        elif not self._wakes:
            self._wakes = True
            loop.call_later(min(rests), self._wake)

    def _wake(self) -> None:
        self._wakes = False
        self._advance()

    def _step(self, job: _Job) -> tuple[bool, Any]:
        began = time.thread_time()
        try:
            return _step(job.steps)
        finally:
            job.taken_s += time.thread_time() - began

    def _stepped(self, job: _Job, step: asyncio.Future[tuple[bool, Any]]) -> None:
        self._busy = False
        self._budgets.charge(job.tenant, job.taken_s, time.monotonic())
        job.taken_s = 0.0
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
    """Processes texts in two threads, one for short jobs and one for long jobs. Must be used on one event
    loop.

    Each job is a generator that yields after each step and returns its result. The steps of different tenants
    alternate. A short job therefore waits for at most one short step per other tenant, regardless of the
    number of long jobs.
    """

    def __init__(self, max_wait_s: float) -> None:
        self._max_wait_s = max_wait_s
        self._short, self._long = _Lane("short-texts"), _Lane("long-texts")

    async def run(self, tenant: str, steps: Generator[None, None, Result], is_long: bool) -> Result:
        """Run `steps` and return their result or raise their error. Raises `TooMuchWorkError` after
        `max_wait_s` seconds."""
        job = _Job(tenant, steps, asyncio.get_running_loop().create_future())
        (self._long if is_long else self._short).add(job)
        try:
            return await asyncio.wait_for(job.result, self._max_wait_s)
        except TimeoutError:
            raise TooMuchWorkError(
                f"the prompts could not be tokenized within {self._max_wait_s:g} s; send fewer or "
                "shorter prompts at the same time"
            ) from None


def _step(steps: Generator[None, None, Any]) -> tuple[bool, Any]:
    try:
        next(steps)
    except StopIteration as end:
        return True, end.value
    except BaseException as error:
        raise_panic(error)
        raise
    return False, None


def run_steps(steps: Generator[None, None, Result]) -> Result:
    """Run all steps immediately in the calling thread and return their result."""
    while True:
        has_ended, value = _step(steps)
        if has_ended:
            result: Result = value
            return result
