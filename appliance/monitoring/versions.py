"""Versions of what is installed, without importing any of it."""

from __future__ import annotations

from importlib import metadata

PRODUCT = "appliance"


def product_version() -> str:
    """Ours."""
    return version_of(PRODUCT) or "unknown (not installed)"


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution, None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[str]:
    """Names of the distributions that the product cannot do without."""
    try:
        declared = metadata.requires(PRODUCT) or []
    except metadata.PackageNotFoundError:
        return []
    names = []
    for requirement in declared:
        what, _, marker = requirement.partition(";")
        if "extra" not in marker:
            end = next((i for i, character in enumerate(what) if character in " <>=!~[("), len(what))
            names.append(what[:end].strip())
    return names
