"""A simulated site for tests of loading on demand: replicas, fronts and requests are simulated, and so is the
clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance import background
from appliance.channel.served_models import ServedModel
from appliance.models import bundles, on_demand
from appliance.models.fit import MemoryShortage
from appliance.models.on_demand import OnDemand
from appliance.models.routing import Routing
from appliance.settings import ModelSettings, Settings
from appliance.settings.fields import OnDemandSettings
from appliance.traffic.admission_pauses import AdmissionPauses
from appliance.traffic.model_uses import ModelUses
from tests.models.test_operations import SimulatedFronts, SimulatedManager, World, run

WEIGHT_BYTES = 1 << 40


class Traffic:
    """The requests for one unit (a version of a model)."""

    def __init__(self) -> None:
        self.running = self.queued = 0
        self.asked_at: float | None = None
        self.uses = ModelUses()
        self.failure: str | None = None
        self.since = 0.0

    def oldest_wait_s(self, now: float) -> float:
        return now - self.since


class Manager(SimulatedManager):
    """A model manager that loads and parks units immediately. A parked unit has no replicas but still accepts
    requests. `capacity` is the number of units that fit into memory."""

    def __init__(self, requests: Requests, declared: dict[str, ModelSettings]) -> None:
        super().__init__()
        self._requests = requests
        self._declared = declared
        self.parked = set(declared)
        self.asleep: set[str] = set()
        """Parked units that sleep."""
        self.returning: set[str] = set()
        """Units that were parked and are now being loaded or woken."""
        self.on_gpus = True
        self.held = False
        """Whether sleeping units hold so much memory that the next load must unload them first."""
        self.leaving: set[str] = set()
        """Parked units whose replicas have not been stopped yet."""
        self.cannot_wake = False
        self.gpus: dict[str, list[int]] = {}
        self.replicas: list[Any] = []
        self.settings: dict[str, ModelSettings] = dict(declared)
        for name in declared:
            self.models[name] = served(name)
            requests.state.models[name] = Traffic()

    def load(self, unit: ServedModel, settings: ModelSettings) -> None:
        super().load(unit, settings)
        self.settings[unit.name] = settings
        self.parked.discard(unit.name)
        self._requests.state.models.setdefault(unit.name, Traffic())

    def introduce(self, unit: ServedModel, settings: ModelSettings) -> None:
        self.load(unit, settings)
        self.history.pop()
        self.parked.add(unit.name)

    async def unload(self, unit: str, grace_s: float) -> None:
        await super().unload(unit, grace_s)
        self.parked.discard(unit)
        self.asleep.discard(unit)
        self.settings.pop(unit, None)
        self._requests.state.models.pop(unit, None)

    def park(self, unit: str, *, asleep: bool = False) -> None:
        self.parked.add(unit)
        (self.asleep.add if asleep else self.asleep.discard)(unit)
        self.history.append(f"{'sleep' if asleep else 'park'} {unit}")

    def unpark(self, unit: str) -> None:
        self.parked.discard(unit)
        self.history.append(f"{'wake' if unit in self.asleep else 'load'} {unit}")
        self.asleep.discard(unit)
        self.returning.add(unit)

    def returned(self, unit: str) -> None:
        self.returning.discard(unit)

    def of(self, unit: str) -> list[Any]:
        in_memory = unit in self.models and (unit not in self.parked - self.leaving or unit in self.asleep)
        freed_bytes = WEIGHT_BYTES if unit in self.asleep else 0
        replica = SimpleNamespace(
            weight_bytes=WEIGHT_BYTES,
            kv_bytes=0,
            sleeping=SimpleNamespace(freed_bytes=freed_bytes, host_bytes=freed_bytes),
            on_gpus=self.on_gpus,
            resources=SimpleNamespace(gpus=self.gpus.get(unit, [])),
        )
        return [replica] if in_memory else []

    def is_parked_asleep(self, unit: str) -> bool:
        return unit in self.asleep

    def parked_host_bytes(self) -> dict[str, int]:
        return dict.fromkeys(self.asleep, WEIGHT_BYTES)

    def is_parked(self, unit: str) -> bool:
        return unit in self.parked

    def accepts_early(self, unit: str) -> bool:
        return unit in self.parked | self.returning

    def is_declared(self, name: str) -> bool:
        return name in self._declared

    def loaded(self, unit: str) -> bool:
        return super().loaded(unit) and unit not in self.parked

    def settings_of(self, unit: str) -> ModelSettings | None:
        return self.settings.get(unit)

    async def stay_asleep(self, unit: str) -> bool:
        if was_asleep := unit in self.asleep:
            self.asleep.discard(unit)
            self.parked.discard(unit)
        return was_asleep

    async def end_sleep(self, unit: str) -> None:
        if unit in self.asleep:
            self.park(unit)

    async def shortage_of(self, unit: str, settings: ModelSettings) -> MemoryShortage:
        if self.cannot_wake and unit in self.asleep:
            return MemoryShortage(1 << 60, "there is no room")
        return self._shortage(self.held and bool(self.asleep - {unit}))

    async def shortage(self, settings: ModelSettings) -> MemoryShortage:
        return self._shortage(self.held and bool(self.asleep))

    def _shortage(self, held: bool) -> MemoryShortage:
        used = sum(bool(self.of(unit)) and unit not in self.asleep for unit in self.models) + held
        return MemoryShortage(1, "there is no room") if used >= self.capacity else MemoryShortage()


class Requests:
    """A simulated request manager."""

    def __init__(self) -> None:
        self.state = SimpleNamespace(models={}, pauses=AdmissionPauses())
        self.refusals: list[str] = []
        """The reason of each failure of a model."""
        self.refused_s: list[float] = []
        """For each failure that has ended, how long requests were refused, in seconds."""
        self._failed_at = 0.0

    def fail_model(self, unit: str, reason: str) -> None:
        self.refusals.append(reason)
        self._failed_at = time.monotonic()
        self.state.models[unit].failure = reason
        self.state.models[unit].queued = 0

    def recover_model(self, unit: str) -> None:
        self.refused_s.append(time.monotonic() - self._failed_at)
        self.state.models[unit].failure = None


class Site(World):
    """A registry with two versions of the model `chat`, models in the settings, and memory for one unit."""

    def __init__(
        self,
        folder: Path,
        settings: Settings,
        fronts: Callable[[Callable[[], Routing]], SimulatedFronts] = SimulatedFronts,
    ) -> None:
        self.requests: Any = Requests()
        super().__init__(folder, Manager(self.requests, settings.models), fronts)
        self.manager.capacity = 1
        self.now, self.settings = 10_000.0, settings
        self.on_demand = OnDemand(
            lambda: self.settings,
            operations=self.operations,
            manager=self.manager,
            routing=self.routing,
            requests=self.requests,
            fronts=self.fronts,
            clock=lambda: self.now,
        )

    def traffic(self, unit: str) -> Traffic:
        found: Traffic = self.requests.state.models[unit]
        return found

    def ask(self, unit: str, tenant: str = "acme", keep_alive_s: float | None = None) -> None:
        """Queue a request for a unit."""
        traffic = self.traffic(unit)
        traffic.queued, traffic.since, traffic.asked_at = 1, self.now, self.now
        traffic.uses.accept(tenant, keep_alive_s, self.now)

    def answer(self, unit: str, tenant: str = "acme") -> None:
        self.traffic(unit).queued = 0
        self.traffic(unit).uses.end(tenant, self.now)

    async def loaded(self, unit: str) -> None:
        """Wait until the unit is in memory."""
        await self.until(lambda: self.manager.loaded(unit), f"the load of {unit}")

    async def serve(self, unit: str) -> None:
        """Send a request for the unit, wait until the unit is in memory, and answer the request."""
        self.ask(unit)
        await self.loaded(unit)
        self.answer(unit)

    async def exchange(self, loaded: str, wanted: str) -> None:
        """Wait until the unit `loaded` is in memory. Then serve a request for the unit `wanted`, which takes
        the place of `loaded`."""
        await self.loaded(loaded)
        await self.serve(wanted)

    async def until(self, condition: Callable[[], bool], description: str, step_s: float = 0.5) -> None:
        """Advance the clock in steps of `step_s` until the condition is true, for at most 60 s of real time.
        Simulated time has no limit, because reading files and writing the database take real time."""
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end, f"{description} did not happen; history: {self.manager.history}"
            await asyncio.sleep(0.002)
            self.now += step_s


def served(name: str) -> ServedModel:
    return ServedModel(name=name, folder="/", version="", created=0, max_model_len=0, vocab_size=0)


def play(site: Site, scenario: Callable[[], Any]) -> None:
    async def started() -> None:
        site.on_demand.start()
        try:
            await scenario()
        finally:
            site.on_demand.stop()

    try:
        run(started)
    finally:
        site.control.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the loop run every millisecond."""
    monkeypatch.setattr(on_demand, "_POLL_S", 0.001)
    monkeypatch.setattr(on_demand, "_IDLE_POLL_S", 0.001)
    monkeypatch.setattr(background, "_POLL_S", 0.001)
    monkeypatch.setattr(bundles, "_host_bytes", lambda settings: dict.fromkeys(settings, 0))


def optional(**fields: Any) -> ModelSettings:
    return ModelSettings(folder="/", required=False, **fields)


def sleepy(count: int = 2, **models: ModelSettings) -> Settings:
    """Return settings with enough host memory for `count` sleeping units."""
    limit_gb = count * WEIGHT_BYTES / 1e9 + 0.1
    return Settings(models=models, on_demand=OnDemandSettings(sleeping_memory_gb=limit_gb))
