"""What a forward pass reads: the seam between the tables of a rank (`engine.batch`) and the decoder.

No model-specific field belongs here, and nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class KvPool:
    """One layer's KV cache on one rank: `[blocks, kv_heads on this rank, BLOCK_TOKENS, head_dim]` each.

    Finite from the start (zeros): attention reads whole blocks and masks what lies past a sequence's end.
    """

    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class ChunkSpan:
    """A prompt slice inside a forward pass."""

    first: int
    """Index of its first token in the pass."""
    count: int
    context: int
    """Tokens of the sequence before the slice: already in the cache when the pass starts."""
    block_table: torch.Tensor
    """[blocks covering context + count] int64, on the device."""


@dataclass(slots=True)
class ForwardInput:
    """One pass: the decodes' tokens first (one each), then the chunks' tokens, packed without padding."""

    token_ids: torch.Tensor
    """[tokens] int64"""
    positions: torch.Tensor
    """[tokens] int64"""
    slots: torch.Tensor
    """[tokens] int64: block id × BLOCK_TOKENS + offset, where each token's K and V are written."""
    decodes: int
    decode_block_tables: torch.Tensor
    """[decodes, most blocks any of them uses] int64; entries past a sequence's length are any valid block."""
    decode_lens: torch.Tensor
    """[decodes] int64: tokens in the cache for each, the new one included."""
    chunks: list[ChunkSpan]
    logit_index: torch.Tensor
    """[logit rows] int64: tokens of the pass whose logits are wanted."""
