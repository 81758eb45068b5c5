"""The controller: the life cycle of the service's parts, from their start to the stop of the service.

                                  Controller
        ┌──────────┬────────────┬─────┴──────┬──────────────┐
        ▼          ▼            ▼            ▼              ▼
    Listeners    Drains     FrontPool   ModelManager   RequestManager

The controller starts, checks and stops these parts. It passes no messages: `FrontPool` and `ModelManager`
call the request manager, which answers fronts through `FrontPool.send`. `appliance.core.service` connects
them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from appliance.core.drains import Drains
from appliance.front_pool.listeners import Listeners
from appliance.front_pool.pool import FrontPool
from appliance.models.manager import ModelManager
from appliance.traffic.request_manager import RequestManager
from store.policies import Policies

log = logging.getLogger(__name__)

_TICK_S = 0.25
_COUNT_WITHIN_S = 1.0
"""Time for replicas to report what they generated for the requests that ended last."""


class Controller:
    """Starts, checks and stops the parts that serve requests. All methods belong on the event loop's
    thread."""

    def __init__(
        self,
        policies: Callable[[], Policies],
        requests: RequestManager,
        models: ModelManager,
        fronts: FrontPool,
        listeners: Listeners,
        drains: Drains,
    ) -> None:
        """`policies` returns the tenants and keys as operators have set them."""
        self._policies = policies
        self._applied_policies: Policies | None = None
        self._requests = requests
        self._models = models
        self._fronts = fronts
        self._listeners = listeners
        self._drains = drains
        self._tick_timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start every process. Connections are accepted as soon as a front is ready."""
        self._fronts.publish_configuration()
        # Replicas first, because they take longer.
        self._models.start()
        self._fronts.start()
        self._tick()

    async def stop(self, hurry: asyncio.Event) -> None:
        """Drain the service (at once when `hurry` is set), then end every process. Until the drain is
        complete, new requests are refused; on sockets that outlive the service they wait for the next one."""
        self._listeners.begin_stop()
        await self._drains.stop(hurry)
        self._listeners.close()
        await self._fronts.stop()
        in_flight = self._requests.state.in_flight
        deadline = time.monotonic() + _COUNT_WITHIN_S
        while in_flight and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        await self._models.stop()
        if self._tick_timer is not None:
            self._tick_timer.cancel()
        if in_flight:
            log.error("%d requests did not end: the next start closes their rows in the log", len(in_flight))

    def apply_policies(self) -> None:
        """Apply changed tenants and keys to the queue and the fronts."""
        if (policies := self._policies()) is not self._applied_policies:
            self._applied_policies = policies
            self._requests.set_policies(policies)
        self._fronts.publish_identities()

    def _tick(self) -> None:
        self._tick_timer = asyncio.get_running_loop().call_later(_TICK_S, self._tick)
        self._requests.expire()
        self._fronts.check()
        self._models.check()
        self._listeners.update()
        self.apply_policies()
