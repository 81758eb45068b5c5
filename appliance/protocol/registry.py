"""The types of the model registry: models, their versions and files, splits and shadows."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

VersionState = Literal["available", "loading", "ready", "draining", "failed", "sleeping"]
"""An "available" version is not loaded. A "draining" version finishes its requests and is then unloaded. A
"sleeping" version is loaded, but has released its memory."""


class AddedVersion(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A version that was added to the registry."""

    name: str
    version: int
    warnings: list[str] = []
    """Limitations that were found when the model was checked."""


class PrunedVersion(msgspec.Struct, kw_only=True):
    """An unused version."""

    name: str
    version: int
    folder: str


class PrunedVersions(msgspec.Struct, kw_only=True):
    """The unused versions that were removed, or would be removed in a dry run."""

    versions: list[PrunedVersion]


class VersionStatus(msgspec.Struct, kw_only=True):
    """A version of a model and its state."""

    name: str
    version: int
    state: VersionState
    detail: str = ""
    """Explanation of the state, such as "loading weights 43%", or the reason for a failure."""


class RegisteredFile(msgspec.Struct, kw_only=True):
    """A version's file, as it was when the version was added."""

    name: str
    bytes: int
    sha256: str


class RegisteredVersion(msgspec.Struct, kw_only=True):
    """A version of a model: a folder with a checkpoint, and its settings."""

    version: int
    folder: str
    state: VersionState
    detail: str = ""
    """Explanation of the state, such as "loading weights 43%", or the reason for a failure."""
    added_at: float | None = None
    """When the version was added to the registry, in unix seconds."""
    settings: dict[str, Any] = {}
    """The version's settings, keyed by their names in settings files."""
    files: list[RegisteredFile] = []
    replicas: int = 0
    """Number of replicas that are loaded or being loaded."""
    devices: list[str] = []
    memory_bytes: int = 0
    """Memory that the weights and KV caches of the version's replicas use."""
    expires_at: float | None = None
    """Time when the version will be unloaded if no more requests arrive, in unix seconds; null for never."""
    shares: dict[str, float] = {}
    """For each split name that can lead to this version, the fraction of the name's requests that the version
    gets."""


class ShadowTimes(msgspec.Struct, kw_only=True):
    """Mean timings of a shadow's original or copied answers, measured from the time when a request is sent to
    the replica."""

    ttft_ms: float
    e2e_ms: float
    tokens: float


class ShadowStatus(msgspec.Struct, kw_only=True):
    """A share of a name's requests that is copied to another model or version, and the results since the
    shadow was set or the service started."""

    name: str
    target: str
    share: float
    """Fraction of the requests that are copied."""
    compared: int = 0
    dropped: int = 0
    """Number of copies that were not made because the target could not answer at once."""
    failed: int = 0
    original: ShadowTimes | None = None
    """Timings of the original answers; null if there are no results yet."""
    copy: ShadowTimes | None = None
    greedy: int = 0
    """Number of compared greedy requests whose prompt has the same tokens on both models: the original model
    and the one that the request was copied to."""
    agreement: float | None = None
    """Fraction of the answer tokens that come before the first difference between original and copied answer,
    over the `greedy` requests."""


class RegisteredModel(msgspec.Struct, kw_only=True):
    """A model in the settings or in the registry."""

    name: str
    state: VersionState
    """State of the default version."""
    default: int
    """The version that answers requests for the name."""
    previous: int | None = None
    """The version that `models rollback` makes the default again."""
    source: str
    """"registry", or the place where the settings declare the model."""
    aliases: list[str] = []
    """Additional names for the model or one of its versions."""
    split: dict[str, float] = {}
    """Weights of the targets that get the requests for the name; empty if the default version gets all of
    them."""
    shadows: list[ShadowStatus] = []
    """Shadows of the model's name and of its aliases."""
    versions: list[RegisteredVersion]
