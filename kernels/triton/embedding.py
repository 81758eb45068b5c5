# mypy: allow-untyped-defs
"""Computes one rank's part of the embedding. With tensor parallelism, each rank has only some rows of the
embedding matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_COLUMNS = 1024


def embedding_part(
    token_ids: torch.Tensor, weight: torch.Tensor, first: int, *, pdl: bool = False
) -> torch.Tensor:
    """Return the rows of `weight [rows, hidden]` for `token_ids [tokens]` int64: `[tokens, hidden]`. `weight`
    must be contiguous; its first row is for token id `first`. The result is zero for tokens outside `weight`.

    pdl: see `kernels.triton.fused`.
    """
    tokens, hidden = len(token_ids), weight.shape[1]
    out = torch.empty((tokens, hidden), dtype=weight.dtype, device=weight.device)
    if tokens:
        _embedding_part[(tokens, triton.cdiv(hidden, _COLUMNS))](
            token_ids,
            weight,
            out,
            first,
            len(weight),
            hidden,
            PDL=pdl,
            BLOCK=_COLUMNS,
            num_warps=4,
            launch_pdl=pdl,
        )
    return out


@triton.jit(do_not_specialize=["first", "rows"])
def _embedding_part(token_ids, weight, out, first, rows, hidden, PDL: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.load(token_ids + token) - first
    own = (row >= 0) & (row < rows)
    values = tl.load(weight + row * hidden + column, mask=inside & own, other=0.0)
    tl.store(out + token * hidden + column, values, mask=inside)
