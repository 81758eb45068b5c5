"""The models that front processes serve, and the names under which applications use them."""

from __future__ import annotations

import msgspec

from appliance.channel.sampling import SamplingDefaults


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or a version of a model, that is loaded or being loaded."""

    name: str
    """The unit of loading: the name of a model in the settings, or NAME@VERSION for a version in the
    registry."""
    folder: str
    """Folder with the tokenizer and the chat template."""
    version: str
    """Fingerprint of the folder, which identifies the version of the model's files."""
    created: int
    """When the model's files were created, in unix seconds."""
    max_model_len: int
    """Maximum total length of prompt and output, in tokens."""
    vocab_size: int
    required: bool = True
    """Whether the service counts as ready only while this model is ready."""
    chat_template: str | None = None
    """File with a chat template that replaces the templates in the folder."""
    sampling: SamplingDefaults = SamplingDefaults()
    """Default sampling parameters, for requests that do not set them."""


class Arm(msgspec.Struct, frozen=True, array_like=True):
    """A model or version that gets a share of the requests for a split name."""

    unit: str
    weight: float
    """Weight of this arm. Its share of the requests is its weight divided by the sum of all arms' weights."""
    target: str
    """The target in the operator's notation. Callers are assigned to targets by this name, so they stay with
    a target even if its default version changes."""


class Shadow(msgspec.Struct, frozen=True, array_like=True):
    """A model or version to which a share of a name's requests is copied."""

    unit: str
    share: float
    """Fraction of the requests, from 0 to 1."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A name that applications can use."""

    name: str
    unit: str
    """`ServedModel.name` of the model that answers requests for the name. If empty, requests wait until a
    model is loaded for the name."""
    created: int = 0
    """When the model's files were created, in unix seconds."""
    max_model_len: int = 0
    listed: bool = True
    """Whether `GET /v1/models` lists the name, because the model can answer now or on demand."""
    fallback: str = ""
    """Name of the model that answers requests if this one cannot, provided that the key allows it."""
    shadow: Shadow | None = None
    arms: tuple[Arm, ...] = ()
    """If the name is split, the arms that can answer. `unit` is then the unit of the arm with the largest
    weight."""
    on_demand: bool = False
    """Whether a request loads or wakes the model (`FrontReport.wanted`). Set only if `unit` is empty."""
    problem: str = ""
    """Reason why the latest load on demand failed. If set, requests are refused instead of waiting."""
