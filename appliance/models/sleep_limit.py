"""Limits the host memory occupied by the weights of models that were put to sleep automatically."""

from __future__ import annotations

import logging
from collections.abc import Callable

from appliance.background import wait_until
from appliance.models.bundles import Bundles
from appliance.models.manager import ModelManager
from appliance.settings import Settings

log = logging.getLogger(__name__)


class SleepLimit:
    """Enforces the `on_demand.sleeping_memory_gb` setting. All methods must be called on the event loop
    thread."""

    def __init__(self, settings: Callable[[], Settings], manager: ModelManager, bundles: Bundles) -> None:
        """`settings` is a function that returns the current settings."""
        self._settings = settings
        self._manager = manager
        self._bundles = bundles

    async def may_sleep(self, unit: str, wanted: tuple[str, ...]) -> bool:
        """True if a model that must release its memory should be put to sleep rather than unloaded. To stay
        within the limit, this method may unload other models that were put to sleep automatically
        (`unload_down_to`). These models are unloaded before it is known whether `unit` can sleep, because the
        limit must never be exceeded. `wanted` holds the models that need the memory.
        """
        replicas = self._manager.of(unit)
        if not self._bundles.occupies_memory(unit) or not all(replica.on_gpus for replica in replicas):
            return False  # On a CPU, a sleeping model would keep its weights in memory.
        capacity = self.limit_bytes() - sum(replica.weight_bytes for replica in replicas)
        parked = self._manager.parked_host_bytes()
        if sum(parked.values()) - sum(parked[one] for one in self._unused(wanted)) > capacity:
            return False
        await self.unload_down_to(capacity, wanted)
        return sum(self._manager.parked_host_bytes().values()) <= capacity

    async def unload_down_to(self, limit_bytes: int, wanted: tuple[str, ...] = ()) -> None:
        """Unload models that were put to sleep automatically, least recently used first, until the weights of
        the remaining ones fit into `limit_bytes`. Models that will soon be woken (those in `wanted` and those
        with waiting requests) are never unloaded, even if the weights do not fit."""
        while sum(self._manager.parked_host_bytes().values()) > limit_bytes:
            if not (unused := self._unused(wanted)):
                return
            await self._unload(min(unused, key=lambda one: self._bundles.times(one).used_at))

    def limit_bytes(self) -> int:
        """Return the host memory limit for the weights of models that were put to sleep automatically:
        `on_demand.sleeping_memory_gb` minus the memory of models put to sleep by a command."""
        parked = self._manager.parked_host_bytes()
        others = [replica for replica in self._manager.replicas if replica.model not in parked]
        limit_bytes = int(self._settings().on_demand.sleeping_memory_gb * 1e9)
        return max(0, limit_bytes - sum(replica.sleeping.host_bytes for replica in others))

    async def _unload(self, unit: str) -> None:
        log.info("unloading sleeping model %s: on_demand.sleeping_memory_gb has been reached", unit)
        self._manager.park(unit)
        await wait_until(lambda: not self._bundles.is_leaving(unit), None)

    def _unused(self, wanted: tuple[str, ...]) -> list[str]:
        """Return the models that were put to sleep automatically and may be unloaded."""
        return [
            unit
            for unit in self._manager.parked_host_bytes()
            if unit not in wanted and not self._bundles.busy(unit) and not self._bundles.stays(unit)
        ]
