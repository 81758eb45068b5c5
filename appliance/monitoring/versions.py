"""Versions of installed packages, read without importing them."""

from __future__ import annotations

from importlib import metadata

PRODUCT = "appliance"


def product_version() -> str:
    """Return the product's version."""
    return version_of(PRODUCT) or "unknown (not installed)"


def version_of(distribution: str) -> str | None:
    """Return the installed version of a distribution, or None if it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def requirements() -> list[str]:
    """Return the names of the distributions required by the product."""
    try:
        declared = metadata.requires(PRODUCT) or []
    except metadata.PackageNotFoundError:
        return []
    names = []
    for requirement in declared:
        package, _, marker = requirement.partition(";")
        if "extra" not in marker:
            end = next((i for i, character in enumerate(package) if character in " <>=!~[("), len(package))
            names.append(package[:end].strip())
    return names
