"""Starts, stops and replaces the replicas of each model, one by one, until they match the settings. A replica
that already has the target settings stays, and a missing one is started. A replica with different settings
keeps serving until its successor is ready, if there is enough memory for both. Otherwise, the old replica is
stopped first, and its requests continue on its successor.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Protocol

from appliance.background import wait_until
from appliance.models.fit import MemoryShortage
from appliance.models.parking import Parked
from appliance.models.replica import Replica
from appliance.models.retirement import ReplicaRetirements
from appliance.models.scaling import ModelScaling
from appliance.models.start_checks import StartChecks
from appliance.models.unit_sleep import UnitSleep
from appliance.settings import ModelSettings
from appliance.traffic.state import TrafficState

log = logging.getLogger(__name__)

_MAX_FAILED_STARTS = 3
"""After this many failed starts of a successor, the previous replica is kept."""


class ChangedUnits(Protocol):
    """The models whose replicas a change starts, stops or replaces."""

    @property
    def load_timeout_s(self) -> float:
        """Time limit in seconds for checking a model's files."""

    def of(self, model: str) -> list[Replica]:
        """Return a model's replicas."""

    def settings_of(self, unit: str) -> ModelSettings | None:
        """Return the settings that the model's replicas should have, or None if the model is to be
        removed."""

    def is_parked_asleep(self, unit: str) -> bool:
        """Return whether the model is parked and all its replicas are asleep."""

    async def shortage(self, settings: ModelSettings, count: int) -> MemoryShortage:
        """Return how much memory is missing to run `count` replicas with these settings alongside the running
        ones."""


