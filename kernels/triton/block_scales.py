# mypy: allow-untyped-defs
"""Contains the parts of GEMM kernels that apply the scales of FP8 weights with one scale per block
(`kernels.Fp8Weight.block`), and of tokens with one scale per group of columns. They are separate because the
dense GEMMs and those of experts share them.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_scales(
    expert,
    weight_row,
    rows: tl.constexpr,
    K: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    ONE: tl.constexpr,
):
    """Return the index of the first block scale of each `weight_row` of an expert's matrix `[rows, K]`. With
    ONE, all these rows belong to the same blocks, and the result has a single element."""
    row_blocks: tl.constexpr = (rows + GROUP_N - 1) // GROUP_N
    if ONE:
        weight_row = tl.min(weight_row, axis=0) + tl.arange(0, 1)
    return (expert * row_blocks + weight_row // GROUP_N) * ((K + GROUP_K - 1) // GROUP_K)


@triton.jit
def load_scales(of_rows, of_tokens, stride, k, K: tl.constexpr, GROUP_K: tl.constexpr, live):
    """Return the scales of the weights' blocks and of the tokens' groups that contain column `k`, or the last
    column if `k` is larger. `of_rows [BLOCK_N or 1]` and `of_tokens [ROWS]` point to the scales of the first
    column. The scales of a token's groups are `stride` apart. Only `live` tokens have scales."""
    group = tl.minimum(k, K - 1) // GROUP_K
    row_scale = tl.load(of_rows + group)
    return row_scale, tl.load(of_tokens + group.to(tl.int64) * stride, mask=live, other=0.0)


@triton.jit
def add_scaled(acc, a, b, a_scale, b_scale):
    """Return `acc [M, N]` plus the product of `a [M, BLOCK_K]` and `b [N, BLOCK_K]`, which are weights and
    tokens in any order, multiplied by the scales that `load_scales` returns for their columns. Every step's
    product is added in float32. The scales are loaded one step ahead, because otherwise every step would wait
    for them."""
    return acc + tl.dot(a, tl.trans(b), input_precision="ieee") * (a_scale[:, None] * b_scale[None, :])
