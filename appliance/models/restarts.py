"""Decides whether and when a replica is restarted after its processes have exited. Usually, the replica is
restarted after a short delay, which grows with repeated exits. The delays are longer if a load failed for a
reason that only an operator can correct, such as a damaged file. If a replica keeps exiting, a circuit
breaker stops the restarts.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections.abc import Callable
from typing import NamedTuple

from appliance.background import Backoff, in_own_thread
from appliance.protocol import BreakerState
from appliance.settings import RestartSettings
from engine.rank_messages import FatalKind

_RETRY_FIRST_S = 5.0
_RETRY_MAX_S = 300.0
"""Initial and maximum delay before a restart after a load failed for a known reason, such as a damaged file
or a missing mount. A restart can succeed only once the file has been replaced or the mount is back."""
WATCH_S = 5.0
"""How often a model's files are checked for changes while its replica is waiting to be restarted."""


class Exit(NamedTuple):
    """The exit of a replica's processes."""

    reason: str
    kind: FatalKind | None
    """The `kind` of the replica's `Fatal` message, or None if there was none."""
    served_s: float | None
    """How long the replica had been ready, in seconds, or None if it never was."""


class Restart(NamedTuple):
    """A replica's next start."""

    delay_s: float
    failure: str = ""
    """Why requests are refused until the next start. If empty, requests wait for the start."""
    bad_checkpoint: bool = False
    """Whether `failure` is a problem with the model's files or settings."""


class Restarts:
    """One replica's restarts and circuit breaker. The breaker is initially closed and opens when the replica
    has exited `max_deaths` times within `window_s` of service. After `retry_s`, the replica is started once
    more, with the breaker half-open. The breaker closes when the replica has served for `window_s`, and
    reopens if it exits earlier.
    """

    def __init__(
        self, rules: Callable[[], RestartSettings], draw: Callable[[], float] = random.random
    ) -> None:
        """`rules` is a function that returns the current settings. `draw` returns a random number between 0
        and 1."""
        self._rules = rules
        self._backoff = Backoff(draw=draw)
        self._retry = Backoff(_RETRY_FIRST_S, _RETRY_MAX_S, draw)
        self._expected_failures = 0
        """Number of consecutive load failures with a known reason, such as a damaged file."""
        self._served_s = 0.0
        """Total time in seconds for which the replica was ready in its earlier runs."""
        self._deaths: list[float] = []
        """The value of `_served_s` at each unexpected exit."""
        self._open = False

    def reset(self) -> None:
        """Forget all exits, because an operator has requested a start or the model's files have changed."""
        self._deaths.clear()
        self._open, self._expected_failures = False, 0
        self._backoff.reset()
        self._retry.reset()

    def ready(self) -> None:
        """Record that the replica is ready."""
        self._expected_failures = 0
        self._retry.reset()

    def exited(self, exit: Exit) -> Restart:
        """Record an exit of the replica's processes. Return when to restart the replica and whether to refuse
        requests in the meantime."""
        served_s = exit.served_s or 0.0
        self._served_s += served_s
        if exit.kind not in (None, "internal") and exit.served_s is None:
            return self._after_expected(exit)
        self._expected_failures = 0
        rules = self._rules()
        again = self._open and served_s < rules.window_s
        self._deaths = [death for death in self._deaths if self._served_s - death < rules.window_s]
        self._deaths.append(self._served_s)
        self._open = again or len(self._deaths) >= rules.max_deaths
        if not self._open:
            return Restart(self._backoff.delay_s(served_s))
        count = "again" if again else f"{len(self._deaths)} times"
        return Restart(
            rules.retry_s,
            f"the replica exited {count} within {rules.window_s:g} s of service and will not be restarted "
            f"for now; the latest reason: {exit.reason}",
        )

    def _after_expected(self, exit: Exit) -> Restart:
        # Wait before restarting: the exited processes may still hold memory and devices, and a damaged file
        # is unlikely to have been replaced yet.
        self._expected_failures += 1
        if exit.kind == "checkpoint" or self._expected_failures > 1:
            return Restart(self._retry.delay_s(0.0), exit.reason, exit.kind == "checkpoint")
        return Restart(self._backoff.delay_s(0.0))

    def deaths(self, serving_s: float) -> int:
        """Return how many exits currently count towards opening the breaker. `serving_s` is the time in
        seconds since the replica became ready, or 0 if it is not ready."""
        now = self._served_s + serving_s
        return sum(now - death < self._rules().window_s for death in self._deaths)

    def breaker(self, waits: bool, serving_s: float) -> BreakerState:
        """Return the breaker's state. `waits` is true if the replica is waiting for its next start."""
        if not self._open or serving_s >= self._rules().window_s:
            return "closed"
        return "open" if waits else "half-open"


class StartTimer:
    """Calls a function after a delay, or as soon as the files in a folder change."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None
        self._due_at = 0.0

    @property
    def left_s(self) -> float:
        """Seconds until the function is called."""
        return max(0.0, self._due_at - asyncio.get_running_loop().time())

    def start(self, delay_s: float, begin: Callable[[], None], watch: Watch | None = None) -> None:
        """Call `begin` after the delay, replacing any pending start. If the files of `watch` have changed or
        change before then, `watch.changed` and `begin` are called within `WATCH_S`."""
        self.stop()
        loop = asyncio.get_running_loop()
        self._due_at = loop.time() + delay_s
        self._task = loop.create_task(self._run(begin, watch))

    def stop(self) -> None:
        """Cancel the pending start."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self, begin: Callable[[], None], watch: Watch | None) -> None:
        while left_s := self.left_s:
            await asyncio.sleep(left_s if watch is None else min(left_s, WATCH_S))
            if watch is not None and await watch.has_changed():
                watch.changed()
                break
        self._task = None
        begin()


class Watch:
    """A folder watched by a `StartTimer`. A change to one of its files since this object was created ends the
    delay."""

    def __init__(self, folder: str, changed: Callable[[], None]) -> None:
        """`changed` is called when a file has been added, removed or changed."""
        self.changed = changed
        self._folder = folder
        self._former = asyncio.create_task(self._read())

    async def has_changed(self) -> bool:
        """Return whether a file has been added, removed or changed."""
        return await self._former != await self._read()

    async def _read(self) -> frozenset[tuple[str, int, int]]:
        # The disk may not respond. The thread then waits until the disk responds again.
        return await in_own_thread(lambda: _files(self._folder), math.inf)


def _files(folder: str) -> frozenset[tuple[str, int, int]]:
    """Return the name, size and modification time of each file in a folder. Empty if the folder cannot be
    read."""
    try:
        with os.scandir(folder) as entries:
            stats = [(entry.name, entry.stat()) for entry in entries]
    except OSError:
        return frozenset()
    return frozenset((name, stat.st_size, stat.st_mtime_ns) for name, stat in stats)
