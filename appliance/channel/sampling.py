"""A model's default sampling parameters, and the allowed range of each sampling parameter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Fraction = Annotated[float, Meta(ge=0, le=1)]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
TopK = Annotated[int, Meta(ge=-1, le=1 << 31)]

_IN_CHECKPOINTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Parameters that have the same meaning in `generation_config.json` as in this service."""


class SamplingDefaults(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Default sampling parameters for requests that do not set them. They take precedence over the
    checkpoint's `generation_config.json`. A change affects only requests that arrive after it."""

    temperature: Temperature | None = None
    """Sampling temperature. 0 selects greedy decoding. Default: the checkpoint's value, otherwise 1."""
    top_p: Fraction | None = None
    """Sample only from the most likely tokens, up to this cumulative probability. Default: the checkpoint's
    value, otherwise 1."""
    top_k: TopK | None = None
    """Sample only from this many of the most likely tokens; 0 or -1 for all tokens. Default: the checkpoint's
    value, otherwise all tokens."""
    min_p: Fraction | None = None
    """Minimum probability of a token, as a fraction of the most likely token's probability. Default: the
    checkpoint's value, otherwise 0."""
    presence_penalty: Penalty | None = None
    """Subtracted from the logit of each token that occurs in the answer. Default: 0."""
    frequency_penalty: Penalty | None = None
    """Subtracted from a token's logit once per occurrence in the answer. Default: 0."""
    repetition_penalty: RepetitionPenalty | None = None
    """Penalty for tokens that already occur in the prompt or the answer. Default: the checkpoint's value,
    otherwise 1 (no penalty)."""

    def over(self, generation_config: Mapping[str, Any]) -> SamplingDefaults:
        """Return these defaults, with unset values taken from the checkpoint's `generation_config.json` if it
        contains valid ones."""
        hints = {field.name: field.type for field in msgspec.structs.fields(self)}
        found: dict[str, Any] = {}
        for name in _IN_CHECKPOINTS:
            value = generation_config.get(name)
            if getattr(self, name) is None and value is not None and not isinstance(value, bool):
                try:
                    found[name] = msgspec.convert(value, hints[name])
                except msgspec.ValidationError:
                    continue  # transformers accepts some values that this engine does not
        return msgspec.structs.replace(self, **found)
