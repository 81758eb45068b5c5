"""The input of a forward pass: the interface between the device tables (`engine.device_tables`) and the
decoder.

The struct has no model-specific field and no field about requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import AttentionInput


@dataclass(slots=True)
class ForwardInput:
    """The tokens of one pass: first the decodes' tokens (one each), then the chunks' tokens, then padding."""

    token_ids: torch.Tensor
    """Token ids of the pass: [tokens] int64."""
    positions: torch.Tensor
    """Positions of the tokens in their sequences: [tokens] int64."""
    kv_slots: torch.Tensor
    """KV slot indices (block id × BLOCK_TOKENS + offset) to which the keys and values of the tokens are
    written: [tokens] int64. -1 marks padding, which is not written."""
    attention: AttentionInput
    logits_attention: AttentionInput | None = None
    """Restricts the last layer to the tokens whose logits are needed: the decodes and the last token of each
    chunk. Its `queries` are the logits indices. The pass then returns only those rows, and the last layer
    computes only keys and values for the other tokens. None: the pass returns a row for every token."""
