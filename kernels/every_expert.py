"""Experts in plain torch, without waiting for the device: every expert computes every token, and the results
that a token has not chosen get no weight. Used on a GPU where no kernel computes the experts."""

from __future__ import annotations

import torch

from kernels import Fp8Weight, Weight
from kernels.reference import silu_mul

_TOKENS = 64
"""Number of tokens that are computed at once, which bounds the memory: 100 MB with 128 experts of width
768."""


def activate(x: torch.Tensor, chosen: torch.Tensor, gate_up: Weight) -> torch.Tensor:
    """Return `silu(gate) × up` of the chosen experts of each token `x [tokens, hidden]`: `[tokens, top_k,
    intermediate]` in x's dtype."""
    matrices = _expanded(gate_up, x.dtype).mT
    parts = []
    for rows, experts in zip(x.split(_TOKENS), chosen.long().split(_TOKENS), strict=True):
        products = rows.expand(len(matrices), -1, -1).bmm(matrices)  # [experts, rows, 2 × intermediate]
        parts.append(silu_mul(products[experts, _every_row(experts)]))
    return torch.cat(parts)


def weighted_sum(
    values: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor, down: Weight
) -> torch.Tensor:
    """Return the sum of `weight × down(value)` over the chosen experts of each token: `[tokens, hidden]` in
    the dtype of `values [tokens, top_k, intermediate]`."""
    matrices = _expanded(down, values.dtype).mT
    weighted = (values * weights.unsqueeze(-1)).to(values.dtype)
    parts = []
    for rows, experts in zip(weighted.split(_TOKENS), chosen.long().split(_TOKENS), strict=True):
        by_expert = rows.new_zeros(len(matrices), len(rows), rows.shape[-1])
        by_expert[experts, _every_row(experts)] = rows
        parts.append(by_expert.bmm(matrices).sum(dim=0))
    return torch.cat(parts)


def _every_row(experts: torch.Tensor) -> torch.Tensor:
    """Return the index of each row of `experts [rows, top_k]`: `[rows, 1]`."""
    return torch.arange(len(experts), device=experts.device).unsqueeze(1)


def _expanded(weight: Weight, dtype: torch.dtype) -> torch.Tensor:
    if isinstance(weight, Fp8Weight):
        return (weight.values.to(dtype) * weight.scales.unsqueeze(-1)).to(dtype)
    return weight
