"""Computes the table of rotary position embeddings for a model configuration."""

from __future__ import annotations

import torch

from engine.config import ModelConfig
from kernels import rope as tables


def rotary_table(config: ModelConfig, length: int) -> torch.Tensor:
    """Return the cos and sin table for positions below `length`: `[length, head_dim]` float32, on the CPU.

    `length` is the maximum sequence length; it also determines the base of dynamic scaling
    (`engine.config.RopeConfig`). For the layout, see `kernels.rope.cos_sin_table`.
    """
    rope, head_dim = config.rope, config.head_dim
    theta, factor, original = rope.theta, rope.factor, rope.original_max_position_embeddings
    scale = 1.0
    if rope.kind == "linear":
        frequencies = tables.linear_frequencies(head_dim, theta, factor)
    elif rope.kind == "dynamic":
        positions = config.max_position_embeddings
        frequencies = tables.dynamic_frequencies(head_dim, theta, factor, positions, length)
    elif rope.kind == "llama3":
        low, high = rope.low_freq_factor, rope.high_freq_factor
        frequencies = tables.llama3_frequencies(head_dim, theta, factor, low, high, original)
    elif rope.kind == "yarn":
        fast, slow = rope.beta_fast, rope.beta_slow
        frequencies = tables.yarn_frequencies(head_dim, theta, factor, original, fast, slow, rope.truncate)
        scale = rope.attention_factor or 0.0
        if rope.attention_factor is None:
            scale = tables.yarn_attention_factor(factor, rope.mscale, rope.mscale_all_dim)
    else:
        frequencies = tables.default_frequencies(head_dim, theta)
    return tables.cos_sin_table(frequencies, length, scale)
