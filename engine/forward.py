"""What a forward pass reads: the seam between the tables of a rank (`engine.batch`) and the decoder.

No model-specific field belongs here, and nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import AttentionInput


@dataclass(slots=True)
class KvPool:
    """One layer's KV cache on one rank: `[blocks, kv_heads on this rank, BLOCK_TOKENS, head_dim]` each.

    Finite from the start (zeros): attention reads whole blocks and masks what lies past a sequence's end.
    """

    keys: torch.Tensor
    values: torch.Tensor
    k_scales: torch.Tensor | None = None
    """`[blocks, kv_heads on this rank, BLOCK_TOKENS]` float32: a scale for each token and head of e4m3 keys;
    None: keys and values are of the model's dtype."""
    v_scales: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All of them, each with blocks first. FP8 as bytes, which is what indexing knows."""
        scales = [scales for scales in (self.k_scales, self.v_scales) if scales is not None]
        if not scales:
            return [self.keys, self.values]
        return [self.keys.view(torch.uint8), self.values.view(torch.uint8), *scales]


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