class UnitChanges:
    """Starts, stops and replaces the replicas of each model. All methods must be called on the event loop
    thread."""

    def __init__(
        self,
        units: ChangedUnits,
        parked: Mapping[str, Parked],
        *,
        traffic: TrafficState,
        scaling: ModelScaling,
        sleeping: UnitSleep,
        retirements: ReplicaRetirements,
        checks: StartChecks,
        new_replica: Callable[[str, ModelSettings], Replica],
        remove: Callable[[str], Awaitable[None]],
        note: Callable[[str, str], None],
    ) -> None:
        """Create the object without starting or stopping any replicas.

        - `parked` holds the parked models.
        - `new_replica` adds a replica to a model without starting it.
        - `remove` stops serving a model and stops its replicas.
        - `note` reports a problem to the operator.
        """
        self.given_up: set[str] = set()
        """Models that run with their previous settings because the new ones could not be loaded."""
        self._units = units
        self._parked = parked
        self._traffic = traffic
        self._scaling = scaling
        self._sleeping = sleeping
        self._retirements = retirements
        self._checks = checks
        self._new_replica = new_replica
        self._remove = remove
        self._note = note
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._sleep_tasks: dict[str, asyncio.Task[None]] = {}
        """Tasks that put a model's replicas to sleep or wake them. These tasks are not interrupted."""

    def stop(self) -> None:
        """Cancel all changes in progress."""
        for task in [*self._tasks.values(), *self._sleep_tasks.values()]:
            task.cancel()

    def begin(self, unit: str) -> None:
        """Begin changing the model's replicas, cancelling any change already in progress."""
        if (task := self._tasks.get(unit)) is not None:
            task.cancel()
        self._tasks[unit] = asyncio.get_running_loop().create_task(self._apply(unit))

    def in_progress(self, unit: str) -> bool:
        """Return whether the model's replicas are being changed."""
        task = self._tasks.get(unit)
        return task is not None and not task.done()

    async def ended(self, unit: str) -> None:
        """Wait until the model's latest change has finished or been cancelled."""
        if (task := self._tasks.get(unit)) is not None:
            await asyncio.wait([task])

    async def _apply(self, unit: str) -> None:
        """Start, stop and replace a model's replicas, step by step, until they match the settings or no
        further step is possible."""
        try:
            while await self._next_step(unit):
                pass
        except Exception:
            log.exception("model %s: failed to apply the new settings", unit)
            self.given_up.add(unit)
            self._note(unit, "failed to apply the new settings: see the log for the cause")

    async def _next_step(self, unit: str) -> bool:
        """Take one step towards the target replicas. Return whether another step may be possible."""
        if (sleep_task := self._sleep_tasks.get(unit)) is not None:
            await asyncio.wait([sleep_task])
        wanted = self._units.settings_of(unit)
        by_load = wanted is not None and wanted.max_replicas is not None
        for replica in self._units.of(unit):
            if replica.retiring and not by_load:
                await self._retirements.retire(replica)  # an earlier change had begun to retire the replica
        if wanted is None:
            await self._remove(unit)
            self._tasks.pop(unit, None)
            return False
        if (parked := self._parked.get(unit)) is not None:
            await self._park(unit, parked, wanted)
            return False
        if any(replica.sleeping.begun for replica in self._units.of(unit)):
            await self._uninterrupted(unit, self._wake(unit))
            return True
        staying = [replica for replica in self._units.of(unit) if not replica.retiring]
        serving_first = sorted(staying, key=lambda replica: replica.account is None)
        current = [replica for replica in serving_first if replica.spec == wanted.spec(replica.name)]
        outdated = [replica for replica in serving_first if replica not in current]
        if outdated and outdated[-1].account is None:
            await self._retirements.retire(outdated[-1])
        elif len(current) > self._scaling.count(unit, wanted):
            retirement = self._retirements.begin(current[-1])
            # With autoscaling, do not wait for the retirement, so that a new replica can start if the load
            # grows again.
            if not by_load:
                await asyncio.shield(retirement)
        elif outdated:
            return await self._replace(outdated[0], current, wanted)
        elif len(current) < self._scaling.count(unit, wanted):
            # The files were checked before the first replica was started, but may have changed since.
            changed = ""
            if current:
                changed = await self._checks.find_change(unit, wanted, self._units.load_timeout_s)
            added = self._new_replica(unit, wanted)
            if changed:
                added.refuse(changed)
            else:
                added.start()
        else:
            return False
        return True

    async def _replace(self, old: Replica, current: list[Replica], wanted: ModelSettings) -> bool:
        """Replace a replica with one that has the target settings. Return False if the settings cannot be
        loaded."""
        if len(current) < self._scaling.count(old.model, wanted):
            if refusal := (await self._units.shortage(wanted, 1)).reason:
                log.warning("stopping %s before loading its replacement: %s", old.name, refusal)
                self._note(old.name, f"stopped before its replacement was loaded: {refusal}")
                await self._retirements.retire(old)
                return True
            new = self._new_replica(old.model, wanted)
            log.info("loading %s to replace %s, which keeps serving in the meantime", new.name, old.name)
            new.start()
            current = [*current, new]
        for new in current:
            if not await _becomes_ready(new):
                self.given_up.add(old.model)
                self._note(
                    new.name,
                    f"the new settings cannot be loaded, so {old.name} keeps running: {new.last_error}",
                )
                await self._retirements.retire(new)
                return False
        await self._retirements.retire(old)
        return True

    async def _park(self, unit: str, parked: Parked, wanted: ModelSettings) -> None:
        """Put a parked model's replicas to sleep if `parked.asleep` is set and if they can sleep. Otherwise,
        stop them."""
        if any(replica.spec != wanted.spec(replica.name) for replica in self._units.of(unit)):
            parked.asleep = False  # The replicas would otherwise go to sleep with outdated settings.
        if parked.asleep and not self._units.is_parked_asleep(unit):
            await self._uninterrupted(unit, self._put_to_sleep(unit))
        if not self._units.is_parked_asleep(unit):
            parked.asleep = False
            self._scaling.reset(unit, wanted)
            replicas = self._units.of(unit)
            await asyncio.gather(*(self._retirements.retire(replica) for replica in replicas))

    async def _uninterrupted(self, unit: str, change: Coroutine[Any, Any, None]) -> None:
        """Put a model's replicas to sleep or wake them. A later change to the model waits for this to
        finish."""
        task = self._sleep_tasks[unit] = asyncio.get_running_loop().create_task(change)
        task.add_done_callback(lambda _: self._sleep_tasks.pop(unit, None))
        await asyncio.shield(task)

    async def _put_to_sleep(self, unit: str) -> None:
        """Let a parked model's replicas finish their requests and put the replicas to sleep if possible. The
        replicas get no new requests until `_wake` is called, even if they stay awake."""
        self._sleeping.begin(unit)
        accounts = [replica.account for replica in self._units.of(unit) if replica.account is not None]

        def occupied() -> bool:
            return any(map(self._traffic.occupied, accounts))

        parked = self._parked.get(unit)
        await wait_until(lambda: not occupied(), 0.0 if parked is None else parked.drain_left_s)
        problem = "its requests did not finish in time" if occupied() else await self._sleeping.sleep(unit)
        if problem:
            log.info("%s stays awake: %s", unit, problem)
        else:
            log.info("%s is asleep; its next request will wake it", unit)

    async def _wake(self, unit: str) -> None:
        """Wake a model's replicas. If this fails, stop them, so that the model is reloaded."""
        replicas = self._units.of(unit)
        ended = any(replica.sleeping.asleep and replica.group is None for replica in replicas)
        problem = "its processes have exited" if ended else await self._sleeping.wake(unit)
        if problem:
            log.info("reloading %s instead of waking it: %s", unit, problem)
            await asyncio.gather(*(self._retirements.retire(replica) for replica in replicas))
        elif all(replica.answers for replica in replicas):
            log.info("%s is awake", unit)


async def _becomes_ready(replica: Replica) -> bool:
    """Wait until the replica is ready. Return False if it cannot be started."""

    def failed() -> bool:
        return bool(replica.failure) or replica.failed_starts >= _MAX_FAILED_STARTS

    await wait_until(lambda: replica.account is not None or failed(), None)
    return replica.account is not None
