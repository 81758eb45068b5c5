"""Puts all replicas of a unit to sleep, and wakes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from appliance.traffic.request_manager import RequestManager

if TYPE_CHECKING:
    from appliance.models.replica import Replica


class UnitSleep:
    """Puts the replicas of units to sleep. All methods must be called on the event loop's thread."""

    def __init__(
        self,
        replicas_of: Callable[[str], list[Replica]],
        requests: RequestManager,
        publish: Callable[[], None],
    ) -> None:
        """`replicas_of` returns the replicas of a unit. `publish` is called when a model may have become
        ready or unavailable."""
        self._replicas_of = replicas_of
        self._requests = requests
        self._publish = publish

    async def sleep(self, unit: str) -> str:
        """Release the memory of the unit's replicas, which must have no requests. Return the reason if they
        stay awake."""
        replicas = self._replicas_of(unit)
        for replica in replicas:
            if replica.account is not None:
                self._requests.retire_replica(replica.account)
        problems = await asyncio.gather(*(replica.sleep() for replica in replicas))
        problem = next(filter(None, problems), "")
        if problem:
            await self.wake(unit)
        self._publish()
        return problem

    async def wake(self, unit: str) -> str:
        """Restore the memory of the unit's replicas. A replica whose processes have ended is loaded again:
        `ModelManager.loaded` reports when all replicas are ready. If not all replicas can wake, all of them
        stay asleep, and the reason is returned."""
        replicas = self._replicas_of(unit)
        problems = await asyncio.gather(*(replica.wake() for replica in replicas))
        asleep = [why for why, replica in zip(problems, replicas, strict=True) if replica.sleeping.asleep]
        if asleep:
            await asyncio.gather(*(replica.sleep() for replica in replicas if replica.answers))
            return asleep[0]
        for replica in replicas:
            if replica.account is not None and replica.answers:
                self._requests.retire_replica(replica.account)  # must not be added twice
                self._requests.add_replica(replica.account)
        self._publish()
        return ""
