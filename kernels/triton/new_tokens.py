# mypy: allow-untyped-defs
"""Parts of kernels that take heads out of the product of q, k and v: RMSNorm of a head, RoPE, and what a
cache keeps of it. Each rounds where `fused.rope_cache_write` does.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.fused import fp8_scale


@triton.jit
def angles(line, HEAD_DIM: tl.constexpr):
    """Cosines and sines `[HEAD_DIM]` of a line of `kernels.rope.cos_sin_table`, the sines of the first half
    negative: a head turned is `head × cos + swapped × sin`, where its halves have changed places."""
    half: tl.constexpr = HEAD_DIM // 2
    dim = tl.arange(0, HEAD_DIM)
    cos = tl.load(line + dim % half)
    sin = tl.load(line + half + dim % half)
    return cos, tl.where(dim < half, -sin, sin)


@triton.jit
def turned(row, head, mask, cos, sin, gain, eps, HEAD_DIM: tl.constexpr, NORM: tl.constexpr):
    """Heads `head [n]` of a token's row, normed with `gain [HEAD_DIM]` and rotated: `[n, HEAD_DIM]`
    float32."""
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
    """One head `[1, n]` float32 as the cache keeps it, and its scale, 1.0 where the cache has none."""
    scale = 1.0
    if SCALED:
        scale, inverse = fp8_scale(tl.max(tl.abs(head)))
        head = head * inverse
    return head.to(cache.dtype.element_ty), scale
