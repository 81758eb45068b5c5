"""What a forward pass reads: the seam between the tables of a rank (`engine.batch`) and the decoder.

No model-specific field belongs here, and nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import AttentionInput


@dataclass(slots=True)
class ForwardInput:
    """One pass: the decodes' tokens first (one each), then the chunks' tokens, packed without padding."""

    token_ids: torch.Tensor
    """[tokens] int64"""
    positions: torch.Tensor
    """[tokens] int64"""
    slots: torch.Tensor
    """[tokens] int64: block id × BLOCK_TOKENS + offset, where each token's K and V are written."""
    attention: AttentionInput
    logit_index: torch.Tensor
    """[logit rows] int64: tokens of the pass whose logits are wanted."""
