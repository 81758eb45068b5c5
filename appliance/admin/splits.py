"""The admin action for traffic splits, which distribute the requests for one name over several models or
versions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from appliance.actions.parameters import SplitModel
from appliance.admin.effects import Effect, committed, done
from appliance.models.front_routes import FrontRoutes
from appliance.models.routing import Routing
from appliance.models.unit_names import split_target
from store.audit import Actor
from store.errors import ConflictError, UnknownModelError
from store.models import Registry
from store.registry import ModelRegistry


@dataclass(kw_only=True)
class SplitAdmin:
    """Sets and ends traffic splits."""

    registry: ModelRegistry
    routing: Routing
    fronts: FrontRoutes
    check_declared: Callable[[str, str], None]
    """Same as `ModelAdmin.check_declared`."""

    async def split(self, actor: Actor, asked: SplitModel) -> Effect:
        """Set or end a split. Raises UnknownModelError if the name or a target does not exist, and
        ConflictError if the change would leave requests without a loaded model."""
        name, registry = asked.name, self.registry
        self.check_declared(name, "split")
        if name not in registry.current.models and name not in registry.current.aliases:
            raise UnknownModelError(
                f"there is no model or alias {name!r} in the registry; add it with 'appliance models add "
                f"{name}=FOLDER' or 'appliance models alias {name} TARGET'"
            )
        weights = None if asked.weights is None else self._targets(name, asked.weights)
        if self.routing.unit_of(name):
            self._check_loaded(name, [self._default_of(name)] if weights is None else list(weights))
        await committed(registry.set_split(actor=actor, name=name, weights=weights))
        await self.fronts.routed()
        if weights is None:
            return done(f"the split of {name} has ended; its requests go to {self._default_of(name)}")
        total = sum(weights.values())
        shown = ", ".join(f"{weight / total:.1%} to {target}" for target, weight in weights.items())
        return done(f"requests for {name} are split: {shown}")

    def _targets(self, name: str, weights: dict[str, float]) -> dict[str, float]:
        """Return a split's weights with each target written as NAME or NAME@VERSION. A target that is just a
        number refers to that version of `name`."""
        found: dict[str, float] = {}
        for given, weight in weights.items():
            target = complete_target(self.registry.current, self.routing, name, given)
            if target in found:
                raise ValueError(f"weights lists {target!r} twice: give each version one weight")
            found[target] = weight
        return found

    def _default_of(self, name: str) -> str:
        """Return the model or version that answers requests for the name when they are not split."""
        registry = self.registry.current
        if (alias := registry.aliases.get(name)) is not None:
            return alias.target
        return f"{name}@{registry.models[name].default_version}"

    def _check_loaded(self, name: str, targets: list[str]) -> None:
        for target in targets:
            if not self.routing.answers(unit := self.routing.target_unit(target)):
                raise ConflictError(
                    f"model {name!r} answers requests, but {target} is not loaded; load it first with: "
                    f"appliance models load {unit} --wait"
                )


def complete_target(registry: Registry, routing: Routing, name: str, given: str) -> str:
    """Return a target as NAME or NAME@VERSION. A target that is just a number refers to that version of
    `name`. Raises UnknownModelError if there is no such model or version."""
    is_version = given.isascii() and given.isdecimal()
    target = f"{name}@{given}" if is_version else given
    if routing.target_unit(target):
        return target
    if is_version and name in registry.aliases:
        raise UnknownModelError(
            f"{name!r} is an alias, so the target {given!r} does not say which model it belongs to: write "
            "NAME@VERSION"
        )
    model, version = split_target(target)
    if version is not None and model in registry.models:
        known = ", ".join(str(one.version) for one in registry.versions_of(model))
        raise UnknownModelError(f"model {model!r} has no version {version}; available versions: {known}")
    raise UnknownModelError(
        f"there is no model {given!r} (a target is VERSION, NAME or NAME@VERSION, never an alias)"
    )
