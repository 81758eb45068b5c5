"""Limits the host memory for the weights of models that sleep without a command."""

from __future__ import annotations

import logging
from collections.abc import Callable

from appliance.background import wait_until
from appliance.models.bundles import Bundles
from appliance.models.manager import ModelManager
from appliance.settings import Settings

log = logging.getLogger(__name__)


class SleepLimit:
    """Applies `on_demand.sleeping_memory_gb`. All methods must be called on the event loop's thread."""

    def __init__(self, settings: Callable[[], Settings], manager: ModelManager, bundles: Bundles) -> None:
        """`settings` returns the settings in effect."""
        self._settings = settings
        self._manager = manager
        self._bundles = bundles

    async def may_sleep(self, unit: str, wanted: tuple[str, ...]) -> bool:
        """Return whether a unit that must release its memory is to sleep instead of being unloaded. To stay
        within the limit, unload other units that sleep without a command if necessary (`unload_down_to`).
        They are unloaded even before it is known whether the replicas can sleep, because the limit must never
        be exceeded. `wanted` contains the units that need the memory."""
        replicas = self._manager.of(unit)
        if not self._bundles.occupies_memory(unit) or not all(replica.on_gpus for replica in replicas):
            return False  # On a CPU, the weights of a sleeping model would stay in memory.
        room = self.limit_bytes() - sum(replica.weight_bytes for replica in replicas)
        parked = self._manager.parked_host_bytes()
        if sum(parked.values()) - sum(parked[one] for one in self._unused(wanted)) > room:
            return False
        await self.unload_down_to(room, wanted)
        return sum(self._manager.parked_host_bytes().values()) <= room

    async def unload_down_to(self, limit_bytes: int, wanted: tuple[str, ...] = ()) -> None:
        """Unload the least recently used of the units that sleep without a command, until the weights of the
        others fit into `limit_bytes`. Units that will be woken soon are not unloaded, even if the weights do
        not fit: the units in `wanted`, and units with waiting requests."""
        while sum(self._manager.parked_host_bytes().values()) > limit_bytes:
            if not (unused := self._unused(wanted)):
                return
            await self._unload(min(unused, key=lambda one: self._bundles.times(one).used_at))

    def limit_bytes(self) -> int:
        """Return how much host memory the weights of units that sleep without a command may use. This is
        `on_demand.sleeping_memory_gb` minus the memory of units that sleep because of a command."""
        parked = self._manager.parked_host_bytes()
        others = [replica for replica in self._manager.replicas if replica.model not in parked]
        limit_bytes = int(self._settings().on_demand.sleeping_memory_gb * 1e9)
        return max(0, limit_bytes - sum(replica.sleeping.host_bytes for replica in others))

    async def _unload(self, unit: str) -> None:
        log.info("%s no longer sleeps and is unloaded: on_demand.sleeping_memory_gb is reached", unit)
        self._manager.park(unit)
        await wait_until(lambda: not self._bundles.is_leaving(unit), None)

    def _unused(self, wanted: tuple[str, ...]) -> list[str]:
        """Return the units that sleep without a command and may be unloaded."""
        return [
            unit
            for unit in self._manager.parked_host_bytes()
            if unit not in wanted and not self._bundles.busy(unit) and not self._bundles.stays(unit)
        ]
