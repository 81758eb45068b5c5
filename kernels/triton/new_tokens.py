# mypy: allow-untyped-defs
"""Triton functions for the heads in the qkv GEMM's result: QK-norm, RoPE, and conversion to the cache's
dtype. They round at the same points as `fused.rope_cache_write`."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.fused import fp8_scale


@triton.jit
def angles(line, HEAD_DIM: tl.constexpr):
    """Return one position's cosines and sines `[HEAD_DIM]` from a row of `kernels.rope.cos_sin_table`. The
    sines of the first half are negated. The rotated head is `head × cos + swapped × sin`, where `swapped` is
    the head with its two halves exchanged."""
    half: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, HEAD_DIM)
    cos = tl.load(line + dim % half)
    sin = tl.load(line + half + dim % half)
    return cos, tl.where(dim < half, -sin, sin)


@triton.jit
def turned(row, head, mask, cos, sin, gain, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Return the rotated heads at indices `head [n]` of a token's qkv row: `[n, HEAD_DIM]` float32. With
    NORM, the heads are first normalised with `gain [HEAD_DIM]`."""
    dim = tl.arange(0, HEAD_DIM)
    swap = (dim + HEAD_DIM // 2) % HEAD_DIM
    at = row + head[:, None] * HEAD_DIM
    if NORM:
        own_gain = tl.load(gain + dim)[None, :].to(tl.float32)
        swapped_gain = tl.load(gain + swap)[None, :].to(tl.float32)
    own = tl.load(at + dim[None, :], mask=mask, other=0.0).to(tl.float32)
    swapped = tl.load(at + swap[None, :], mask=mask, other=0.0).to(tl.float32)
    if NORM:
        inverse = tl.rsqrt(tl.sum(own * own, axis=1) / HEAD_DIM + eps)[:, None]
        dtype: tl.constexpr = row.dtype.element_ty
        own = (own * inverse * own_gain).to(dtype).to(tl.float32)
        swapped = (swapped * inverse * swapped_gain).to(dtype).to(tl.float32)
    return own * cos[None, :] + swapped * sin[None, :]


@triton.jit
def rounded(head, cache, SCALED: tl.constexpr):
    """Convert one head, `[1, n]` float32, to the cache's dtype. Return the converted head and its scale,
    which is 1.0 if the cache has no scales."""
    scale = 1.0
    if SCALED:
        scale, inverse = fp8_scale(tl.max(tl.abs(head)))
        head = head * inverse
    return head.to(cache.dtype.element_ty), scale
