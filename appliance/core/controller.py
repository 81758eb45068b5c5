"""The controller, which manages the lifecycle of the service's components.

                                  Controller
        ┌──────────┬────────────┬─────┴──────┬──────────────┐
        ▼          ▼            ▼            ▼              ▼
    Listeners    Drains     FrontPool   ModelManager   RequestManager

The controller starts, checks and stops these components. Messages between them bypass the controller:
`FrontPool` and `ModelManager` call the request manager, which answers fronts through `FrontPool.send`.
`appliance.core.service` connects the components.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from appliance.core.drains import Drains
from appliance.front_pool.listeners import Listeners
from appliance.front_pool.pool import FrontPool
from appliance.models.manager import ModelManager
from appliance.traffic.request_manager import RequestManager
from store.policies import Policies

log = logging.getLogger(__name__)

_TICK_S = 0.25
_PAUSE_S = 2.0
"""If a tick is late by more than this, in seconds, the core itself was paused, for example because its
virtual machine was."""
_COUNT_WITHIN_S = 1.0
"""Maximum time, in seconds, to wait for replicas to report the last requests' token counts before the service
stops."""


@dataclass
class Controller:
    """Starts, checks and stops the components that serve requests. All methods must be called on the event
    loop thread."""

    policies: Callable[[], Policies]
    """Returns the tenants and keys configured by operators."""
    requests: RequestManager
    models: ModelManager
    fronts: FrontPool
    listeners: Listeners
    drains: Drains
    _applied_policies: Policies | None = field(default=None, init=False)
    _tick_timer: asyncio.TimerHandle | None = field(default=None, init=False)
    _ticked_at: float = field(default=0.0, init=False)
    _check_skipped: bool = field(default=False, init=False)

    def start(self) -> None:
        """Start all processes. Connections are accepted once a front is ready."""
        self.fronts.publish_configuration()
        # Start replicas first, because they take longer to start than fronts.
        self.models.start()
        self.fronts.start()
        self._ticked_at = time.monotonic()
        self._tick()

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drain the service, then stop all processes. Once the `hurry` event is set, the drain no longer
        waits for requests. New requests are refused until the drain is complete. If a socket outlives the
        service, new connections on it wait for the next startup.
        """
        self.listeners.begin_stop()
        await self.drains.stop(hurry)
        self.listeners.close()
        await self.fronts.stop()
        in_flight = self.requests.state.in_flight
        deadline = time.monotonic() + _COUNT_WITHIN_S
        while in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self.models.stop()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        if in_flight:
            log.error(
                "%d requests were unfinished when the service stopped; their rows in the request log will be "
                "closed at the next start",
                len(in_flight),
            )

    def apply_policies(self) -> None:
        """Apply tenant and key changes to the request queue and the fronts."""
        if (policies := self.policies()) is not self._applied_policies:
            self._applied_policies = policies
            self.requests.set_policies(policies)
        self.fronts.publish_identities()

    def _tick(self) -> None:
        self._tick_timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        now = time.monotonic()
        since_s, self._ticked_at = now - self._ticked_at, now
        self.requests.expire()
        self._check_skipped = since_s > _TICK_S + _PAUSE_S and not self._check_skipped
        if self._check_skipped:
            # Check processes at the next tick, even if it is late too. By then, the reports that they sent
            # during the pause have been read, without which every process would look hung.
            log.warning("the core did not run for %.1f s; the machine was paused or is overloaded", since_s)
        else:
            self.fronts.check()
            self.models.check()
        self.listeners.update()
        self.apply_policies()
