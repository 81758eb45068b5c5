# mypy: allow-untyped-defs
"""The router of a mixture-of-experts layer, which computes the RMSNorm and the router's logits, and chooses
the top-k experts.

`route` makes one launch, for few tokens. Several programs per token compute parts of the logits, and the
program that finishes last chooses the token's experts. `route_many` is for many tokens. It computes the norm
in a separate launch, and then each program computes all logits of a tile of tokens on the tensor cores.

The input is normalised in float32 and rounded once to its dtype. Its products with the router's rows are
summed in float32, and these logits are not rounded. Experts are ordered by decreasing logit, and for equal
logits by increasing id, as in `reference.route`. A NaN counts as the lowest logit, so that every token has
top_k distinct experts for any input.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.limits import LARGEST_ROW, MAX_EXPERTS, MAX_TOP_K
from kernels.triton import fused, linear
from kernels.triton.linear_rows import Workspace

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@dataclass(frozen=True, slots=True)
class Routed:
    """The normalised tokens and the experts that they have chosen."""

    normed: torch.Tensor
    """The normalised input: [tokens, hidden], in its dtype or e4m3."""
    scales: torch.Tensor | None
    """Scales of e4m3 values: [tokens, 1] float32; None if `normed` is not quantised."""
    chosen: torch.Tensor
    """Expert ids: [tokens, top_k] int32."""
    weights: torch.Tensor
    """Routing weights: [tokens, top_k] float32."""


def route(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    top_k: int,
    *,
    normalised: bool,
    workspace: Workspace,
    values: torch.dtype | None = None,
    pdl: bool = True,
) -> Routed:
    """Normalise a few tokens, `x [tokens, hidden]`, and choose their experts, in one launch. x must be
    contiguous.

    router: `[experts, hidden]` of x's dtype. normalised: if true, the softmax covers only the chosen experts'
    logits, so that the weights add up to one; otherwise, it covers the logits of all experts. values: dtype
    of the normalised values if they are quantised, or None for x's dtype. workspace: contains at least one
    counter per token.
    """
    tokens, hidden = x.shape
    experts = _check(x, norm_weight, router, top_k)
    if tokens > len(workspace.arrived):
        raise ValueError(f"x has {tokens} tokens; route supports up to {len(workspace.arrived)}")
    routed = _allocate(x, top_k, values)
    if not tokens:
        return routed
    block = triton.next_power_of_2(hidden)
    block_e = min(4, triton.next_power_of_2(experts)) if block <= 8192 else 1
    logits = torch.empty((tokens, experts), dtype=torch.float32, device=x.device)
    _route[(tokens * triton.cdiv(experts, block_e),)](
        x,
        norm_weight,
        router,
        logits,
        workspace.arrived,
        routed.normed,
        routed.scales,
        routed.chosen,
        routed.weights,
        eps,
        HIDDEN=hidden,
        EXPERTS=experts,
        TOP_K=top_k,
        BLOCK=block,
        BLOCK_E=block_e,
        ALL=triton.next_power_of_2(experts),
        QUANTISE=values is not None,
        NORMALISED=normalised,
        PDL=pdl,
        num_warps=min(max(block * block_e // 1024, 1), 16),
        launch_pdl=pdl,
    )
    return routed


def route_many(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    router: torch.Tensor,
    top_k: int,
    *,
    normalised: bool,
    values: torch.dtype | None = None,
    pdl: bool = True,
) -> Routed:
    """Compute `route` for any number of tokens, in two launches, or in three if the normalised tokens are
    quantised."""
    tokens, hidden = x.shape
    experts = _check(x, norm_weight, router, top_k)
    routed = _allocate(x, top_k, values)
    if not tokens:
        return routed
    normed = fused.rms_norm(x, norm_weight, eps, pdl=pdl)
    every = max(16, triton.next_power_of_2(experts))
    # With few tokens, tiles are small, so that more programs read the router's matrix concurrently.
    rows = 64 if tokens > 1024 else 16
    _route_tile[(triton.cdiv(tokens, rows),)](
        normed,
        router,
        routed.chosen,
        routed.weights,
        tokens,
        HIDDEN=hidden,
        EXPERTS=experts,
        TOP_K=top_k,
        ROWS=rows,
        BLOCK_K=min(64, max(16, triton.next_power_of_2(hidden))),
        ALL=every,
        TOP_K_BLOCK=triton.next_power_of_2(top_k),
        NORMALISED=normalised,
        PDL=pdl,
        num_warps=8 if every > 128 else 4,
        num_stages=3,
        launch_pdl=pdl,
    )
    if values is None:
        return Routed(normed, None, routed.chosen, routed.weights)
    quantised, scales = linear.quantise(normed, values=values, pdl=pdl)
    return Routed(quantised, scales, routed.chosen, routed.weights)


def _allocate(x: torch.Tensor, top_k: int, values: torch.dtype | None) -> Routed:
    tokens, device = len(x), x.device
    return Routed(
        torch.empty(x.shape, dtype=values or x.dtype, device=device),
        None if values is None else torch.empty((tokens, 1), dtype=torch.float32, device=device),
        torch.empty((tokens, top_k), dtype=torch.int32, device=device),
        torch.empty((tokens, top_k), dtype=torch.float32, device=device),
    )


def _check(x: torch.Tensor, norm_weight: torch.Tensor, router: torch.Tensor, top_k: int) -> int:
    """Return the number of experts. Raises ValueError if the arguments do not match."""
    experts, hidden = router.shape
    if x.shape[1:] != (hidden,) or norm_weight.shape != (hidden,):
        raise ValueError(
            f"x is {tuple(x.shape)}, norm_weight {tuple(norm_weight.shape)} and router "
            f"{tuple(router.shape)}; their last dimensions must be equal"
        )
    if router.dtype != x.dtype:
        raise ValueError(f"router is {router.dtype} and x is {x.dtype}; they must be the same")
    if not x.is_contiguous() or not router.is_contiguous():
        raise ValueError(f"x has strides {x.stride()} and router {router.stride()}; make them contiguous")
    if hidden > LARGEST_ROW:
        raise ValueError(f"hidden is {hidden}; the largest supported width is {LARGEST_ROW}")
    if experts > MAX_EXPERTS or not 1 <= top_k <= min(experts, MAX_TOP_K):
        raise ValueError(
            f"top_k is {top_k} of {experts} experts; the kernels support up to {MAX_TOP_K} of {MAX_EXPERTS}"
        )
    return experts


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _route(
    x,
    norm_weight,
    router,
    logits,
    arrived,
    normed,
    scales,
    chosen,
    weights,
    eps,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ALL: tl.constexpr,
    QUANTISE: tl.constexpr,
    NORMALISED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the logits of BLOCK_E experts for one token. The program that finishes a token last chooses its
    experts."""
    tiles: tl.constexpr = (EXPERTS + BLOCK_E - 1) // BLOCK_E
    token = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    column = tl.arange(0, BLOCK)
    inside = column < HIDDEN
    expert = tile * BLOCK_E + tl.arange(0, BLOCK_E)
    of_expert = tl.minimum(expert, EXPERTS - 1)[:, None] * HIDDEN + column[None, :]
    w = tl.load(router + of_expert, mask=inside[None, :], other=0.0)
    gain = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = token.to(tl.int64) * HIDDEN + column
    row = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(row * row, axis=0) / HIDDEN
    rounded = (row * tl.rsqrt(mean + eps) * gain).to(x.dtype.element_ty)
    row = rounded.to(tl.float32)
    if tile == 0:
        if QUANTISE:
            scale, inverse = fused.fp8_scale(tl.max(tl.abs(row), axis=0))
            tl.store(normed + at, (row * inverse).to(normed.dtype.element_ty), mask=inside)
            tl.store(scales + token, scale)
        else:
            tl.store(normed + at, rounded, mask=inside)
    of_token = logits + token * EXPERTS
    tl.store(of_token + expert, tl.sum(w.to(tl.float32) * row[None, :], axis=1), mask=expert < EXPERTS)

    # All threads must have stored their logits before one thread increments the counter.
    tl.debug_barrier()
    if tl.atomic_add(arrived + token, 1, sem="acq_rel", scope="gpu") == tiles - 1:
        tl.store(arrived + token, 0)
        index = tl.arange(0, ALL)
        lowest = float("-inf")
        logit = tl.load(of_token + index, mask=index < EXPERTS, other=lowest, cache_modifier=".cg")
        comparable = tl.where(logit == logit, logit, lowest)
        # The rank of an expert is the number of experts that are chosen before it.
        rank = tl.zeros([ALL], tl.int32)
        step: tl.constexpr = min(ALL, 128)
        for first in tl.static_range(0, ALL, step):
            other = first + tl.arange(0, step)
            value = comparable
            if step < ALL:
                value = tl.load(of_token + other, mask=other < EXPERTS, other=lowest, cache_modifier=".cg")
                value = tl.where(value == value, value, lowest)
            higher = value[None, :] > comparable[:, None]
            same = value[None, :] == comparable[:, None]
            before = higher | (same & (other[None, :] < index[:, None]))
            rank += tl.sum(before.to(tl.int32), axis=1)
        best = rank < TOP_K
        counted = best if NORMALISED else index < EXPERTS
        share = tl.exp(logit - tl.max(logit, axis=0))
        share = share / tl.sum(tl.where(counted, share, 0.0), axis=0)
        to = token * TOP_K + rank
        tl.store(chosen + to, index, mask=best)
        tl.store(weights + to, share, mask=best)


