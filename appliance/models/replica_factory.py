"""Creates replicas from the service's settings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

from appliance.models.cgroups import ReplicaCgroups, descendants
from appliance.models.placement import GpuPlacement
from appliance.models.replica import Launch, Replica
from appliance.models.replica_events import ReplicaEvents
from appliance.models.replica_resources import ReplicaResources
from appliance.models.restarts import Restarts
from appliance.models.start_checks import StartChecks
from appliance.settings import ModelSettings, Settings


class ReplicaFactory:
    """Creates replicas and numbers them separately for each model."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        events: ReplicaEvents,
        placement: GpuPlacement,
        checks: StartChecks,
        launch: Launch,
    ) -> None:
        """`settings` is a function that returns the current settings. `events` receives all replicas'
        events."""
        self._settings = settings
        self._events = events
        self._placement = placement
        self._checks = checks
        self._launch = launch
        self._cgroups = ReplicaCgroups(descendants)
        self._created: Counter[str] = Counter()
        """Number of replicas created so far, by model."""

    def create(self, model: str, settings: ModelSettings) -> Replica:
        """Create a replica of a model without starting it."""
        service, name = self._settings(), f"{model}-{self._created[model]}"
        self._created[model] += 1
        return Replica(
            model,
            settings,
            name,
            self._events,
            resources=ReplicaResources(name, self._placement, self._cgroups, Path(service.run_dir)),
            hang_timeout_s=service.hang_timeout_s,
            load_timeout_s=service.load_timeout_s,
            checks=self._checks,
            restarts=Restarts(lambda: self._settings().restarts),
            launch=self._launch,
        )
