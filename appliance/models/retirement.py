"""Retires replicas: lets them finish their requests, stops them, and verifies that their memory has been
freed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from appliance.background import Background, wait_until
from appliance.models.freed_memory import find_held
from appliance.models.parking import Parked
from appliance.models.replica import Replica
from appliance.traffic.request_manager import RequestManager

log = logging.getLogger(__name__)

STOP_S = 2.0
"""How long a replica may take to stop before it is killed."""
_RETURNED_AGAIN_S = 30.0
"""How often to recheck whether a stopped replica has freed its memory."""


class ReplicaRetirements:
    """Retires replicas. All methods must be called on the event loop thread."""

    def __init__(
        self,
        replicas: list[Replica],
        parked: Mapping[str, Parked],
        drain_grace_s: Callable[[], float],
        *,
        requests: RequestManager,
        update: Callable[[Replica], None],
        publish: Callable[[], None],
        note: Callable[[str, str], None],
    ) -> None:
        """`replicas` holds all replicas; this class removes stopped ones. `parked` holds the parked models.
        `drain_grace_s` returns the setting of that name. `update` is called when `Replica.answers` has
        changed. `publish` and `note` are the model manager's callbacks."""
        self.unreturned: dict[str, str] = {}
        """Descriptions of memory still held by stopped replicas, by model."""
        self._replicas = replicas
        self._parked = parked
        self._drain_grace_s = drain_grace_s
        self._requests = requests
        self._update = update
        self._publish = publish
        self._note = note
        self._tasks: dict[Replica, asyncio.Task[None]] = {}
        self._background = Background()

    def stop(self) -> None:
        """Cancel all retirements in progress."""
        for task in list(self._tasks.values()):
            task.cancel()

    async def retire(self, replica: Replica) -> None:
        """Stop sending requests to the replica, let it finish its requests, and stop it. If the caller is
        cancelled, the retirement continues."""
        await asyncio.shield(self.begin(replica))

    def begin(self, replica: Replica) -> asyncio.Task[None]:
        """Start retiring a replica, if it is not already being retired. Return the task."""
        if (task := self._tasks.get(replica)) is None:
            replica.retiring = True
            task = asyncio.get_running_loop().create_task(self._finish_and_end(replica))
            self._tasks[replica] = task
            task.add_done_callback(lambda _: self._tasks.pop(replica))
        return task

    async def _finish_and_end(self, replica: Replica) -> None:
        self._publish()
        account = replica.account
        if account is not None:
            self._update(replica)
            await wait_until(
                lambda: not self._requests.state.occupied(account) or replica.account is not account,
                self._grace_s(replica),
            )
            self._requests.preempt(account)
        pids = [] if replica.group is None else list(replica.group.pids)
        try:
            await replica.stop(STOP_S)
            if reason := await find_held(pids):
                log.warning("%s: %s", replica.name, reason)
                self._note(replica.name, reason)
                self.unreturned[replica.model] = reason
                self._background.run(self._until_returned(replica.model, reason, pids))
        finally:
            self._replicas.remove(replica)
        log.info("%s ended", replica.name)

    def _grace_s(self, replica: Replica) -> float | None:
        """Return how many seconds the replica's requests have to finish, or None if there is no limit."""
        if (parked := self._parked.get(replica.model)) is not None:
            return parked.drain_left_s
        # If no other replica serves the model, requests that outlast the grace period continue on the
        # replacement.
        alone = not any(
            other.account for other in self._replicas if other.model == replica.model and not other.retiring
        )
        return self._drain_grace_s() if alone else None

    async def _until_returned(self, unit: str, reason: str, pids: list[int]) -> None:
        """Wait until the model's memory has been freed, then remove the model from `unreturned`."""
        while self.unreturned.get(unit) == reason:
            await asyncio.sleep(_RETURNED_AGAIN_S)
            if not await find_held(pids):
                if self.unreturned.get(unit) == reason:
                    del self.unreturned[unit]
                log.info("the memory of %s has been freed", unit)
                return
