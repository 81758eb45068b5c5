"""Loads models at their first request, unloads models that have not been used for a while or puts them to
sleep, and swaps models that do not fit into memory together. `appliance.models.residency` makes the
decisions, and this module carries them out.

A unit of loading that requests can use is in one of three states:

- unknown to the fronts, which is possible only for a registered version. At its first request, the fronts
  read its tokenizer (`ModelOperations.introduce`), and the request is queued.
- parked: its requests wait in the queue until the unit is loaded or, if its replicas sleep, woken.
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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from appliance.background import Background
from appliance.models.fit import MemoryShortage, host_bytes, read_memory
from appliance.models.front_routes import FrontRoutes
from appliance.models.load_errors import LoadError, NoRoomError, outcome
from appliance.models.manager import ModelManager
from appliance.models.operations import ModelOperations
from appliance.models.residency import (
    REASONS,
    Bundle,
    Evict,
    LoadUnits,
    Refuse,
    Residency,
    Step,
    Wait,
    expired,
    first_waiting,
    next_step,
)
from appliance.models.routing import Routing, split_target, unit_name
from appliance.settings import ModelSettings, Settings
from appliance.traffic.request_manager import RequestManager
from store.models import VersionRecord

log = logging.getLogger(__name__)

_POLL_S = 0.05
_RETRY_S = 30.0
"""How long a model's requests are refused after an on-demand load of the model has failed. The next request
after that repeats the load."""
_FORGET_S = 600.0
"""If a registered version was loaded on demand, has been unloaded, and has had no requests for this long, it
is removed from the fronts so that its tokenizer does not occupy memory."""


_GPU_FACTOR, _GPU_BYTES = 1.1, 2 << 30
"""When a replica on a GPU stops, the memory that it frees is estimated as this multiple of its weights and KV
cache, plus a constant for its context and working memory. A high estimate is harmless, because the free
memory is read again before the next load."""


def _host_bytes(settings: Mapping[str, ModelSettings]) -> dict[str, int]:
    memory = read_memory()
    return {unit: host_bytes(one, memory) for unit, one in settings.items()}


def _key(unit: str) -> tuple[str, int]:
    """Return the key of a unit in `Registry.versions`."""
    model, version = split_target(unit)
    return model, version or 0


@dataclass
class _Times:
    """When a unit was loaded and used, in seconds of the monotonic clock."""

    load_began_at: float = 0.0
    ready_at: float = 0.0
    used_at: float = 0.0
    left_at: float = -math.inf
    """When the unit was unloaded."""


class OnDemand:
    """Decides which units are in memory. All methods must be called on the event loop's thread."""

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
        """Number of on-demand loads since the service started, by unit."""
        self.evictions: Counter[tuple[str, str]] = Counter()
        """Number of times that units were unloaded or put to sleep without a command, by unit and reason
        (`REASONS`)."""
        self._settings = settings
        self._operations = operations
        self._manager = manager
        self._routing = routing
        self._requests = requests
        self._fronts = fronts
        self._clock = clock
        self._times: dict[str, _Times] = {}
        self._host_bytes: dict[str, int] = {}
        """Predicted host memory of one replica of each unit; 0 for units on GPUs."""
        self._introducing: set[str] = set()
        self._incomplete: set[tuple[str, ...]] = set()
        """Bundles that are only partly loaded. Their remaining units are loaded next."""
        self._at_start = [name for name in manager.models if manager.is_parked(name)]
        """Models in the settings that are loaded after the required models, if they fit."""
        self._loads: dict[str, asyncio.Task[None]] = {}
        """Loads that were started by commands."""
        self._changing = asyncio.Lock()
        """Held while a unit is being loaded or unloaded."""
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
        """Load a version as `ModelOperations.load` does. If it does not fit, idle models that may be unloaded
        are unloaded first. If the version is already being loaded, wait for that load. Raises LoadError."""
        await self._shared_load(unit_name(record.model, record.version), record)

    async def load_declared(self, unit: str) -> None:
        """Load a model that is in the settings but not required. If it does not fit, idle models that may be
        unloaded are unloaded first. If the model is already being loaded, wait for that load. Raises
        LoadError."""
        await self._shared_load(unit, None)

    async def _shared_load(self, unit: str, record: VersionRecord | None) -> None:
        if (task := self._loads.get(unit)) is None:
            task = self._loads[unit] = asyncio.get_running_loop().create_task(self._load(unit, record))
            task.add_done_callback(lambda _: self._loads.pop(unit, None))
        await outcome(task, unit)

    def is_loading(self, unit: str) -> bool:
        """Return whether a command is loading the unit. The load may still be waiting for another unit's
        load."""
        return unit in self._loads

    async def unload(self, record: VersionRecord, grace_s: float) -> None:
        """Unload a version as `ModelOperations.unload` does. If the version is being loaded, that load is
        cancelled, even if it is still waiting for another version's load."""
        if (task := self._loads.get(unit_name(record.model, record.version))) is not None:
            task.cancel()
            await asyncio.wait([task])
        await self._operations.unload(record, grace_s)

    async def _load(self, unit: str, record: VersionRecord | None) -> None:
        async with self._changing:
            if (record is not None and unit not in self._routing.usable) or self._manager.is_parked(unit):
                self._forgive(unit)
                await self._make_room(unit, self._settings_of(unit, record))
                self._note_load(unit)
            if record is None:
                await self._operations.load_declared(unit)
            else:
                await self._operations.load(record)
            self._of(unit).ready_at = self._clock()
            self._incomplete.add(self._loaded_with(unit))

    def _settings_of(self, unit: str, record: VersionRecord | None) -> ModelSettings:
        """Return the settings of a unit, which may be unknown to the manager if it is a version."""
        if record is None:
            return self._settings().models[unit]
        return self._operations.settings_of(record.folder, record.settings)

    def expires_at(self, unit: str) -> float | None:
        """Return the unix time at which the unit is unloaded if no more requests arrive, or None if it stays
        loaded."""
        leaves_at = self._leaves_at(unit)
        if leaves_at == math.inf or self._kept(unit) or not self._occupies_memory(unit):
            return None
        return time.time() + max(0.0, leaves_at - self._clock())

    def stats(self, unit: str) -> Residency:
        """Return whether the unit is in memory, how often it was loaded or woken on demand, and how often it
        was evicted."""
        return Residency(
            in_memory=self._occupies_memory(unit) and unit not in self._operations.asleep,
            loads=self.loads[unit],
            evictions={reason: self.evictions[unit, reason] for reason in REASONS},
        )

    # ── requests ──

    def wanted(self, name: str) -> None:
        """Handle requests that are waiting in a front for a name whose version is asleep or not loaded.
        Fronts call this repeatedly while the requests wait, so a call may be ignored if an operation is in
        progress."""
        target = self._routing.target_of(name)
        if target is None:
            return
        unit = unit_name(*target)
        if unit not in self._introducing and unit not in self._routing.problems:
            self._introducing.add(unit)
            record = self._operations.registry.current.versions[target]
            self._background.run(self._introduce(unit, record))

    async def _introduce(self, unit: str, record: VersionRecord) -> None:
        try:
            if self._routing.sleeps(unit):
                await self._wake(unit, record)
            await self._operations.introduce(record)
        except LoadError as error:
            self._fail(unit, str(error))
        finally:
            self._introducing.discard(unit)

    async def _wake(self, unit: str, record: VersionRecord) -> None:
        """Wake a sleeping version for which requests are waiting in the fronts. If there is not enough memory
        to wake it, unload it instead; it is then loaded when its turn comes. Raises LoadError."""
        await self._operations.finish_sleep(unit)
        if unit not in self._operations.asleep:
            return
        log.info("waking %s because of a request", unit)
        try:
            await self.load(record)
        except NoRoomError as error:
            log.info("unloading %s, which will be loaded again: %s", unit, error)
            await self._operations.unload(record, 0.0)

    # ── the loop ──

    async def _run(self) -> None:
        while True:
            try:
                self._observe()
                await self._turn()
            except Exception:
                log.exception("loading models on demand failed")
                await asyncio.sleep(1.0)
            await asyncio.sleep(_POLL_S)

    def _observe(self) -> None:
        """Record which units are in use."""
        now = self._clock()
        for unit in self._units():
            times, traffic = self._of(unit), self._requests.state.models.get(unit)
            if self._busy(unit):
                times.used_at = now
            elif traffic is not None and traffic.asked_at is not None:
                times.used_at = max(times.used_at, traffic.asked_at)
            if not times.ready_at and self._manager.loaded(unit):
                times.ready_at = now
        for unit in self._times.keys() - self._manager.models.keys():
            del self._times[unit]
            self._host_bytes.pop(unit, None)
        versions = self._operations.registry.current.versions
        for unit in [unit for unit in self._routing.usable if _key(unit) not in versions]:
            # A request introduced the version while a command was removing it.
            self._routing.usable.discard(unit)
            self._background.run(self._manager.unload(unit, 0.0))
        for unit in [unit for unit in self._units() if self._is_forgettable(unit, now)]:
            self._background.run(self._operations.unload(versions[_key(unit)], 0.0))

    def _is_forgettable(self, unit: str, now: float) -> bool:
        record = self._operations.registry.current.versions.get(_key(unit))
        return (
            record is not None
            and record.loaded_at is None
            and unit in self._routing.usable
            and self._manager.is_parked(unit)
            and not self._manager.of(unit)
            and not self._busy(unit)
            and now > max(self._of(unit).used_at, self._of(unit).ready_at) + _FORGET_S
        )

    async def _turn(self) -> None:
        """Take at most one step."""
        if self._changing.locked() or self._operations.loading:
            return
        async with self._changing:
            await self._limit_sleep(self._sleep_bytes())
            now, bundles = self._clock(), list(self._bundles())
            for bundle in bundles:
                if expired(now, bundle, max(map(self._leaves_at, bundle.units))):
                    await self._evict(bundle.units, "idle", "its time to live has expired")
                    return
            wanted = first_waiting(bundles)
            if wanted is None:
                await self._load_at_start(bundles)
            else:
                await self._serve(wanted, bundles)

    async def _serve(self, wanted: Bundle, bundles: list[Bundle]) -> None:
        """Take the next step towards loading a bundle that has waiting requests."""
        unit = self._next_unit(wanted)
        bundles = await self._measure(bundles, unit)
        wanted = next(one for one in bundles if one.units == wanted.units)
        if unknown := [one for one in wanted.units if one not in self._manager.models]:
            await self._introduce_member(wanted, unknown[0])
            return
        if not unit:
            return  # The units that are not loaded are still being removed from memory.
        step = next_step(
            self._clock(),
            wanted,
            bundles,
            missing_bytes=await self._missing_bytes(unit),
            min_residence_s=self._settings().on_demand.min_residence_s,
            excludes=lambda other: self._excluded(wanted, other),
        )
        if isinstance(step, LoadUnits):
            if self._manager.is_parked(unit):
                await self._bring_back(unit, wanted)
        elif isinstance(step, Evict):
            reasons = {True: "group", False: "memory"}
            why = f"requests are waiting for {', '.join(wanted.units)}"
            for bundle in [one for one in bundles if set(one.units) & set(step.units)]:
                await self._evict(bundle.units, reasons[self._excluded(wanted, bundle)], why, wanted.units)
        elif isinstance(step, Refuse):
            asleep = [unit for unit in wanted.units if self._manager.is_parked_asleep(unit)]
            if asleep and not step.excluded:
                # Other GPUs may have enough memory for a load.
                for unit in asleep:
                    await self._manager.end_sleep(unit)
                return
            self._incomplete.discard(wanted.units)
            for unit in wanted.units:
                self._fail(unit, step.why)

    async def _introduce_member(self, wanted: Bundle, unit: str) -> None:
        """Introduce a version that must be loaded together with another version."""
        try:
            await self._operations.introduce(self._operations.registry.current.versions[_key(unit)])
        except LoadError as error:
            self._incomplete.discard(wanted.units)
            for one in wanted.units:
                self._fail(one, f"{unit}, which must be loaded together with it, cannot be loaded: {error}")

    async def _bring_back(self, unit: str, wanted: Bundle) -> None:
        self._note_load(unit)
        self.loads[unit] += 1
        change = "waking" if self._manager.is_parked_asleep(unit) else "loading"
        log.info("%s %s because requests are waiting for %s", change, unit, ", ".join(wanted.units))
        try:
            await self._operations.bring_back(unit)
        except LoadError as error:
            self._incomplete.discard(wanted.units)
            for one in wanted.units:
                self._fail(one, str(error))
            return
        self._of(unit).ready_at = self._clock()
        self._incomplete.add(wanted.units)
        self._operations.forget_failure(unit)
        self._fronts.publish_configuration()

    async def _evict(
        self, units: tuple[str, ...], reason: str, why: str, wanted: tuple[str, ...] = ()
    ) -> None:
        """Unload units or put them to sleep, and wait until their memory is free. This takes at most
        `DRAIN_S` plus the time limit for replicas to go to sleep plus the time to stop them. `wanted`
        contains the units that need the memory."""
        leaving = [unit for unit in units if self._manager.of(unit)]
        self._incomplete.discard(units)
        for unit in leaving:
            asleep = await self._may_sleep(unit, wanted)
            if self._stays(unit):
                continue  # A command or new settings have changed the unit in the meantime.
            log.info("%s is %s: %s", unit, "put to sleep" if asleep else "unloaded", why)
            if self._occupies_memory(unit):
                self.evictions[unit, reason] += 1
                self._of(unit).left_at = self._clock()
            self._manager.park(unit, asleep=asleep)
        while any(self._occupies_memory(unit) and self._leaves(unit) for unit in leaving):
            self._observe()
            await asyncio.sleep(_POLL_S)
        self._fronts.publish_configuration()

    async def _may_sleep(self, unit: str, wanted: tuple[str, ...]) -> bool:
        """Return whether a unit that must release its memory is to sleep instead of being unloaded. To stay
        within the limit, unload other units that sleep without a command if necessary (`_limit_sleep`). They
        are unloaded even before it is known whether the replicas can sleep, because the limit must never be
        exceeded."""
        replicas = self._manager.of(unit)
        if not self._occupies_memory(unit) or not all(replica.on_gpus for replica in replicas):
            return False  # On a CPU, the weights of a sleeping model would stay in memory.
        room = self._sleep_bytes() - sum(replica.status().weight_bytes for replica in replicas)
        parked = self._manager.parked_host_bytes()
        if sum(parked.values()) - sum(parked[one] for one in self._unused_sleepers(wanted)) > room:
            return False
        await self._limit_sleep(room, wanted)
        return sum(self._manager.parked_host_bytes().values()) <= room

    async def _limit_sleep(self, limit_bytes: int, wanted: tuple[str, ...] = ()) -> None:
        """Unload the least recently used of the units that sleep without a command, until the weights of the
        others fit into `limit_bytes`. Units that will be woken soon are not unloaded, even if the weights do
        not fit: the units in `wanted`, and units with waiting requests."""
        while sum(self._manager.parked_host_bytes().values()) > limit_bytes:
            if not (unused := self._unused_sleepers(wanted)):
                return
            unit = min(unused, key=lambda one: self._of(one).used_at)
            log.info("%s no longer sleeps and is unloaded: on_demand.sleeping_memory_gb is reached", unit)
            self._manager.park(unit)
            while self._occupies_memory(unit) and self._leaves(unit):
                await asyncio.sleep(_POLL_S)

    def _unused_sleepers(self, wanted: tuple[str, ...]) -> list[str]:
        """Return the units that sleep without a command and may be unloaded."""
        return [
            unit
            for unit in self._manager.parked_host_bytes()
            if unit not in wanted and not self._busy(unit) and not self._stays(unit)
        ]

    def _sleep_bytes(self) -> int:
        """Return how much host memory the weights of units that sleep without a command may use. This is
        `on_demand.sleeping_memory_gb` minus the memory of units that sleep because of a command."""
        parked = self._manager.parked_host_bytes()
        others = [replica for replica in self._manager.replicas if replica.model not in parked]
        limit_bytes = int(self._settings().on_demand.sleeping_memory_gb * 1e9)
        return max(0, limit_bytes - sum(replica.sleeping.host_bytes for replica in others))

    def _occupies_memory(self, unit: str) -> bool:
        """Return whether the unit is in memory: its replicas are loading, loaded or being stopped, and it is
        not parked asleep."""
        return bool(self._manager.of(unit)) and not self._manager.is_parked_asleep(unit)

    def _stays(self, unit: str) -> bool:
        """Return whether a unit must not be put to sleep or unloaded, because it has already been unloaded or
        always stays loaded."""
        return self._manager.settings_of(unit) is None or bool(self._kept(unit))

    def _leaves(self, unit: str) -> bool:
        """Return whether the unit is still to be removed from memory. New settings may have required the unit
        again in the meantime."""
        return self._manager.is_parked(unit) or unit not in self._manager.models

    async def _load_at_start(self, bundles: list[Bundle]) -> None:
        """Load the next optional model in the settings, if it fits."""
        if not self._at_start or any(one.state in ("starting", "loading") for one in self._manager.replicas):
            return
        unit = self._at_start.pop(0)
        bundle = next((one for one in bundles if unit in one.units), None)
        if bundle is None or not self._manager.is_parked(unit):
            return
        others = [one for one in bundles if one.in_memory and not one.asleep]
        excluded = any(self._excluded(bundle, one) for one in others)
        if excluded or await self._missing_bytes(unit) > 0:
            log.info("%s is not loaded at startup, because it does not fit; its first request loads it", unit)
            return
        self._note_load(unit)
        # If the load fails, the model is shown as failed, and its next request repeats the load.
        with contextlib.suppress(LoadError):
            await self._operations.bring_back(unit)
            self._incomplete.add(bundle.units)
        self._of(unit).ready_at = self._clock()

    async def _make_room(self, unit: str, settings: ModelSettings) -> None:
        """Unload idle models until a unit fits or no more models can be unloaded. If the unit sleeps and
        cannot wake on its GPUs, but can be loaded on others, unload it first."""
        wanted = Bundle((unit,), waiting_since=self._clock())

        async def next_towards(shortage: MemoryShortage, target: str) -> Step:
            idle = [one for one in self._bundles() if unit not in one.units and not one.busy]
            return next_step(
                self._clock(),
                wanted,
                await self._measure(idle, target),
                missing_bytes=shortage.bytes,
                min_residence_s=0.0,
                excludes=lambda other: self._excluded(wanted, other),
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
                raise LoadError(f"{unit} cannot be loaded: {step.why}")
            else:
                return

    # ── failures ──

    def _fail(self, unit: str, why: str) -> None:
        """Refuse the unit's requests for a while."""
        log.warning("%s could not be loaded on demand: %s", unit, why)
        self._routing.failures[unit] = self._routing.problems[unit] = why
        record = self._operations.registry.current.versions.get(_key(unit))
        if record is not None:
            self._operations.note_failure(unit, record, why)
        if unit in self._requests.state.models:
            self._requests.fail_model(unit, why)
        self._fronts.publish_configuration()
        asyncio.get_running_loop().call_later(_RETRY_S, self._forgive, unit)

    def _forgive(self, unit: str) -> None:
        """Accept requests again after a failure."""
        if self._routing.problems.pop(unit, None) is None:
            return
        if unit in self._requests.state.models and not self._manager.failure(unit):
            self._requests.recover_model(unit)
        self._fronts.publish_configuration()

    def _repaired(self, unit: str) -> None:
        """Handle a change to the files of a version whose latest load failed. If the version is loaded on
        demand, accept its requests again; otherwise repeat the load."""
        record = self._operations.registry.current.versions.get(_key(unit))
        if record is None:
            return
        if unit in self._routing.problems or unit in self._routing.usable:
            self._operations.forget_failure(unit)
            self._forgive(unit)
            self._fronts.publish_configuration()
        else:
            self._background.run(self._load_again(record))

    async def _load_again(self, record: VersionRecord) -> None:
        with contextlib.suppress(LoadError):  # recorded by `ModelOperations.note_failure`
            await self.load(record)

    # ── the state of units ──

    def _units(self) -> list[str]:
        """Return the units that accept requests."""
        return [
            unit
            for unit in self._manager.models
            if self._manager.is_declared(unit)
            or unit in self._routing.usable
            or unit in self._operations.draining
        ]

    def _bundles(self) -> Iterator[Bundle]:
        seen: set[str] = set()
        for unit in self._units():
            if unit not in seen:
                units = self._loaded_with(unit)
                seen.update(units)
                yield self._bundle(units)

    def _bundle(self, units: tuple[str, ...]) -> Bundle:
        times = [self._of(unit) for unit in units]
        loaded = not any(map(self._manager.is_parked, units)) and set(units) <= self._manager.models.keys()
        if loaded:
            self._incomplete.discard(units)
        in_memory = any(self._manager.of(unit) for unit in units)
        waiting = [since for unit in units if (since := self._waiting_since(unit)) is not None]
        if units in self._incomplete:
            waiting.append(max(one.load_began_at for one in times))
        return Bundle(
            units,
            loaded=loaded,
            in_memory=in_memory,
            asleep=in_memory and not any(map(self._occupies_memory, units)),
            busy=any(map(self._busy, units)),
            waiting_since=min(waiting, default=None),
            load_began_at=max(one.load_began_at for one in times),
            ready_at=max(one.ready_at for one in times),
            used_at=max(one.used_at for one in times),
            kept=next(filter(None, map(self._kept, units)), ""),
        )

    def _loaded_with(self, unit: str) -> tuple[str, ...]:
        """Return the units that are loaded together with this unit, including the unit itself."""
        name = self._name(unit)
        for group in self._settings().groups.values():
            if group.load == "all" and name in group.models:
                units = (unit if one == name else self._unit(one) for one in group.models)
                return tuple(filter(None, units))
        return (unit,)

    def _excluded(self, wanted: Bundle, other: Bundle) -> bool:
        """Return whether a model group with `load = "one"` forbids loading the two bundles together."""
        names, others = ({self._name(unit) for unit in one.units} for one in (wanted, other))
        return any(
            one != two and {one, two} <= set(group.models)
            for group in self._settings().groups.values()
            if group.load == "one"
            for one in names
            for two in others
        )

    def _name(self, unit: str) -> str:
        return unit if self._manager.is_declared(unit) else split_target(unit)[0]

    def _unit(self, name: str) -> str:
        """Return the unit of the model with this name, or an empty string if there is no such model."""
        target = self._routing.target_of(name)
        if target is not None:
            return unit_name(*target)
        return name if self._manager.is_declared(name) else ""

    def _busy(self, unit: str) -> bool:
        traffic = self._requests.state.models.get(unit)
        return traffic is not None and bool(traffic.running or traffic.queued)

    def _waiting_since(self, unit: str) -> float | None:
        """Return the time at which the unit's requests began to wait for a load, or None if none are
        waiting."""
        now, traffic = self._clock(), self._requests.state.models.get(unit)
        if traffic is None or not traffic.queued:
            return None
        return max(now - traffic.oldest_wait_s(now), self._of(unit).left_at)

    def _kept(self, unit: str) -> str:
        """Return the reason why the unit always stays loaded, or an empty string."""
        settings = self._manager.settings_of(unit)
        if settings is None:
            return ""
        record = self._operations.registry.current.versions.get(_key(unit))
        pinned = settings.pinned if record is None else record.settings.get("pinned", False)
        if settings.required:
            return f"{unit!r} is required"
        return f"{unit!r} is pinned" if pinned else ""

    def _leaves_at(self, unit: str) -> float:
        """Return the time at which the unit's time to live ends if no more requests arrive, or infinity if
        there is no limit."""
        times, settings = self._of(unit), self._manager.settings_of(unit)
        idle_s = (settings.idle_unload_s or math.inf) if settings is not None else math.inf
        traffic = self._requests.state.models.get(unit)
        if traffic is None:
            return max(times.used_at, times.ready_at) + idle_s
        not_before = self._clock() if self._busy(unit) else times.ready_at
        return traffic.uses.leaves_at(idle_s, times.load_began_at, not_before)

    def _next_unit(self, wanted: Bundle) -> str:
        """Return the bundle's next unit to load or wake, or an empty string if there is none."""
        left = (
            unit for unit in wanted.units if self._manager.is_parked(unit) and not self._occupies_memory(unit)
        )
        return next(left, "")

    async def _missing_bytes(self, unit: str) -> int:
        """Return the memory that must become free before the unit can be loaded or woken."""
        settings = self._manager.settings_of(unit)
        return 0 if settings is None else (await self._manager.shortage_of(unit, settings)).bytes

    def _memory_bytes(self, unit: str, wanted: str) -> int:
        """Return the memory, in bytes, that becomes free for the unit `wanted` if this unit is unloaded. If
        `wanted` sleeps, only the memory of its GPUs counts, because it wakes on them. If this unit sleeps,
        its host memory becomes free if `wanted` runs on the CPU, or the GPU memory that its processes still
        hold if `wanted` runs on GPUs."""
        asleep = self._manager.is_parked_asleep(wanted)
        gpus = {gpu for one in self._manager.of(wanted) for gpu in one.gpus} if asleep else set()
        replicas = [one for one in self._manager.of(unit) if not gpus or gpus & set(one.gpus)]
        if not replicas:
            return 0
        if host_bytes := self._host_bytes.get(unit):
            return host_bytes * len(replicas)
        statuses = [replica.status() for replica in replicas]
        if self._host_bytes.get(wanted) and self._manager.is_parked_asleep(unit):
            return sum(one.host_bytes for one in statuses)
        occupied = int(_GPU_FACTOR * sum(one.weight_bytes + one.kv_bytes for one in statuses)) + _GPU_BYTES
        return occupied - sum(one.freed_bytes for one in statuses)

    async def _measure(self, bundles: list[Bundle], wanted: str) -> list[Bundle]:
        """Predict how much memory the units on the CPU need. Return the bundles, each with the memory that
        becomes free for the unit `wanted` if the bundle is unloaded."""
        settings = {
            unit: one
            for bundle in bundles
            for unit in bundle.units
            if unit not in self._host_bytes and (one := self._manager.settings_of(unit)) is not None
        }
        if settings:
            self._host_bytes |= await asyncio.to_thread(_host_bytes, settings)
        return [
            bundle._replace(memory_bytes=sum(self._memory_bytes(unit, wanted) for unit in bundle.units))
            for bundle in bundles
        ]

    def _of(self, unit: str) -> _Times:
        return self._times.setdefault(unit, _Times(used_at=self._clock()))

    def _note_load(self, unit: str) -> None:
        times = self._of(unit)
        times.load_began_at, times.ready_at = self._clock(), 0.0
