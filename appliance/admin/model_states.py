"""The states of models and versions, as `appliance models list` shows them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from appliance.models.manager import ModelManager
from appliance.models.on_demand import OnDemand
from appliance.models.operations import ModelOperations
from appliance.models.replica_status import replica_detail, replica_status
from appliance.models.routing import Routing
from appliance.models.unit_names import split_target
from appliance.protocol.registry import (
    RegisteredFile,
    RegisteredModel,
    RegisteredVersion,
    VersionState,
    VersionStatus,
)
from appliance.settings import ModelSettings, Settings
from store.models import ModelRecord, VersionRecord
from store.registry import ModelRegistry

_WAITS = "waiting for another model to be loaded or unloaded"


@dataclass(kw_only=True)
class ModelStates:
    """Reads the states of the models in the settings and in the registry."""

    registry: ModelRegistry
    operations: ModelOperations
    on_demand: OnDemand
    manager: ModelManager
    routing: Routing
    settings: Callable[[], Settings]
    declared_in: Callable[[str], str]
    """Same as `ModelAdmin.declared_in`."""

    def all(self) -> list[RegisteredModel]:
        """Return all models. Models from the settings come first."""
        registry = self.registry.current
        declared = self.settings().models
        shown = [self._declared(name, model) for name, model in declared.items()]
        return shown + [self._registered(one) for one in registry.models.values() if one.name not in declared]

    def _declared(self, name: str, model: ModelSettings) -> RegisteredModel:
        version = self._version(name, 1, model.folder)
        version.shares = self._shares(name)
        return RegisteredModel(
            name=name,
            state=version.state,
            default=1,
            source=f"declared in {self.declared_in(name)}",
            aliases=self._aliases(name),
            versions=[version],
        )

    def _registered(self, model: ModelRecord) -> RegisteredModel:
        registry = self.registry.current
        versions = []
        for record in registry.versions_of(model.name):
            version = self._version(record.unit, record.version, record.folder)
            version.added_at, version.settings = record.created_at, record.settings
            version.shares = self._shares(record.unit)
            version.files = [
                RegisteredFile(name=f.name, bytes=f.bytes, sha256=f.sha256) for f in record.files
            ]
            versions.append(version)
        default = next(one for one in versions if one.version == model.default_version)
        return RegisteredModel(
            name=model.name,
            state=default.state,
            default=model.default_version,
            previous=model.previous_version,
            source="registry",
            aliases=self._aliases(model.name),
            split=split.weights if (split := registry.splits.get(model.name)) else {},
            versions=versions,
        )

    def _version(self, unit: str, number: int, folder: str) -> RegisteredVersion:
        state, detail = self.state(unit)
        replicas = [replica_status(replica) for replica in self.manager.of(unit)]
        return RegisteredVersion(
            version=number,
            folder=folder,
            state=state,
            detail=detail,
            replicas=len(replicas),
            devices=[device for replica in replicas for device in replica.devices],
            memory_bytes=sum(one.weight_bytes + one.kv_bytes - one.freed_bytes for one in replicas),
            expires_at=self.on_demand.expires_at(unit),
        )

    def state(self, unit: str) -> tuple[VersionState, str]:
        """Return the state of a model or version, with an explanation."""
        if unit in self.operations.draining or unit in self.operations.sleeps:
            return "draining", "finishing its requests"
        replicas = self.manager.of(unit)
        asleep = unit in self.operations.asleep and unit not in self.operations.wakes
        if asleep or self.manager.is_parked_asleep(unit):
            return "sleeping", next(filter(None, map(replica_detail, replicas)), "")
        if self.manager.is_parked(unit):
            if replicas:
                return "draining", "being unloaded; the next request loads it again"
            if self.on_demand.is_loading(unit):
                return "loading", _WAITS
            failure = self.routing.failures.get(unit, "")
            if failure:
                return "failed", failure
            return "available", self.manager.retirements.unreturned.get(unit, "")
        usable = unit in self.routing.usable or self.manager.is_declared(unit)
        if usable and any(replica.answers for replica in replicas):
            return "ready", ""
        if self.on_demand.is_loading(unit) and not replicas:
            return "loading", "" if unit in self.operations.loads else _WAITS
        if failure := self.manager.failure(unit) or self.routing.failures.get(unit, ""):
            remedy = self.manager.remedy(unit)
            return "failed", f"{failure}: {remedy}" if remedy else failure
        if replicas or unit in self.operations.loads or usable:
            return "loading", next(filter(None, map(replica_detail, replicas)), "")
        return "available", self.manager.retirements.unreturned.get(unit, "")

    def is_loaded(self, unit: str) -> bool:
        """Return whether a model or version is loaded, being loaded or being unloaded."""
        return self.state(unit)[0] not in ("available", "failed")

    def _aliases(self, model: str) -> list[str]:
        aliases = self.registry.current.aliases.values()
        return [
            alias.name for alias in aliases if alias.target == model or split_target(alias.target)[0] == model
        ]

    def _shares(self, unit: str) -> dict[str, float]:
        """For each name whose requests are split, return the fraction sent to this model or version."""
        return {
            route.name: sum(arm.weight for arm in route.arms if arm.unit == unit)
            / sum(arm.weight for arm in route.arms)
            for route in self.routing.routes()
            if any(arm.unit == unit for arm in route.arms)
        }

    def status(self, record: VersionRecord) -> VersionStatus:
        """Return a registered version's status."""
        state, detail = self.state(record.unit)
        return VersionStatus(name=record.model, version=record.version, state=state, detail=detail)

    def declared_status(self, name: str) -> VersionStatus:
        """Return the status of a model declared in the settings."""
        state, detail = self.state(name)
        return VersionStatus(name=name, version=1, state=state, detail=detail)
