"""Defines the input of a forward pass. The device tables (`engine.device_tables`) create the input, and the
decoder reads it. It contains no model-specific fields and no request data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import AttentionInput


@dataclass(slots=True)
class ForwardInput:
    """The tokens of one forward pass. The decodes' tokens come first (one per sequence), followed by the
    tokens of prefill chunks and by padding."""

    token_ids: torch.Tensor
    """Token ids: [tokens] int64."""
    positions: torch.Tensor
    """Position of each token in its sequence: [tokens] int64."""
    kv_slots: torch.Tensor
    """KV slot index (block id × BLOCK_TOKENS + offset) where the keys and values of each token are written:
    [tokens] int64. -1 marks padding, for which no keys and values are written."""
    attention: AttentionInput
    logits_attention: AttentionInput | None = None
    """Attention input for a last layer that computes only the tokens whose logits are needed: the decodes'
    tokens and the last token of each prefill chunk. `queries` contains the indices of these tokens. For all
    other tokens, the last layer computes only keys and values, so the result of the pass has no rows for
    them. None means that the result contains a row for every token."""
