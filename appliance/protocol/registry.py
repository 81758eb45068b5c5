"""The types of the model registry: models, their versions and files, traffic splits and shadow traffic."""

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
    """Limitations found when the model was checked."""


class PrunedVersion(msgspec.Struct, kw_only=True):
    """A model version that is not used and can be removed."""

    name: str
    version: int
    folder: str


class PrunedVersions(msgspec.Struct, kw_only=True):
    """The unused versions that were removed or, in a dry run, would be removed."""

    versions: list[PrunedVersion]


class VersionStatus(msgspec.Struct, kw_only=True):
    """A version of a model and its state."""

    name: str
    version: int
    state: VersionState
    detail: str = ""
    """Explanation of the version's state, such as "loading weights 43%", or the reason for a failure."""


class RegisteredFile(msgspec.Struct, kw_only=True):
    """A file belonging to a version, as it was when the version was added."""

    name: str
    bytes: int
    sha256: str


class RegisteredVersion(msgspec.Struct, kw_only=True):
    """A version of a model: a folder with a checkpoint, and its settings."""

    version: int
    folder: str
    state: VersionState
    detail: str = ""
    """Explanation of the version's state, such as "loading weights 43%", or the reason for a failure."""
    added_at: float | None = None
    """When the version was added to the registry, in unix seconds."""
    settings: dict[str, Any] = {}
    """The version's settings, keyed by their names in settings files."""
    files: list[RegisteredFile] = []
    replicas: int = 0
    """Number of the version's replicas that are loaded or being loaded."""
    devices: list[str] = []
    memory_bytes: int = 0
    """Memory used by the weights and KV caches of the version's replicas, in bytes."""
    expires_at: float | None = None
    """Unix time at which the version will be unloaded if no more requests arrive. Null means never."""
    shares: dict[str, float] = {}
    """For each name with a split that includes this version, the fraction of the name's requests that this
    version receives."""


class ShadowTimes(msgspec.Struct, kw_only=True):
    """Mean timings of the original requests or of their copies, measured from when a request is sent to the
    replica."""

    ttft_ms: float
    e2e_ms: float
    tokens: float


class ShadowStatus(msgspec.Struct, kw_only=True):
    """A shadow, which copies a share of the requests for a name to another model or version. Results are
    counted from when the shadow was set or the service started, whichever was later."""

    name: str
    target: str
    share: float
    """Fraction of the requests that are copied."""
    compared: int = 0
    dropped: int = 0
    """Number of copies not made because the target could not start them immediately."""
    failed: int = 0
    original: ShadowTimes | None = None
    """Timings of the original answers; null if there are no results yet."""
    copy: ShadowTimes | None = None
    greedy: int = 0
    """Number of compared requests that use greedy sampling and whose prompt both models tokenize
    identically."""
    agreement: float | None = None
    """Fraction of answer tokens before the first difference between the original and the copy, over all
    requests counted in `greedy`."""


class RegisteredModel(msgspec.Struct, kw_only=True):
    """A model in the settings or in the registry."""

    name: str
    state: VersionState
    """State of the model's default version."""
    default: int
    """The version that answers requests for the model's name."""
    previous: int | None = None
    """The version that `models rollback` would make the default again."""
    source: str
    """"registry", or the place where the settings declare the model."""
    aliases: list[str] = []
    """Additional names of the model or of one of its versions."""
    split: dict[str, float] = {}
    """Relative weights of the models and versions among which the requests for this model are split. Empty if
    the default version gets all of them."""
    shadows: list[ShadowStatus] = []
    """Shadows of the model's name and its aliases."""
    versions: list[RegisteredVersion]
