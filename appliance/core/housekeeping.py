"""The core's periodic work: retries writing spooled audit entries, records the audit chain's head, and
removes old rows in batches small enough not to delay requests."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable
from functools import partial

from appliance.core.clock import ClockGuard
from appliance.core.contents import DAY_S, ContentKeeper
from appliance.settings import Settings
from store import retention
from store.alerts import remove_alerts
from store.control import ControlStore
from store.errors import StoreError
from store.retention import Removed
from store.telemetry import RESOLUTIONS
from store.writer import Operation, Writer

log = logging.getLogger(__name__)

_RETRY_EVERY_S = 2.0
_HEAD_EVERY_S = 60.0
_REMOVE_EVERY_S = 5.0
_REMOVE_ALERTS_EVERY_S = 60.0
_MIN_PAUSE_S = 0.02
_PAUSE_FACTOR = 9.0
"""The pause after each batch lasts this many times as long as the batch, so removing rows takes at most a
tenth of the database writer's time."""


class Housekeeper:
    """Performs the core's periodic work, such as removing old rows, from `start` to `stop`."""

    def __init__(
        self,
        control: ControlStore,
        history: Writer,
        contents: ContentKeeper,
        settings: Callable[[], Settings],
        clock: ClockGuard,
    ) -> None:
        self._clock = clock
        self._control = control
        self._history = history
        self._contents = contents
        self._settings = settings
        # SQLite's write-ahead log may still contain texts removed during the previous run.
        self._log_has_removed = True
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the tasks that perform the periodic work."""
        for every_s, work in (
            (_RETRY_EVERY_S, self._retry_audit),
            (_HEAD_EVERY_S, self._record_head),
            (_REMOVE_EVERY_S, self._remove_requests),
            (_REMOVE_EVERY_S, self._remove_telemetry),
            (_REMOVE_ALERTS_EVERY_S, self._remove_alerts),
            (_REMOVE_EVERY_S, self._remove_contents),
        ):
            self._tasks.add(asyncio.get_running_loop().create_task(_repeat(every_s, work)))

    async def stop(self) -> None:
        """Stop the tasks that perform the periodic work."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _retry_audit(self) -> None:
        # Use a thread, because the disk may not respond.
        await asyncio.to_thread(self._control.trail.retry)

    async def _record_head(self) -> None:
        self._control.trail.record_head()

    async def _remove_requests(self) -> None:
        if self._clock.jump_s:
            return
        if days := self._settings().log.days:
            before = time.time() - days * DAY_S
            await _remove(self._history, partial(retention.remove_requests, before=before))
        if days := self._settings().log.usage_days:
            before = time.time() - days * DAY_S
            await _remove(self._history, partial(retention.remove_usage, before=before))

    async def _remove_telemetry(self) -> None:
        if self._clock.jump_s:
            return
        coarsest_s = self._settings().telemetry.days * DAY_S
        now = time.time()
        before = {one.table: now - min(coarsest_s, one.kept_s or coarsest_s) for one in RESOLUTIONS}
        await _remove(self._history, partial(retention.remove_telemetry, before=before))
        seconds = before[RESOLUTIONS[0].table]
        await _remove(self._history, partial(retention.remove_details, before=seconds))

    async def _remove_alerts(self) -> None:
        if not self._clock.jump_s:
            await asyncio.wrap_future(self._history.call(partial(remove_alerts, now=time.time())))

    async def _remove_contents(self) -> None:
        if self._clock.jump_s:
            return
        before, otherwise = self._contents.limits()

        def remove(connection: sqlite3.Connection) -> Removed:
            removed = retention.remove_contents(connection, before, otherwise)
            # Note this now, because the removal of the next batch may fail.
            self._log_has_removed |= removed.rows > 0
            return removed

        await _remove(self._contents.writer, remove)
        if self._log_has_removed:
            emptying = await asyncio.wrap_future(retention.empty_log(self._contents.writer))
            self._log_has_removed = not emptying.done


async def _repeat(every_s: float, work: Callable[[], Awaitable[None]]) -> None:
    while True:
        await asyncio.sleep(every_s)
        try:
            await work()
        except StoreError:
            pass  # The writer has already logged the error, and the operation will be retried.
        except Exception:
            log.exception("housekeeping failed and will be retried in %g s", every_s)


async def _remove(writer: Writer, operation: Operation[Removed]) -> None:
    """Remove rows in batches until no old rows are left."""
    rows = pages = 0
    try:
        while True:
            began = time.monotonic()
            removed = await asyncio.wrap_future(writer.call(operation))
            rows, pages = rows + removed.rows, pages + removed.pages
            if not removed.more:
                return
            await asyncio.sleep(max(_MIN_PAUSE_S, _PAUSE_FACTOR * (time.monotonic() - began)))
    finally:
        if rows or pages:
            log.info("%s: removed %d old rows and freed %d database pages", writer.path, rows, pages)
