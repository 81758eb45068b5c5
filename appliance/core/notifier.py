"""Tells the service manager how the service is: started, loading, draining, alive.

The watchdog's sign of life comes from the core's event loop, and only while every database's writer gets on
with its work. A replica that hangs is the core's to kill, not the service manager's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from appliance.core.readiness import Readiness
from appliance.core.systemd import EXTENSION_US, Manager

log = logging.getLogger(__name__)

_EVERY_S = 1.0
_LEAST_SIGNS = 4
"""Signs of life within the watchdog's time."""


class Notifier:
    """From `start` to `close`."""

    def __init__(self, manager: Manager, readiness: Readiness, stalled_s: Callable[[], float]) -> None:
        """`stalled_s`: for how long the slowest writer has been at one piece of work."""
        self._manager = manager
        self._readiness = readiness
        self._stalled_s = stalled_s
        self._every_s = _EVERY_S
        if manager.watchdog_s is not None:
            self._every_s = min(_EVERY_S, manager.watchdog_s / _LEAST_SIGNS)
        self._started = False
        self._stopping = False
        self._said = ""
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begin to tell; nothing happens where nobody listens."""
        if self._manager.listens:
            self._tick()

    def begin_stop(self) -> None:
        """The service drains from now on."""
        self._stopping = True
        self._manager.tell(STOPPING=1, EXTEND_TIMEOUT_USEC=EXTENSION_US)

    def close(self) -> None:
        """Say nothing more."""
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
                log.error("a database's writer has been at one piece of work for %.0f s", stalled_s)
        if (status := readiness.headline()) != self._said and manager.tell(STATUS=status):
            self._said = status
