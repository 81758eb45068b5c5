"""What a forward pass reads: the seam between the tables of a rank (`engine.device_tables`) and the decoder.

No model-specific field belongs here, and nothing of requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import AttentionInput


@dataclass(slots=True)
class ForwardInput:
    """One pass: the decodes' tokens first (one each), then the chunks' tokens, then padding."""

    token_ids: torch.Tensor
    """[tokens] int64"""
    positions: torch.Tensor
    """[tokens] int64"""
    slots: torch.Tensor
    """[tokens] int64: block id × BLOCK_TOKENS + offset, where each token's K and V are written; -1, which
    padding has: nowhere."""
    attention: AttentionInput
    ends: AttentionInput | None = None
    """Where no token but the decodes' and each chunk's last is asked for: these, as the last layer's
    attention sees them (`AttentionInput.queries`). They alone are the result, and of the others the last
    layer makes no more than keys and values. None: the result has a row for every token."""
