# mypy: allow-untyped-defs
"""Checks the scales of FP8 GEMMs. Also contains the parts of their kernels that apply the scales of weights
with one scale per block (`kernels.Fp8Weight.block`), and of tokens with one scale per group of columns. The
dense GEMMs and those of experts share this module.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.fused import scales_stride


def block_constants(block: tuple[int, int] | None) -> dict[str, int]:
    """Return a GEMM kernel's constants for the rows and columns of the weight's blocks. They are 0 if the
    weight has no blocks."""
    rows, columns = block or (0, 0)
    return {"GROUP_N": rows, "GROUP_K": columns}


def scales_shape(shape: torch.Size, block: tuple[int, int] | None) -> torch.Size:
    """Return the shape of the scales of weights `[…, N, K]` with one scale per row, or one per block. Raises
    ValueError if the kernels do not support blocks of this size."""
    if block is None:
        return shape[:-1]
    rows, columns = block
    if rows < 1 or columns < 32 or columns & (columns - 1):
        raise ValueError(
            f"block is {block}; expected at least 1 row, and a power of two of at least 32 columns"
        )
    return torch.Size((*shape[:-2], triton.cdiv(shape[-2], rows), triton.cdiv(shape[-1], columns)))


def check_scales(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    block: tuple[int, int] | None,
) -> None:
    """Raise ValueError if the scales of the weight `[…, N, K]`, or of `x [rows, K]` if it is quantised, have
    unexpected shapes, dtypes or strides. block: see `kernels.Fp8Weight`."""
    expected = tuple(scales_shape(weight.shape, block))
    if weight_scale.shape != expected or weight_scale.dtype != torch.float32:
        raise ValueError(
            f"weight_scale is {weight_scale.dtype} {tuple(weight_scale.shape)}; expected float32 {expected}"
        )
    rows = len(x)
    if x_scale is None or not rows:
        return
    if block is None:
        if x_scale.numel() != rows:
            raise ValueError(f"x_scale is {tuple(x_scale.shape)}; expected {(rows, 1)}")
        return
    shape, strides = (rows, triton.cdiv(x.shape[1], block[1])), (1, scales_stride.fn(rows))
    if x_scale.shape != shape or x_scale.stride() != strides:
        raise ValueError(
            f"x_scale is {tuple(x_scale.shape)} with strides {x_scale.stride()}; expected {shape} with "
            f"strides {strides}, as returned by `linear.quantise` for groups of {block[1]} columns"
        )


def check_step(block_k: int, block: tuple[int, int] | None) -> None:
    """Raise ValueError if a step of `block_k` columns multiplies columns of several blocks, because a step
    uses one scale per weight row."""
    if block is not None and block[1] % block_k:
        raise ValueError(
            f"plan has block_k {block_k}; weights with one scale per block of {block[1]} columns need a "
            "block_k that divides this number of columns"
        )


@triton.jit
def scale_offsets(
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
