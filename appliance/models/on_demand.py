"""Loads models on their first request, unloads idle models or puts them to sleep, and swaps models that
cannot be in memory together. `appliance.models.residency` makes the decisions, based on the descriptions in
`appliance.models.bundles`, and this module carries them out.

A model or version that accepts requests is in one of three states:

- unknown to the fronts (only registered versions). On its first request, the fronts read its tokenizer
  (`ModelOperations.introduce`), and the request is queued.
- parked: requests wait in the queue until the model is loaded or, if its replicas are asleep, woken.
- in memory.

Only one load or swap is in progress at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import Counter
from collections.abc import Callable

from appliance.background import Background, Timer, wait_until
from appliance.models.bundles import Bundles
from appliance.models.fit import MemoryShortage
from appliance.models.front_routes import FrontRoutes
from appliance.models.load_errors import LoadError, MemoryShortageError, outcome
from appliance.models.manager import ModelManager
from appliance.models.operations import ModelOperations
from appliance.models.residency import (
    REASONS,
    Bundle,
    Evict,
    EvictionReason,
    LoadUnits,
    Refuse,
    Residency,
    Step,
    Wait,
    expired,
    first_waiting,
    next_step,
)
from appliance.models.routing import Routing
from appliance.models.sleep_limit import SleepLimit
from appliance.settings import ModelSettings, Settings
from appliance.traffic.request_manager import RequestManager
from store.models import VersionRecord

log = logging.getLogger(__name__)

_POLL_S = 0.05
_IDLE_POLL_S = 0.5
"""Interval, in seconds, between two turns while no request waits. A turn takes CPU time for every model."""
_RETRY_S = 30.0
"""How long requests for a model are refused after an on-demand load has failed. The first request after this
time retries the load."""
_FORGET_S = 600.0
"""An unloaded on-demand version is removed from the fronts this many seconds after its last request, so that
its tokenizer does not occupy memory."""


class OnDemand:
    """Decides which models are in memory. All methods must be called on the event loop thread."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        *,
        operations: ModelOperations,
        manager: ModelManager,
        routing: Routing,
        requests: RequestManager,
        fronts: FrontRoutes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.loads: Counter[str] = Counter()
        """On-demand loads since startup, by model or version."""
        self.evictions: Counter[tuple[str, EvictionReason]] = Counter()
        """How often each model or version was automatically unloaded or put to sleep, by reason
        (`REASONS`)."""
        self._settings = settings
        self._operations = operations
        self._manager = manager
        self._routing = routing
        self._requests = requests
        self._fronts = fronts
        self._clock = clock
        self._bundles = Bundles(settings, operations, manager, routing, requests.state, clock)
        self._sleep_limit = SleepLimit(settings, manager, self._bundles)
        self._introducing: set[str] = set()
        self._at_start = [name for name in manager.models if manager.is_parked(name)]
        """Models in the settings that are loaded after the required ones, if they fit into memory."""
        self._loads: dict[str, asyncio.Task[None]] = {}
        """Tasks that load models at the request of operators."""
        self._changing = asyncio.Lock()
        """A lock that is held while a model is being loaded or unloaded."""
        self._retries: dict[str, Timer] = {}
        """For each model in `Routing.problems`, the timer of its next load attempt."""
        self._background = Background()
        self._task: asyncio.Task[None] | None = None
        operations.on_repair = self._repaired

    def start(self) -> None:
        """Start loading and unloading models."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Stop loading and unloading models."""
        for task in (self._task, *self._loads.values()):
            if task is not None:
                task.cancel()

    # ── for operators ──

    async def load(self, record: VersionRecord) -> None:
        """Load a version as `ModelOperations.load` does. If the version does not fit into memory, first
        unload idle models that may be unloaded. If it is already being loaded, wait for that load. Raises
        LoadError if the load fails."""
        await self._shared_load(record.unit, record)

    async def load_declared(self, unit: str) -> None:
        """Load an optional model from the settings. If the model does not fit into memory, first unload idle
        models that may be unloaded. If it is already being loaded, wait for that load. Raises LoadError if
        the load fails."""
        await self._shared_load(unit, None)

    async def _shared_load(self, unit: str, record: VersionRecord | None) -> None:
        if (task := self._loads.get(unit)) is None:
            task = self._loads[unit] = asyncio.get_running_loop().create_task(self._load(unit, record))
            task.add_done_callback(lambda _: self._loads.pop(unit, None))
        await outcome(task, unit)

    def is_loading(self, unit: str) -> bool:
        """Return whether an operator's command is loading the model or is waiting to do so until a different
        model has been loaded."""
        return unit in self._loads

    async def unload(self, record: VersionRecord, grace_s: float) -> None:
        """Unload a version as `ModelOperations.unload` does. If the version is being loaded or is waiting for
        a different version to be loaded first, cancel the load."""
        if (task := self._loads.get(record.unit)) is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._operations.unload(record, grace_s)

    async def _load(self, unit: str, record: VersionRecord | None) -> None:
        async with self._changing:
            if (record is not None and unit not in self._routing.usable) or self._manager.is_parked(unit):
                self._forgive(unit)
                await self._free_memory(unit, self._settings_of(unit, record))
                self._bundles.note_load(unit)
            if record is None:
                await self._operations.load_declared(unit)
            else:
                await self._operations.load(record)
            self._bundles.times(unit).ready_at = self._clock()
            self._bundles.incomplete.add(self._bundles.loaded_with(unit))

    def _settings_of(self, unit: str, record: VersionRecord | None) -> ModelSettings:
        """Return the settings of a model or version, even if the model manager does not know it."""
        if record is None:
            return self._settings().models[unit]
        return self._operations.settings_of(record.folder, record.settings)

    def expires_at(self, unit: str) -> float | None:
        """Return the unix time at which the model will be unloaded if no more requests arrive, or None if it
        stays loaded."""
        leaves_at = self._bundles.leaves_at(unit)
        if leaves_at == math.inf or self._bundles.kept(unit) or not self._bundles.occupies_memory(unit):
            return None
        return time.time() + max(0.0, leaves_at - self._clock())

    def stats(self, unit: str) -> Residency:
        """Return whether the model is in memory, how often it was loaded or woken on demand, and how often it
        was evicted."""
        return Residency(
            in_memory=self._bundles.occupies_memory(unit) and unit not in self._operations.asleep,
            loads=self.loads[unit],
            evictions={reason: self.evictions[unit, reason] for reason in REASONS},
        )

    # ── requests ──

    def wanted(self, name: str) -> None:
        """Start accepting requests for a version that is asleep or not loaded, because requests for it are
        waiting in a front. Fronts call this repeatedly while requests are waiting, so a call may be ignored
        while an operation is in progress."""
        record = self._routing.target_of(name)
        if record is None or record.unit in self._introducing or record.unit in self._routing.problems:
            return
        self._introducing.add(record.unit)
        self._background.run(self._introduce(record))

    async def _introduce(self, record: VersionRecord) -> None:
        try:
            if self._routing.sleeps(record.unit):
                await self._wake(record)
            await self._operations.introduce(record)
        except LoadError as error:
            self._fail(record.unit, str(error))
        finally:
            self._introducing.discard(record.unit)

    async def _wake(self, record: VersionRecord) -> None:
        """Wake a sleeping version for which requests are waiting in the fronts. If there is not enough
        memory, unload the version, so that it is later loaded like any other model. Raises LoadError if
        waking fails for another reason."""
        unit = record.unit
        await self._operations.finish_sleep(unit)
        if unit not in self._operations.asleep:
            return
        log.info("waking %s because of a request", unit)
        try:
            await self.load(record)
        except MemoryShortageError as error:
            log.info("unloading %s, which will be reloaded: %s", unit, error)
            await self._operations.unload(record, 0.0)

    # ── the loop ──

    async def _run(self) -> None:
        while True:
            try:
                self._observe()
                await self._turn()
            except Exception:
                log.exception("failed to load models on demand")
                await asyncio.sleep(1.0)
            await asyncio.sleep(_POLL_S)
            await wait_until(self._has_work, _IDLE_POLL_S)

    def _has_work(self) -> bool:
        """Return whether requests are waiting or models remain to be loaded."""
        waiting = any(model.queued for model in self._requests.state.models.values())
        return waiting or bool(self._bundles.incomplete or self._at_start)

    def _observe(self) -> None:
        """Record which models are in use. Remove from the fronts the versions that are no longer needed."""
        self._bundles.observe()
        for unit in [unit for unit in self._routing.usable if self._routing.version_of(unit) is None]:
            # A request introduced the version to the fronts while a command was deleting it.
            self._routing.usable.discard(unit)
            self._background.run(self._manager.unload(unit, 0.0))
        for record in filter(None, map(self._routing.version_of, self._bundles.units())):
            if self._is_forgettable(record):
                self._background.run(self._operations.unload(record, 0.0))

    def _is_forgettable(self, record: VersionRecord) -> bool:
        unit, times = record.unit, self._bundles.times(record.unit)
        return (
            record.loaded_at is None
            and unit in self._routing.usable
            and self._manager.is_parked(unit)
            and not self._manager.of(unit)
            and not self._bundles.busy(unit)
            and self._requests.state.pauses.of(unit) is None  # an operator's drain must not be forgotten
            and self._clock() > max(times.used_at, times.ready_at) + _FORGET_S
        )

    async def _turn(self) -> None:
        """Take at most one step towards loading or unloading a model."""
        if self._changing.locked() or self._operations.loads:
            return
        async with self._changing:
            await self._sleep_limit.unload_down_to(self._sleep_limit.limit_bytes())
            now, bundles = self._clock(), list(self._bundles.all())
            for bundle in bundles:
                if expired(now, bundle, max(map(self._bundles.leaves_at, bundle.units))):
                    await self._evict(bundle.units, "idle", "its time to live has expired")
                    return
            wanted = first_waiting(bundles)
            if wanted is None:
                await self._load_at_start(bundles)
            else:
                await self._serve(wanted, bundles)

    async def _serve(self, wanted: Bundle, bundles: list[Bundle]) -> None:
        """Take the next step towards loading a bundle that has waiting requests."""
        unit = self._bundles.next_unit(wanted)
        bundles = await self._bundles.measure(bundles, unit)
        wanted = next(one for one in bundles if one.units == wanted.units)
        if unknown := [one for one in wanted.units if one not in self._manager.models]:
            await self._introduce_member(wanted, unknown[0])
            return
        if not unit:
            return  # The bundle's models are still being removed from memory.
        step = next_step(
            self._clock(),
            wanted,
            bundles,
            missing_bytes=await self._bundles.missing_bytes(unit),
            min_residence_s=self._settings().on_demand.min_residence_s,
            excludes=lambda other: self._bundles.excluded(wanted, other),
        )
        if isinstance(step, LoadUnits):
            if self._manager.is_parked(unit):
                await self._bring_back(unit, wanted)
        elif isinstance(step, Evict):
            explanation = f"requests are waiting for {', '.join(wanted.units)}"
            for bundle in [one for one in bundles if set(one.units) & set(step.units)]:
                reason: EvictionReason = "group" if self._bundles.excluded(wanted, bundle) else "memory"
                await self._evict(bundle.units, reason, explanation, wanted.units)
        elif isinstance(step, Refuse):
            asleep = [unit for unit in wanted.units if self._manager.is_parked_asleep(unit)]
            if asleep and not step.excluded:
                # Other GPUs may have enough memory to load the sleeping model.
                for unit in asleep:
                    await self._manager.end_sleep(unit)
                return
            self._bundles.incomplete.discard(wanted.units)
            for unit in wanted.units:
                self._fail(unit, step.reason)

    async def _introduce_member(self, wanted: Bundle, unit: str) -> None:
        """Let the fronts accept requests for a version that must be loaded together with another one."""
        if (record := self._routing.version_of(unit)) is None:
            return  # A command has deleted the version in the meantime.
        try:
            await self._operations.introduce(record)
        except LoadError as error:
            self._bundles.incomplete.discard(wanted.units)
            for one in wanted.units:
                self._fail(one, f"{unit}, which must be loaded at the same time, cannot be loaded: {error}")

    async def _bring_back(self, unit: str, wanted: Bundle) -> None:
        self._bundles.note_load(unit)
        self.loads[unit] += 1
        change = "waking" if self._manager.is_parked_asleep(unit) else "loading"
        log.info("%s %s because requests are waiting for %s", change, unit, ", ".join(wanted.units))
        try:
            await self._operations.bring_back(unit)
        except LoadError as error:
            self._bundles.incomplete.discard(wanted.units)
            for one in wanted.units:
                self._fail(one, str(error))
            return
        self._bundles.times(unit).ready_at = self._clock()
        self._bundles.incomplete.add(wanted.units)
        self._operations.forget_failure(unit)
        self._fronts.publish_configuration()

    async def _evict(
        self, units: tuple[str, ...], reason: EvictionReason, explanation: str, wanted: tuple[str, ...] = ()
    ) -> None:
        """Unload models or put them to sleep and wait until their memory is free. The wait lasts at most
        `DRAIN_S` plus the time limits for putting replicas to sleep and stopping them. `wanted` holds the
        models that need the memory."""
        leaving = [unit for unit in units if self._manager.of(unit)]
        self._bundles.incomplete.discard(units)
        for unit in leaving:
            asleep = await self._sleep_limit.may_sleep(unit, wanted)
            if self._bundles.stays(unit):
                continue  # A command or new settings have changed the model in the meantime.
            log.info("%s is %s: %s", unit, "put to sleep" if asleep else "unloaded", explanation)
            if self._bundles.occupies_memory(unit):
                self.evictions[unit, reason] += 1
                self._bundles.times(unit).left_at = self._clock()
            self._manager.park(unit, asleep=asleep)
        while any(map(self._bundles.is_leaving, leaving)):
            self._observe()
            await asyncio.sleep(_POLL_S)
        self._fronts.publish_configuration()

    async def _load_at_start(self, bundles: list[Bundle]) -> None:
        """Load the next optional model in the settings, if it fits into memory."""
        if not self._at_start or any(one.state in ("starting", "loading") for one in self._manager.replicas):
            return
        unit = self._at_start.pop(0)
        bundle = next((one for one in bundles if unit in one.units), None)
        if bundle is None or not self._manager.is_parked(unit):
            return
        others = [one for one in bundles if one.in_memory and not one.asleep]
        excluded = any(self._bundles.excluded(bundle, one) for one in others)
        if excluded or await self._bundles.missing_bytes(unit) > 0:
            log.info("not loading %s at startup, because it does not fit into memory", unit)
            return
        self._bundles.note_load(unit)
        # If this load fails, the model is shown as failed, and its next request retries the load.
        with contextlib.suppress(LoadError):
            await self._operations.bring_back(unit)
            self._bundles.incomplete.add(bundle.units)
        self._bundles.times(unit).ready_at = self._clock()

    async def _free_memory(self, unit: str, settings: ModelSettings) -> None:
        """Unload idle models until `unit` fits into memory or no more models can be unloaded. If `unit` is
        asleep, its GPUs may not have enough memory to wake it while other GPUs have enough to load it. In
        that case, unload it first."""
        wanted = Bundle((unit,), waiting_since=self._clock())

        async def next_towards(shortage: MemoryShortage, target: str) -> Step:
            idle = [one for one in self._bundles.all() if unit not in one.units and not one.busy]
            return next_step(
                self._clock(),
                wanted,
                await self._bundles.measure(idle, target),
                missing_bytes=shortage.bytes,
                min_residence_s=0.0,
                excludes=lambda other: self._bundles.excluded(wanted, other),
            )

        while True:
            step = await next_towards(await self._manager.shortage_of(unit, settings), unit)
            if isinstance(step, Refuse) and self._manager.is_parked_asleep(unit):
                load = await next_towards(await self._manager.shortage(settings), "")
                if not isinstance(load, Refuse):
                    await self._manager.end_sleep(unit)
                    continue
            if isinstance(step, Evict):
                await self._evict(step.units, "memory", f"{unit} is being loaded", (unit,))
            elif isinstance(step, Wait):
                await asyncio.sleep(_POLL_S)
            elif isinstance(step, Refuse) and step.excluded:
                raise LoadError(f"{unit} cannot be loaded: {step.reason}")
            else:
                return

    # ── failures ──

    def _fail(self, unit: str, explanation: str) -> None:
        """Refuse requests for the model until its next load attempt is due."""
        log.warning("%s could not be loaded on demand: %s", unit, explanation)
        self._routing.failures[unit] = self._routing.problems[unit] = explanation
        record = self._routing.version_of(unit)
        if record is not None:
            self._operations.note_failure(record, explanation)
        if unit in self._requests.state.models:
            self._requests.fail_model(unit, explanation)
        self._fronts.publish_configuration()
        self._retries.setdefault(unit, Timer()).start(_RETRY_S, lambda: self._forgive(unit))

    def _forgive(self, unit: str) -> None:
        """Resume accepting requests for the model after a failed load."""
        if self._routing.problems.pop(unit, None) is None:
            return
        self._retries.pop(unit).stop()
        if unit in self._requests.state.models and not self._manager.failure(unit):
            self._requests.recover_model(unit)
        self._fronts.publish_configuration()

    def _repaired(self, unit: str) -> None:
        """Retry a version that failed to load and whose files have since changed. If the version is loaded on
        demand, resume accepting its requests. Otherwise, load it now."""
        record = self._routing.version_of(unit)
        if record is None:
            return
        if unit in self._routing.problems or unit in self._routing.usable:
            self._operations.forget_failure(unit)
            self._forgive(unit)
            self._fronts.publish_configuration()
        else:
            self._background.run(self._load_again(record))

    async def _load_again(self, record: VersionRecord) -> None:
        with contextlib.suppress(LoadError):  # already recorded by `note_failure`
            await self.load(record)
