"""The models that front processes serve, and the names that applications use for them."""

from __future__ import annotations

import msgspec

from appliance.channel.sampling import SamplingDefaults


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model, or a version of a model, that is loaded or being loaded."""

    name: str
    """Name of the unit that is loaded: a model in the settings, or NAME@VERSION for a version in the
    registry."""
    folder: str
    """Folder with the tokenizer and the chat template."""
    version: str
    """Fingerprint of the folder's files, which changes when a file changes."""
    created: int
    """When the model's files were created, in unix seconds."""
    max_model_len: int
    """Maximum combined length of prompt and output, in tokens."""
    vocab_size: int
    required: bool = True
    """Whether the service counts as ready only while this model is ready."""
    chat_template: str | None = None
    """File with a chat template that replaces the templates in the folder."""
    sampling: SamplingDefaults = SamplingDefaults()
    """Default sampling parameters, for requests that do not set them."""


class Arm(msgspec.Struct, frozen=True, array_like=True):
    """A model or version that gets a share of the requests for a name."""

    unit: str
    weight: float
    """The arm's weight. The arm's share of the requests is this weight divided by the sum of all arms'
    weights."""
    target: str
    """The target, as written by the operator. Arms are assigned to callers based on this text, so callers
    keep their arm even if the target's default version changes."""


class Shadow(msgspec.Struct, frozen=True, array_like=True):
    """A model or version that gets copies of some of the requests for a name."""

    unit: str
    share: float
    """Fraction of the requests to copy, from 0 to 1."""


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A name that applications can use for a model."""

    name: str
    unit: str
    """`ServedModel.name` of the model that answers requests for the name. If empty, requests wait until a
    model is loaded for the name."""
    created: int = 0
    """When the model's files were created, in unix seconds."""
    max_model_len: int = 0
    listed: bool = True
    """Whether `GET /v1/models` lists the name. True if the model can answer requests now or can be loaded on
    demand."""
    fallback: str = ""
    """Name of the model that answers requests if this route's model cannot and the key allows a fallback."""
    shadow: Shadow | None = None
    arms: tuple[Arm, ...] = ()
    """The arms that can answer requests, if requests for the name are split. `unit` is then the unit of the
    arm with the largest weight."""
    on_demand: bool = False
    """Whether a request for the name causes its model to be loaded or woken (`FrontReport.wanted`). Set only
    if `unit` is empty."""
    problem: str = ""
    """Why the latest load on demand failed. While this is set, requests are refused instead of waiting."""
