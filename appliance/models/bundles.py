"""Forms bundles of models that must be loaded together, and describes the state of each bundle.
`appliance.models.residency` uses these descriptions to decide which bundles to load and unload."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from appliance.models.fit import host_bytes, read_memory
from appliance.models.manager import ModelManager
from appliance.models.operations import ModelOperations
from appliance.models.residency import Bundle
from appliance.models.routing import Routing
from appliance.models.unit_names import split_target
from appliance.settings import ModelSettings, Settings
from appliance.traffic.state import TrafficState

_GPU_FACTOR, _GPU_BYTES = 1.1, 2 << 30
"""The memory freed by stopping a GPU replica is estimated as this multiple of its weights and KV cache, plus
a constant for its CUDA context and working memory. An overestimate is harmless, because the free memory is
read again before the next load."""


def _host_bytes(settings: Mapping[str, ModelSettings]) -> dict[str, int]:
    memory = read_memory()
    return {unit: host_bytes(one, memory) for unit, one in settings.items()}


@dataclass
class UnitTimes:
    """When a model was last loaded and last used, in seconds on the monotonic clock."""

    load_began_at: float = 0.0
    ready_at: float = 0.0
    used_at: float = 0.0
    left_at: float = -math.inf
    """When the model was last unloaded."""


class Bundles:
    """The bundles of all models. All methods must be called on the event loop thread."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        operations: ModelOperations,
        manager: ModelManager,
        routing: Routing,
        traffic: TrafficState,
        clock: Callable[[], float],
    ) -> None:
        """`settings` is a function that returns the current settings."""
        self.incomplete: set[tuple[str, ...]] = set()
        """Partly loaded bundles. The remaining models of these bundles are loaded next."""
        self._settings = settings
        self._operations = operations
        self._manager = manager
        self._routing = routing
        self._traffic = traffic
        self._clock = clock
        self._times: dict[str, UnitTimes] = {}
        self._host_bytes: dict[str, int] = {}
        """Predicted host memory per replica of each model; 0 for models on GPUs."""

    # ── units ──

    def observe(self) -> None:
        """Record which models are in use. Call this frequently."""
        now = self._clock()
        for unit in self.units():
            times, traffic = self.times(unit), self._traffic.models.get(unit)
            if self.busy(unit):
                times.used_at = now
            elif traffic is not None and traffic.asked_at is not None:
                times.used_at = max(times.used_at, traffic.asked_at)
            if not times.ready_at and self._manager.loaded(unit):
                times.ready_at = now
        for unit in self._times.keys() - self._manager.models.keys():
            del self._times[unit]
            self._host_bytes.pop(unit, None)
        # New settings or a command may have removed a bundle.
        self.incomplete = {
            units for units in self.incomplete if any(self._forms(unit, units) for unit in units)
        }

    def _forms(self, unit: str, units: tuple[str, ...]) -> bool:
        return unit in self._manager.models and self.loaded_with(unit) == units

    def units(self) -> list[str]:
        """Return all models that accept requests."""
        return [
            unit
            for unit in self._manager.models
            if self._manager.is_declared(unit)
            or unit in self._routing.usable
            or unit in self._operations.draining
        ]

    def times(self, unit: str) -> UnitTimes:
        """Return the model's `UnitTimes`, which the caller may modify."""
        return self._times.setdefault(unit, UnitTimes(used_at=self._clock()))

    def note_load(self, unit: str) -> None:
        """Record that the model is now being loaded."""
        times = self.times(unit)
        times.load_began_at, times.ready_at = self._clock(), 0.0

    def busy(self, unit: str) -> bool:
        """Return whether requests for the model are running or waiting."""
        traffic = self._traffic.models.get(unit)
        return traffic is not None and bool(traffic.running or traffic.queued)

    def occupies_memory(self, unit: str) -> bool:
        """True if the model is in memory: its replicas are loading, loaded or being stopped, and are not all
        asleep."""
        return bool(self._manager.of(unit)) and not self._manager.is_parked_asleep(unit)

    def kept(self, unit: str) -> str:
        """Return why the model always stays loaded, or an empty string if it may be unloaded."""
        settings = self._manager.settings_of(unit)
        if settings is None:
            return ""
        record = self._routing.version_of(unit)
        pinned = settings.pinned if record is None else record.settings.get("pinned", False)
        if settings.required:
            return f"{unit!r} is required"
        return f"{unit!r} is pinned" if pinned else ""

    def stays(self, unit: str) -> bool:
        """True if the model cannot be put to sleep or unloaded: it always stays loaded, or it is already
        unloaded."""
        return self._manager.settings_of(unit) is None or bool(self.kept(unit))

    def is_leaving(self, unit: str) -> bool:
        """True while the model is being removed from memory, even if new settings require it again."""
        leaves = self._manager.is_parked(unit) or unit not in self._manager.models
        return leaves and self.occupies_memory(unit)

    def leaves_at(self, unit: str) -> float:
        """Return when the model's time to live expires if no more requests arrive, or infinity if it never
        expires."""
        times, settings = self.times(unit), self._manager.settings_of(unit)
        idle_s = (settings.idle_unload_s or math.inf) if settings is not None else math.inf
        traffic = self._traffic.models.get(unit)
        if traffic is None:
            return max(times.used_at, times.ready_at) + idle_s
        not_before = self._clock() if self.busy(unit) else times.ready_at
        return traffic.uses.leaves_at(idle_s, times.load_began_at, not_before)

    def _waiting_since(self, unit: str) -> float | None:
        """Return when requests started waiting for the model to load, or None if none are waiting."""
        now, traffic = self._clock(), self._traffic.models.get(unit)
        if traffic is None or not traffic.queued:
            return None
        return max(now - traffic.oldest_wait_s(now), self.times(unit).left_at)

    # ── bundles ──

    def all(self) -> Iterator[Bundle]:
        """Yield the bundles of all models that accept requests."""
        seen: set[str] = set()
        for unit in self.units():
            if unit not in seen:
                units = self.loaded_with(unit)
                seen.update(units)
                yield self._bundle(units)

    def _bundle(self, units: tuple[str, ...]) -> Bundle:
        times = [self.times(unit) for unit in units]
        loaded = not any(map(self._manager.is_parked, units)) and set(units) <= self._manager.models.keys()
        if loaded:
            self.incomplete.discard(units)
        in_memory = any(self._manager.of(unit) for unit in units)
        waiting = [since for unit in units if (since := self._waiting_since(unit)) is not None]
        if units in self.incomplete:
            waiting.append(max(one.load_began_at for one in times))
        return Bundle(
            units,
            loaded=loaded,
            in_memory=in_memory,
            asleep=in_memory and not any(map(self.occupies_memory, units)),
            busy=any(map(self.busy, units)),
            waiting_since=min(waiting, default=None),
            load_began_at=max(one.load_began_at for one in times),
            ready_at=max(one.ready_at for one in times),
            used_at=max(one.used_at for one in times),
            kept=next(filter(None, map(self.kept, units)), ""),
        )

    def loaded_with(self, unit: str) -> tuple[str, ...]:
        """Return the models that are loaded together with a model, including that model."""
        name = self._name(unit)
        for group in self._settings().groups.values():
            if group.load == "all" and name in group.models:
                units = (unit if one == name else self._unit(one) for one in group.models)
                return tuple(filter(None, units))
        return (unit,)

    def excluded(self, wanted: Bundle, other: Bundle) -> bool:
        """True if a model group with `load = "one"` forbids loading the two bundles together."""
        names, others = ({self._name(unit) for unit in one.units} for one in (wanted, other))
        return any(
            one != two and {one, two} <= set(group.models)
            for group in self._settings().groups.values()
            if group.load == "one"
            for one in names
            for two in others
        )

    def next_unit(self, wanted: Bundle) -> str:
        """Return the bundle's next model to load or wake, or an empty string if there is none."""
        left = (
            unit for unit in wanted.units if self._manager.is_parked(unit) and not self.occupies_memory(unit)
        )
        return next(left, "")

    def _name(self, unit: str) -> str:
        return unit if self._manager.is_declared(unit) else split_target(unit)[0]

    def _unit(self, name: str) -> str:
        """Return the model or version that answers requests for this name, or an empty string if none
        does."""
        if (record := self._routing.target_of(name)) is not None:
            return record.unit
        return name if self._manager.is_declared(name) else ""

    # ── memory ──

    async def missing_bytes(self, unit: str) -> int:
        """Return how much memory must be freed before the model can be loaded or woken."""
        settings = self._manager.settings_of(unit)
        return 0 if settings is None else (await self._manager.shortage_of(unit, settings)).bytes

    async def measure(self, bundles: list[Bundle], wanted: str) -> list[Bundle]:
        """Return the bundles, each with `memory_bytes` set to the memory that unloading the bundle would make
        available to the `wanted` model. The memory of models on the CPU is predicted."""
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

    def _memory_bytes(self, unit: str, wanted: str) -> int:
        """Return the memory, in bytes, that unloading `unit` would make available to `wanted`.

        If `wanted` is asleep, only memory on its own GPUs counts, because it wakes up on those GPUs. If
        `unit` is asleep, unloading it frees its host memory (if `wanted` runs on the CPU) or the GPU memory
        that its processes still hold (if `wanted` runs on GPUs).
        """
        asleep = self._manager.is_parked_asleep(wanted)
        gpus = {gpu for one in self._manager.of(wanted) for gpu in one.resources.gpus} if asleep else set()
        replicas = [one for one in self._manager.of(unit) if not gpus or gpus & set(one.resources.gpus)]
        if not replicas:
            return 0
        if host_bytes := self._host_bytes.get(unit):
            return host_bytes * len(replicas)
        if self._host_bytes.get(wanted) and self._manager.is_parked_asleep(unit):
            return sum(one.sleeping.host_bytes for one in replicas)
        occupied = int(_GPU_FACTOR * sum(one.weight_bytes + one.kv_bytes for one in replicas)) + _GPU_BYTES
        return occupied - sum(one.sleeping.freed_bytes for one in replicas)
