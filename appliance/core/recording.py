"""Samples the service once per second, records each sample, and passes it to the alerts and to event stream
readers that receive one snapshot per second."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from appliance.history.details import DetailEncoder
from appliance.snapshot import BlockMap, Snapshot
from store.samples import Splitter, TelemetrySample
from store.telemetry import TelemetryLog

log = logging.getLogger(__name__)

_EVERY_S = 1.0


class Recorder:
    """Samples the service every second from `start` to `stop`. Must be used on the event loop thread."""

    def __init__(
        self,
        read: Callable[[], Awaitable[Snapshot]],
        telemetry: TelemetryLog,
        blocks: Callable[[], Mapping[str, BlockMap]],
        observers: Sequence[Callable[[TelemetrySample], None]] = (),
    ) -> None:
        """`read` returns a snapshot of the service. `blocks` returns each replica's latest known KV blocks.
        Each of the `observers` is called with every sample."""
        self._read = read
        self._blocks = blocks
        self._telemetry = telemetry
        self._observers = observers
        self._splitter = Splitter()
        self._details = DetailEncoder()
        self._newest: Snapshot | None = None
        self._number = 0
        self._sampled = asyncio.Event()
        self._stopped = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sampling every second."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Stop sampling and write the incomplete time intervals."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        self._telemetry.close()
        self._stopped = True
        self._wake_readers()

    async def sample(self) -> None:
        """Sample the service now and record the sample."""
        snapshot = await self._read()
        sample = self._splitter.split(snapshot.at, sampled_tree(snapshot))
        if not self._telemetry.record(sample, self._details.encode(snapshot, self._blocks())):
            self._details.lose()
        for observe in self._observers:
            observe(sample)
        self._newest = snapshot
        self._wake_readers()

    def reader(self) -> Callable[[], Awaitable[Snapshot]]:
        """Return a function that waits for the next sample and returns its snapshot. The first call returns
        immediately. After `stop`, each call takes a new snapshot."""
        seen = 0

        async def read() -> Snapshot:
            nonlocal seen
            while self._number == seen and not self._stopped:
                await self._sampled.wait()
            if self._stopped or self._newest is None:
                return await self._read()
            seen = self._number
            return self._newest

        return read

    def _wake_readers(self) -> None:
        self._number += 1
        self._sampled.set()
        self._sampled = asyncio.Event()

    async def _run(self) -> None:
        loop, failed = asyncio.get_running_loop(), False
        due = loop.time()
        while True:
            try:
                await self.sample()
                failed = False
            except Exception:
                # A bug in this code must neither stop the service nor log an error every second.
                if not failed:
                    log.exception("the service could not be sampled; sampling will be retried every second")
                failed = True
            # If the process was paused, skip the samples missed during the pause.
            due = max(due + _EVERY_S, loop.time() + _EVERY_S / 10)
            await asyncio.sleep(due - loop.time())


def sampled_tree(snapshot: Snapshot) -> dict[str, Any]:
    """Return the measurements in a snapshot as JSON values. Requests, alerts, stalls and KV blocks are left
    out, because they are recorded separately."""
    sampled = msgspec.structs.replace(
        snapshot,
        requests=[],
        alerts=[],
        stalls=[],
        kv=[one if one.blocks is None else msgspec.structs.replace(one, blocks=None) for one in snapshot.kv],
    )
    tree: dict[str, Any] = msgspec.to_builtins(sampled)
    return tree
