"""Puts all of a model's replicas to sleep or wakes them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from appliance.models.replica import Replica


class UnitSleep:
    """Puts models' replicas to sleep or wakes them. All methods must be called on the event loop thread."""

    def __init__(
        self,
        replicas_of: Callable[[str], list[Replica]],
        update: Callable[[Replica], None],
        publish: Callable[[], None],
    ) -> None:
        """`replicas_of` returns a model's replicas. `update` is called when `Replica.answers` may have
        changed, and `publish` when a model may have become ready or unavailable."""
        self._replicas_of = replicas_of
        self._update = update
        self._publish = publish

    def begin(self, unit: str) -> None:
        """Send no new requests to the model's replicas until `wake` has been called."""
        for replica in self._replicas_of(unit):
            replica.sleeping.begun = True
            self._update(replica)

    async def sleep(self, unit: str) -> str:
        """Release the memory of the model's replicas, which must have no requests. If a replica cannot go to
        sleep, return the reason. The caller must then wake or stop all of the model's replicas."""
        self.begin(unit)
        problems = await asyncio.gather(*(replica.sleep() for replica in self._replicas_of(unit)))
        self._publish()
        return next(filter(None, problems), "")

    async def wake(self, unit: str) -> str:
        """Restore the memory of the model's replicas. A replica whose processes have exited is reloaded;
        `ModelManager.loaded` returns whether all replicas are ready. If there is not enough memory to wake
        one of the replicas, all of them stay asleep, and the reason is returned."""
        replicas = self._replicas_of(unit)
        problems = await asyncio.gather(*(replica.wake() for replica in replicas))
        asleep = [
            reason for reason, replica in zip(problems, replicas, strict=True) if replica.sleeping.asleep
        ]
        if asleep:
            awake = [replica for replica in replicas if not replica.sleeping.asleep]
            problems = await asyncio.gather(*(replica.sleep() for replica in awake))
            for replica, problem in zip(awake, problems, strict=True):
                if problem:
                    replica.stop_until_woken(f"{asleep[0]}, and {problem}")
            return asleep[0]
        for replica in replicas:
            replica.sleeping.begun = False
            self._update(replica)
        self._publish()
        return ""
