"""The records of the model registry in `control.db`: models, their versions, aliases, splits and shadows. A
version is a folder with a checkpoint, together with its settings. The records contain only data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec


class ModelFile(msgspec.Struct, frozen=True, array_like=True):
    """A file in a version's folder, as it was when the version was added."""

    name: str
    bytes: int
    sha256: str
    """SHA-256 (hex) of the file."""
    samples: str = ""
    """SHA-256 (hex) of samples from a file too large to be read in full before each start. Empty for smaller
    files, and for versions added by releases that did not store this hash."""
    mtime_ns: int = 0
    """Modification time in unix nanoseconds; 0 for versions added by releases that did not store the time."""


class ModelRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A model, which applications request by name. Times are in unix seconds."""

    name: str
    created_at: float
    default_version: int
    """The version that answers requests for the model's name."""
    previous_version: int | None = None
    """The version that was the default before the latest change. `models rollback` makes it the default
    again."""
    next_version: int
    """Number of the next version. Numbers are never reused, because the request log refers to versions by
    number."""


class VersionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A version of a model."""

    model: str
    version: int
    created_at: float
    folder: str
    files: tuple[ModelFile, ...] = ()
    settings: dict[str, Any] = {}
    """The model's settings, keyed by their names in settings files. Settings that are not listed keep their
    defaults."""
    loaded_at: float | None = None
    """When an operator loaded the version, or None if it is not loaded. Restarting the service reloads loaded
    versions."""

    @property
    def unit(self) -> str:
        """The name under which the version is loaded: NAME@VERSION."""
        return f"{self.model}@{self.version}"


class AliasRecord(msgspec.Struct, frozen=True, kw_only=True):
    """An additional name for a model or for one of its versions."""

    name: str
    target: str
    """A model's name, or NAME@VERSION."""
    created_at: float


class SplitRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How the requests for a name are distributed over several models or versions."""

    name: str
    """The name that clients request: a model in the registry, or an alias."""
    weights: dict[str, float]
    """Weight of each target. A target is a model's name, or NAME@VERSION."""
    created_at: float
    """When the split was set, in unix seconds."""


class ShadowRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A shadow: a share of the requests for a name is also sent to another model or version. The answers to
    these copies are compared with the original answers and then discarded."""

    name: str
    """The name that applications request."""
    target: str
    """A model's name, or NAME@VERSION."""
    share: float
    """Fraction of requests that are copied, from 0 to 1."""
    created_at: float


class Registry:
    """A snapshot of all registry records. It is immutable, so any thread may read it."""

    def __init__(
        self,
        models: Iterable[ModelRecord] = (),
        versions: Iterable[VersionRecord] = (),
        aliases: Iterable[AliasRecord] = (),
        splits: Iterable[SplitRecord] = (),
        shadows: Iterable[ShadowRecord] = (),
    ) -> None:
        self.models: Mapping[str, ModelRecord] = {model.name: model for model in models}
        self.versions: Mapping[tuple[str, int], VersionRecord] = {
            (version.model, version.version): version
            for version in sorted(versions, key=lambda version: version.version)
        }
        self.aliases: Mapping[str, AliasRecord] = {alias.name: alias for alias in aliases}
        self.splits: Mapping[str, SplitRecord] = {split.name: split for split in splits}
        self.shadows: Mapping[str, ShadowRecord] = {shadow.name: shadow for shadow in shadows}

    def versions_of(self, model: str) -> list[VersionRecord]:
        """Return the versions of a model, oldest first."""
        return [version for version in self.versions.values() if version.model == model]
