"""Maps each name used by applications to the units that answer requests for that name. A unit is what is
loaded as a whole: a model in the settings, named after the model, or a version of a registered model, named
NAME@VERSION. The name of a registered model resolves to its default version. An alias resolves to a model or
to one of its versions. A split distributes the requests for a name over several units.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from appliance.channel.served_models import Arm, Route, Shadow
from appliance.models.manager import ModelManager
from appliance.models.unit_names import split_target, version_key
from store.models import Registry, SplitRecord, VersionRecord
from store.registry import ModelRegistry


class Routing:
    """Derives the routes from the settings and the registry. All methods must be called on the event loop
    thread."""

    def __init__(self, registry: ModelRegistry, models: ModelManager) -> None:
        self.usable: set[str] = set()
        """Registered versions that are loaded and known to every front, so names may resolve to them."""
        self.held: set[str] = set()
        """Names of registered models whose requests are waiting for a version to be loaded."""
        self.failures: dict[str, str] = {}
        """Models and versions whose latest load failed, with the reasons. `GET /v1/models` does not list
        them, but a request for one of them starts another load."""
        self.problems: dict[str, str] = {}
        """Models and versions whose latest on-demand load failed, with the reasons. Their requests are
        refused until the next attempt is due."""
        self.sleeps: Callable[[str], bool] = lambda unit: False
        """Returns whether a version is asleep or going to sleep."""
        self._registry = registry
        self._models = models

    def routes(self) -> list[Route]:
        """Return the routes of all names that applications can use."""
        registry, routes = self._registry.current, {}
        for name in self._models.models:
            if self._models.is_declared(name):
                routes[name] = self._to_unit(name, name)
        for name in registry.models:
            if name not in routes and (route := self._of_model(registry, name)) is not None:
                routes[name] = route
        for alias in registry.aliases.values():
            if alias.name not in routes and (route := self._of_alias(registry, alias.name, alias.target)):
                routes[alias.name] = route
        for shadow in registry.shadows.values():
            unit = self.target_unit(shadow.target)
            if shadow.name in routes and self.answers(unit):
                copied = Shadow(unit, shadow.share)
                routes[shadow.name] = msgspec.structs.replace(routes[shadow.name], shadow=copied)
        return list(routes.values())

    def names(self) -> set[str]:
        """Return the names and aliases of all models, loaded or not."""
        registry = self._registry.current
        return {*filter(self._models.is_declared, self._models.models), *registry.models, *registry.aliases}

    def unit_of(self, name: str) -> str:
        """Return the model or version that answers requests for the name, or an empty string if none does."""
        return next((route.unit for route in self.routes() if route.name == name), "")

    def version_of(self, unit: str) -> VersionRecord | None:
        """Return the registered version with this unit name, or None for a model in the settings or a deleted
        version."""
        return self._registry.current.versions.get(version_key(unit))

    def target_of(self, name: str) -> VersionRecord | None:
        """Return the registered version that a name resolves to, loaded or not. Return None for other
        names."""
        registry = self._registry.current
        alias = registry.aliases.get(name)
        model, version = split_target(name if alias is None or name in registry.models else alias.target)
        if model not in registry.models or self._models.is_declared(model):
            return None
        version = registry.models[model].default_version if version is None else version
        return registry.versions.get((model, version))

    def names_of(self, unit: str) -> list[str]:
        """Return the names that resolve to this model or version."""
        return [
            route.name
            for route in self.routes()
            if route.unit == unit or any(arm.unit == unit for arm in route.arms)
        ]

    def target_unit(self, target: str) -> str:
        """Return the model or version that a model's name or NAME@VERSION resolves to, loaded or not,
        ignoring splits. Return an empty string if there is no such model or version."""
        if target in self._models.models and self._models.is_declared(target):
            return target
        registry, (name, version) = self._registry.current, split_target(target)
        if name not in registry.models:
            return ""
        version = registry.models[name].default_version if version is None else version
        record = registry.versions.get((name, version))
        return "" if record is None else record.unit

    def answers(self, unit: str) -> bool:
        """True if names can resolve to this model or version: it is loaded and has not failed."""
        loaded = unit in self.usable or (unit in self._models.models and self._models.is_declared(unit))
        return loaded and not (self._models.failure(unit) or unit in self.failures)

    def _of_model(self, registry: Registry, name: str) -> Route | None:
        if (split := registry.splits.get(name)) is not None:
            return self._of_split(split)
        return self._of_version(name, registry.versions[name, registry.models[name].default_version])

    def _of_version(self, name: str, record: VersionRecord) -> Route:
        """Return the route from `name` to a version. While the name is held, its requests wait. Otherwise,
        the first request loads or wakes the version if necessary."""
        unit, held = record.unit, name in self.held
        if unit in self.usable and not held:
            return self._to_unit(name, unit)
        return Route(
            name=name,
            unit="",
            created=int(record.created_at),
            listed=unit not in self.failures,
            on_demand=not held,
            problem="" if held else self.problems.get(unit, ""),
            fallback=record.settings.get("fallback", ""),
        )

    def _of_split(self, split: SplitRecord) -> Route | None:
        """Return the route of a name with requests that are split among several targets. Targets that are
        unloaded or have failed are left out."""
        arms = [
            Arm(unit, weight, target)
            for target, weight in split.weights.items()
            if self.answers(unit := self.target_unit(target))
        ]
        if arms:
            main = max(arms, key=lambda arm: arm.weight)
            return msgspec.structs.replace(self._to_unit(split.name, main.unit), arms=tuple(arms))
        held = any(split_target(target)[0] in self.held for target in split.weights)
        return Route(name=split.name, unit="") if held else None

    def _of_alias(self, registry: Registry, name: str, target: str) -> Route | None:
        if (split := registry.splits.get(name)) is not None:
            return self._of_split(split)
        if target in self._models.models and self._models.is_declared(target):
            return self._to_unit(name, target)
        model, version = split_target(target)
        if version is not None:
            record = registry.versions.get((model, version))
            return None if record is None else self._of_version(name, record)
        if model not in registry.models:
            return None
        route = self._of_model(registry, model)
        return None if route is None else msgspec.structs.replace(route, name=name)

    def _to_unit(self, name: str, unit: str) -> Route:
        model = self._models.models[unit]
        return Route(
            name=name,
            unit=unit,
            created=model.created,
            max_model_len=model.max_model_len,
            listed=not (self._models.failure(unit) or unit in self.failures),
            fallback=self._models.fallback(unit),
        )
