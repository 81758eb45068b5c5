"""Connects the components that serve requests.

    FrontPool ──FrontRequests──► RequestManager ◄── ModelManager ──FrontChannels──► FrontPool
        ▲                              │                                               │
        └──────────── send ────────────┘       Readiness.configuration() ◄─────────────┘

Two components depend on components created after them, so they receive functions instead. The request manager
sends its answers through the front pool. The front pool gets the fronts' configuration from `Readiness` and
tells `OnDemand` which models have waiting requests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from appliance.channel.served_models import ServedModel
from appliance.core.cancellation import RequestCanceller
from appliance.core.drains import Drains, DrainTools
from appliance.core.readiness import Readiness
from appliance.core.request_records import RequestRecords
from appliance.front_pool.pool import FrontPool
from appliance.models.manager import ModelManager
from appliance.models.manifest import difference
from appliance.models.on_demand import OnDemand
from appliance.models.operations import ModelOperations
from appliance.models.preflight_process import MODEL_CHECKS, ModelChecks
from appliance.models.replica import Launch
from appliance.models.routing import Routing
from appliance.models.unit_names import version_key
from appliance.models.version_swaps import VersionSwaps
from appliance.settings import Settings
from appliance.traffic.request_manager import RequestManager
from engine.client import ReplicaGroup
from store.models import Registry
from store.registry import ModelRegistry


class ServingParts:
    """The components that serve requests. They do nothing until `appliance.core.controller.Controller.start`
    is called."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        served: list[ServedModel],
        *,
        registry: ModelRegistry,
        model_flags: Mapping[str, Any],
        records: RequestRecords,
        salt: Callable[[str], str],
        note: Callable[[str, str], None],
        on_availability: Callable[[], None],
        launch: Launch = ReplicaGroup.launch,
        checks: ModelChecks = MODEL_CHECKS,
        broken: Mapping[str, str] = MappingProxyType({}),
        front_module: str = "appliance.front",
    ) -> None:
        self.requests = RequestManager(
            send=lambda front, message: self.fronts.send(front, message),
            rows=records.counted,
            salt=salt,
            clock=time.monotonic,
            unix=time.time,
            rules=settings().queue,
            quotas=records.quotas,
        )
        self.fronts = FrontPool(
            settings,
            requests=self.requests,
            identities=records.identities,
            configuration=lambda: self.readiness.configuration(),
            keep=records.contents.keep,
            note=note,
            on_availability=on_availability,
            on_wanted=lambda name: self.on_demand.wanted(name),
            module=front_module,
        )
        self.models = ModelManager(
            settings,
            served,
            requests=self.requests,
            channels=self.fronts,
            publish=self.fronts.publish_configuration,
            note=note,
            launch=launch,
            preflight=checks.problem,
            files_check=lambda unit: _changed_files(registry.current, unit),
            broken=broken,
        )
        self.routing = Routing(registry, self.models)
        self.operations = ModelOperations(
            registry, self.models, self.requests.state, self.routing, self.fronts, note, model_flags
        )
        self.on_demand = OnDemand(
            settings,
            operations=self.operations,
            manager=self.models,
            routing=self.routing,
            requests=self.requests,
            fronts=self.fronts,
        )
        self.swaps = VersionSwaps(registry, self.operations, self.models, self.routing, self.fronts, note)
        self.canceller = RequestCanceller(self.requests, self.models)
        self.drains = Drains(
            DrainTools(self.requests, self.fronts, self.canceller.cancel),
            settings,
            lambda: self.models.models,
        )
        self.models.on_removed = self.drains.forget
        self.readiness = Readiness(
            settings, self.requests.state, self.models, self.routing, self.fronts, self.drains
        )


def _changed_files(registry: Registry, unit: str) -> str:
    """Return how a version's files differ from its manifest, or an empty string if they match. Models in the
    settings have no manifest, so the result is empty for them. Called in a thread."""
    record = registry.versions.get(version_key(unit))
    return "" if record is None else difference(record.folder, record.files)
