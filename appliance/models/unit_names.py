"""The names of units: the name of a model in the settings, or NAME@VERSION for a version of a registered
model."""

from __future__ import annotations


def split_target(target: str) -> tuple[str, int | None]:
    """Split NAME@VERSION into name and version. The version is None if `target` contains none."""
    name, at, version = target.rpartition("@")
    if at and name and version.isascii() and version.isdecimal() and len(version) < 10:
        return name, int(version)
    return target, None


def version_key(unit: str) -> tuple[str, int]:
    """Return a unit's key in `Registry.versions`. For a model in the settings, the key has version 0, which
    never exists in the registry."""
    model, version = split_target(unit)
    return model, version or 0
