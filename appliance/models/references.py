"""Finds references to unknown models in the settings and the registry: fallbacks, and the targets of aliases,
splits and shadows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path

from appliance.models.unit_names import split_target
from appliance.settings import Fault, Loaded, dotted
from store.errors import MissingDatabaseError
from store.models import Registry
from store.registry import read_registry


def stored_registry(state_dir: str) -> Registry:
    """Return the model registry in this state directory. Empty if no service has used the directory yet.
    Raises StoreError if the database cannot be read."""
    try:
        return read_registry(Path(state_dir) / "control.db")
    except MissingDatabaseError:
        return Registry()


def fallback_faults(loaded: Loaded, registry: Registry) -> list[Fault]:
    """Return a fault for each fallback in the settings that is neither another model's name nor an alias."""
    models = loaded.settings.models
    known = {*models, *registry.models, *registry.aliases}
    faults = []
    for name, model in models.items():
        others = sorted(known - {name})
        if not model.fallback or model.fallback in others:
            continue
        path = ("models", name, "fallback")
        remedy = f"use one of {', '.join(others)}, or remove it" if others else "remove it"
        description = f"{dotted(path)} = {model.fallback!r} does not name another model or alias"
        faults.append(loaded.fault(path, description, remedy))
    return faults


def unknown_targets(registry: Registry, declared: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield a problem and remedy for each registry record that refers to an unknown model, which may have
    been removed from the settings. A model is unknown if it is neither in the registry nor in `declared`, the
    models in the settings.
    """

    def is_known(target: str) -> bool:
        model, version = split_target(target)
        if version is None:
            return target in declared or target in registry.models
        return target in declared or (model, version) in registry.versions

    for alias in registry.aliases.values():
        if not is_known(alias.target):
            yield (
                f"alias {alias.name}",
                f"its target {alias.target!r} is not a model, so applications cannot use the alias; run "
                f"`appliance models alias {alias.name} TARGET`",
            )
    for split in registry.splits.values():
        for target in split.weights:
            if not is_known(target):
                yield (
                    f"split of {split.name}",
                    f"its target {target!r} is not a model, so it gets no requests; run `appliance models "
                    f"split {split.name}` with different targets or --clear",
                )
    for shadow in registry.shadows.values():
        if not is_known(shadow.target):
            yield (
                f"shadow of {shadow.name}",
                f"its target {shadow.target!r} is not a model, so nothing is copied; run `appliance models "
                f"shadow {shadow.name}` with a different target or --clear",
            )
    names = {*declared, *registry.models, *registry.aliases}
    for version in registry.versions.values():
        fallback = version.settings.get("fallback")
        if fallback and fallback not in names:
            yield (
                f"{version.model}@{version.version}",
                f"its fallback {fallback!r} is not a model or alias, so it is not used: add a model or an "
                f"alias with this name, or add a version of {version.model} with a different fallback",
            )
