"""Samples the service once per second, records the sample, and passes it to the alerts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec

from appliance.snapshot import Snapshot
from store.samples import Splitter, TelemetrySample
from store.telemetry import TelemetryLog

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_NOT_RECORDED = ("requests", "alerts")
"""Fields of a snapshot that other tables of `history.db` contain: the request log and the alerts."""


class Recorder:
    """Samples the service from `start` to `stop`. Must be used on the event loop's thread."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Snapshot]],
        telemetry: TelemetryLog,
        observers: Sequence[Callable[[TelemetrySample], None]] = (),
    ) -> None:
        """`read` reads a snapshot. Each observer is called with every sample."""
        self._read = read
        self._telemetry = telemetry
        self._observers = observers
        self._splitter = Splitter()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to sample every second."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop sampling, and write the intervals that are not complete."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._telemetry.close()

    async def sample(self) -> None:
        """TelemetrySample the service once."""
        snapshot = await self._read()
        sample = self._splitter.split(time.time(), sampled_tree(snapshot))
        self._telemetry.record(sample)
        for observe in self._observers:
            observe(sample)

    async def _run(self) -> None:
        loop, failed = asyncio.get_running_loop(), False
        due = loop.time()
        while True:
            try:
                await self.sample()
                failed = False
            except Exception:
                # A defect here must not stop the service, and must not fill the log every second.
                if not failed:
                    log.exception("the service could not be sampled; sampling will be retried every second")
                failed = True
            # Samples that are missed during a pause of the process are skipped.
            due = max(due + _EVERY_S, loop.time() + _EVERY_S / 10)
            await asyncio.sleep(due - loop.time())


def sampled_tree(snapshot: msgspec.Struct) -> dict[str, Any]:
    """Return the part of a snapshot that is recorded, as JSON values."""
    tree: dict[str, Any] = msgspec.to_builtins(snapshot)
    for name in _NOT_RECORDED:
        tree[name] = []
    return tree
