"""Defines a forward pass's input, which the device tables (`engine.device_tables`) create and the decoder
reads. It contains no model-specific fields and no request data."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import AttentionInput


@dataclass(slots=True)
class ForwardInput:
    """The tokens of one forward pass: first decode tokens (one per sequence), then the tokens of prefill
    chunks, then padding."""

    token_ids: torch.Tensor
    """Token ids: [tokens] int64."""
    positions: torch.Tensor
    """Position of each token in its sequence: [tokens] int64."""
    kv_slots: torch.Tensor
    """The KV slot index (block id × BLOCK_TOKENS + offset) that each token's keys and values are written to:
    [tokens] int64. It is -1 for padding, for which nothing is written."""
    attention: AttentionInput
    logits_attention: AttentionInput | None = None
    """Attention input for a last layer that computes only the tokens whose logits are needed: the decodes'
    tokens and the last token of each prefill chunk. `queries` contains their indices. For all other tokens,
    the last layer computes only keys and values, and the result has no row for them. If None, the result has
    a row for every token."""
