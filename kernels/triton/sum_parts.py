# mypy: allow-untyped-defs
"""Sums the residual and the partial results that other ranks have copied into this rank's memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048


def sum_parts(
    parts: torch.Tensor, own: torch.Tensor, residual: torch.Tensor, out: torch.Tensor, rank: int
) -> None:
    """Write `residual` plus the sum of all ranks' parts to `out`. The parts are added in rank order and
    rounded once.

    parts: [ranks, at least `rows`, hidden]. This rank's entry is not read.
    own: [rows, hidden], this rank's part.
    residual, out: [rows, hidden], contiguous, with the same dtype. `out` may be `residual`.
    """
    count = own.numel()
    _sum_parts[(triton.cdiv(count, _BLOCK),)](
        parts,
        own,
        residual,
        out,
        parts.stride(0),
        count,
        rank,
        WORLD=len(parts),
        BLOCK=_BLOCK,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["rank"])
def _sum_parts(parts, own, residual, out, stride, count, rank, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for source in tl.static_range(WORLD):
        if source == rank:
            part = tl.load(own + at, mask=inside, other=0.0)
        else:
            part = tl.load(parts + source * stride + at, mask=inside, other=0.0)
        total += part.to(tl.float32)
    total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
