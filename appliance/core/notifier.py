"""Reports the service's state (started, loading, draining, alive) to the service manager.

The core's event loop sends keep-alives to the watchdog, but only while all database writers are making
progress. Hung replicas are not reported, because the core kills them itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from appliance.core.readiness import Readiness
from appliance.core.systemd import EXTENSION_US, Manager

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_KEEP_ALIVES = 4
"""Minimum number of keep-alives per watchdog interval."""


class Notifier:
    """Reports to the service manager until `close` is called."""

    def __init__(self, manager: Manager, readiness: Readiness, stalled_s: Callable[[], float]) -> None:
        """`stalled_s` returns how many seconds the slowest database writer has been busy with its current
        operation."""
        self._manager = manager
        self._readiness = readiness
        self._stalled_s = stalled_s
        self._every_s = _EVERY_S
        if manager.watchdog_s is not None:
            self._every_s = min(_EVERY_S, manager.watchdog_s / _KEEP_ALIVES)
        self._started = False
        self._stopping = False
        self._sent_status = ""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start reporting, if a service manager is listening."""
        if self._manager.listens:
            self._tick()

    def begin_stop(self) -> None:
        """Report that the service is stopping. Call this before the drain."""
        self._stopping = True
        self._manager.tell(STOPPING=1, EXTEND_TIMEOUT_USEC=EXTENSION_US)

    def close(self) -> None:
        """Stop reporting to the service manager."""
        if self._timer is not None:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._every_s, self._tick)
        manager, readiness = self._manager, self._readiness
        if not self._started and not self._stopping and readiness.started():
            self._started = manager.tell(READY=1)
        if self._stopping or (not self._started and readiness.worth_waiting_for()):
            manager.tell(EXTEND_TIMEOUT_USEC=EXTENSION_US)
        if manager.watchdog_s is not None:
            stalled_s = self._stalled_s()
            if stalled_s < manager.watchdog_s / 2:
                manager.tell(WATCHDOG=1)
            else:
                log.error(
                    "no watchdog notification sent: one database operation has taken %.0f s so far", stalled_s
                )
        if (status := readiness.headline()) != self._sent_status and manager.tell(STATUS=status):
            self._sent_status = status