@triton.jit(do_not_specialize=["tokens"])
def _route_tile(
    normed,
    router,
    chosen,
    weights,
    tokens,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALL: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    NORMALISED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute all logits of ROWS tokens and choose their experts, one after another."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = tl.arange(0, ALL)
    k = tl.arange(0, BLOCK_K)
    live = token < tokens
    xs = normed + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    ws = router + tl.minimum(index, EXPERTS - 1)[:, None] * HIDDEN + k[None, :]
    logit = tl.zeros([ROWS, ALL], tl.float32)
    for at in tl.range(0, HIDDEN, BLOCK_K):
        if HIDDEN % BLOCK_K:
            inside = (at + k < HIDDEN)[None, :]
            part = tl.load(xs + at, mask=inside, other=0.0)
            w = tl.load(ws + at, mask=inside, other=0.0)
        else:
            part = tl.load(xs + at)
            w = tl.load(ws + at)
        logit = tl.dot(part, tl.trans(w), logit, input_precision="ieee")
    # Padding and experts that are already chosen get the lowest value of all, below that of experts whose
    # logit is NaN.
    gone = float("-inf")
    left = tl.where(logit > _LOWEST, logit, _LOWEST)
    left = tl.where((index < EXPERTS)[None, :], left, gone)
    top = tl.max(left, axis=1)[:, None]
    place = tl.arange(0, TOP_K_BLOCK)
    picked = tl.zeros([ROWS, TOP_K_BLOCK], tl.int32)
    share = tl.zeros([ROWS, TOP_K_BLOCK], tl.float32)
    total = tl.sum(tl.exp(left - top), axis=1)
    for turn in tl.static_range(TOP_K):
        highest, best = tl.max(left, axis=1, return_indices=True)  # the first index wins a tie
        now = (place == turn)[None, :]
        picked = tl.where(now, best[:, None], picked)
        share = tl.where(now, tl.exp(highest[:, None] - top), share)
        left = tl.where(index[None, :] == best[:, None], gone, left)
    if NORMALISED:
        total = tl.sum(share, axis=1)
    to = token.to(tl.int64)[:, None] * TOP_K + place[None, :]
    stored = live[:, None] & (place < TOP_K)[None, :]
    tl.store(chosen + to, picked, mask=stored)
    tl.store(weights + to, share / total[:, None], mask=stored)
