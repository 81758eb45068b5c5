# mypy: allow-untyped-defs
"""Implements the router of a mixture-of-experts layer, which computes the RMSNorm and the router's logits,
and chooses the top-k experts.

`route` is for few tokens and makes one launch. Several programs per token compute parts of the logits, and
the last program to finish chooses the token's experts. `route_many` is for many tokens and makes three
launches. The first computes the norm. The second computes the logits on the tensor cores and, if there are
few tiles, divides the sums over the hidden size into parts. The third adds the parts in a fixed order,
chooses the experts, and counts each expert's choices.

Both functions can also count how many tokens have chosen each expert, with atomic integer additions, so that
the totals do not depend on timing.

The input is normalised in float32 and rounded once to its dtype. The logits are the products of the rounded
input with the router's rows, summed in float32 and not rounded. Experts are ordered by decreasing logit, and
for equal logits by increasing id, as in `reference.route`. A NaN counts as the lowest logit, so that every
token gets top_k distinct experts, whatever its logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import ChoiceCount
from kernels.limits import LARGEST_ROW, MAX_EXPERTS, MAX_TOP_K
from kernels.triton import fused
from kernels.triton.linear_rows import Workspace

_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)

_PROGRAMS = 128
"""Number of programs per `route_many` kernel, given enough tokens. It is close to the number of
multiprocessors of an H100 or H200, but fixed, so that results do not depend on the GPU."""

_LINES = 2
"""Number of 128-byte cache lines that `route_many` prefetches per router row."""

_MAX_SPLITS = 16
"""Maximum number of parts into which each logit's sum is divided."""


@dataclass(frozen=True, slots=True)
class Routed:
    """The normalised tokens and their chosen experts."""

    normed: torch.Tensor
    """The normalised input, in the input's dtype or in e4m3: [tokens, hidden]."""
    scales: torch.Tensor | None
    """Scales of e4m3 values: [tokens, 1] or [tokens, groups] float32, or None if `normed` is not
    quantised."""
    chosen: torch.Tensor
    """Ids of the chosen experts: [tokens, top_k] int32."""
    weights: torch.Tensor
    """Routing weights: [tokens, top_k] float32."""
    places: torch.Tensor | None = None
    """For each choice, how many earlier tokens in the same block chose the same expert: [tokens, top_k]
    int32. Only `route_many` returns `places` and `counts`."""
    counts: torch.Tensor | None = None
    """Number of tokens routed to each expert, for each block of `block_tokens` tokens: [blocks, experts
    rounded up to a power of two] int32."""


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
    group: int = 0,
    count: ChoiceCount | None = None,
    pdl: bool = True,
) -> Routed:
    """Normalise a few tokens, `x [tokens, hidden]`, and choose their experts, in one launch. x must be
    contiguous.

    router: `[experts, hidden]` of x's dtype.
    normalised: whether the softmax covers only the chosen experts' logits (so the weights sum to one) or all
      experts' logits.
    values: dtype of the normalised values if they are quantised, or None for x's dtype.
    group: if not 0, quantised values have one scale per `group` columns.
    workspace: contains at least one counter per token.
    count: if given, per-expert token counts that this call increments.
    """
    tokens, hidden = x.shape
    experts = _check(x, norm_weight, router, top_k)
    if tokens > len(workspace.arrived):
        raise ValueError(f"x has {tokens} tokens; route supports up to {len(workspace.arrived)}")
    routed = _allocate(x, top_k, values, group)
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
        None if count is None else count.live,
        None if count is None else count.totals,
        eps,
        HIDDEN=hidden,
        EXPERTS=experts,
        TOP_K=top_k,
        BLOCK=block,
        BLOCK_E=block_e,
        ALL=triton.next_power_of_2(experts),
        QUANTISE=values is not None,
        GROUP=group,
        NORMALISED=normalised,
        COUNT=count is not None,
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
    group: int = 0,
    count: ChoiceCount | None = None,
    pdl: bool = True,
) -> Routed:
    """Compute `route` for any number of tokens, in three launches. The result includes the counts needed by
    `experts_many.sort`."""
    tokens, hidden = x.shape
    experts = _check(x, norm_weight, router, top_k)
    device, every = x.device, max(16, triton.next_power_of_2(experts))
    block = block_tokens(tokens, experts)
    chosen = torch.empty((tokens, top_k), dtype=torch.int32, device=device)
    places = torch.empty_like(chosen)
    weights = torch.empty((tokens, top_k), dtype=torch.float32, device=device)
    counts = torch.empty((triton.cdiv(tokens, block), every), dtype=torch.int32, device=device)
    scales = None
    if values is None:
        normed = quantised = fused.rms_norm(x, norm_weight, eps, pdl=pdl)
    else:
        normed, quantised, scales = fused.rms_norm_both(
            x, norm_weight, eps, values=values, group=group, pdl=pdl
        )
    routed = Routed(quantised, scales, chosen, weights, places, counts)
    if not tokens:
        return routed
    columns = min(every, 128)
    across = every // columns
    # With few tokens, use small tiles, so that more programs read the router's matrix concurrently.
    rows = min(128, max(16, triton.next_power_of_2(triton.cdiv(tokens * across, 16))))
    tiles = triton.cdiv(tokens, rows) * across
    splits = max(1, min(_MAX_SPLITS, _PROGRAMS // triton.next_power_of_2(tiles)))
    parts = torch.empty((splits, tokens, every), dtype=torch.float32, device=device)
    _logits[(tiles * splits,)](
        normed,
        router,
        parts,
        tokens,
        HIDDEN=hidden,
        EXPERTS=experts,
        SPLITS=splits,
        ROWS=rows,
        COLUMNS=columns,
        BLOCK_K=64,
        LINES=_LINES,
        ALL=every,
        PDL=pdl,
        num_warps=8 if rows * columns > 8192 else 4,
        num_stages=3,
        launch_pdl=pdl,
    )
    _choose[(len(counts),)](
        parts,
        chosen,
        weights,
        places,
        counts,
        None if count is None else count.live,
        None if count is None else count.totals,
        tokens,
        EXPERTS=experts,
        SPLITS=splits,
        TOP_K=top_k,
        ROWS=block,
        ALL=every,
        NORMALISED=normalised,
        COUNT=count is not None,
        PDL=pdl,
        num_warps=min(16, max(4, block * every // 256)),
        launch_pdl=pdl,
    )
    return routed


def block_tokens(tokens: int, experts: int) -> int:
    """Return the number of tokens per block of `Routed.counts`."""
    largest = min(64, max(4, 8192 // triton.next_power_of_2(experts)))
    return max(4, min(largest, triton.next_power_of_2(triton.cdiv(tokens, _PROGRAMS))))


def _allocate(x: torch.Tensor, top_k: int, values: torch.dtype | None, group: int) -> Routed:
    tokens, device = len(x), x.device
    normed, scales = torch.empty_like(x), None
    if values is not None:
        normed, scales = fused.allocate_quantised(x, x.shape[1], values, group)
    return Routed(
        normed,
        scales,
        torch.empty((tokens, top_k), dtype=torch.int32, device=device),
        torch.empty((tokens, top_k), dtype=torch.float32, device=device),
    )


def _check(x: torch.Tensor, norm_weight: torch.Tensor, router: torch.Tensor, top_k: int) -> int:
    """Check the router's arguments and return the number of experts. Raises ValueError if shapes, dtypes or
    strides do not match."""
    experts, hidden = router.shape
    if x.shape[1:] != (hidden,) or norm_weight.shape != (hidden,):
        raise ValueError(
            f"x is {tuple(x.shape)}, norm_weight {tuple(norm_weight.shape)} and router "
            f"{tuple(router.shape)}; their last dimensions must be equal"
        )
    if router.dtype != x.dtype:
        raise ValueError(f"router is {router.dtype} and x is {x.dtype}; their dtypes must be equal")
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
def _prefetch(at):
    """Prefetch into L2 the 128-byte cache lines that contain the addresses `at`."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit(do_not_specialize_on_alignment=["live"])
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
    live,
    totals,
    eps,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    ALL: tl.constexpr,
    QUANTISE: tl.constexpr,
    GROUP: tl.constexpr,
    NORMALISED: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the logits of BLOCK_E experts for one token. The last program to finish a token chooses that
    token's experts."""
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
            values, scale = fused.fp8_row(row, BLOCK, GROUP)
            tl.store(normed + at, values.to(normed.dtype.element_ty), mask=inside)
            fused.store_scale(scale, scales, token, tl.num_programs(0) // tiles, HIDDEN, BLOCK, GROUP)
        else:
            tl.store(normed + at, rounded, mask=inside)
    of_token = logits + token * EXPERTS
    tl.store(of_token + expert, tl.sum(w.to(tl.float32) * row[None, :], axis=1), mask=expert < EXPERTS)

    # All threads must have stored their logits before any thread increments the counter.
    tl.debug_barrier()
    if tl.atomic_add(arrived + token, 1, sem="acq_rel", scope="gpu") == tiles - 1:
        tl.store(arrived + token, 0)
        index = tl.arange(0, ALL)
        lowest = float("-inf")
        logit = tl.load(of_token + index, mask=index < EXPERTS, other=lowest, cache_modifier=".cg")
        comparable = tl.where(logit == logit, logit, lowest)
        # An expert's rank is the number of experts that precede it in the order of choice.
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
        if COUNT:
            counted = best & (tl.load(live + token) >= 0)
            tl.atomic_add(totals + index, tl.full([ALL], 1, tl.int64), mask=counted, sem="relaxed")


@triton.jit(do_not_specialize=["tokens"])
def _logits(
    normed,
    router,
    parts,
    tokens,
    HIDDEN: tl.constexpr,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LINES: tl.constexpr,
    ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute the logits of ROWS tokens and COLUMNS experts. The sum for each logit is divided into SPLITS
    parts; each program computes one."""
    steps: tl.constexpr = (HIDDEN + BLOCK_K - 1) // BLOCK_K
    length: tl.constexpr = (steps + SPLITS - 1) // SPLITS * BLOCK_K
    split = tl.program_id(0) % SPLITS
    tile = tl.program_id(0) // SPLITS
    token = tile // (ALL // COLUMNS) * ROWS + tl.arange(0, ROWS)
    index = tile % (ALL // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        # Read the router's weights from memory while the norm is still running.
        line: tl.constexpr = 128 * 8 // router.dtype.element_ty.primitive_bitwidth
        column = split * length + tl.arange(0, LINES) * line
        at = tl.minimum(index, EXPERTS - 1)[:, None] * HIDDEN + tl.minimum(column, HIDDEN - 1)[None, :]
        _prefetch(router + at)
        tl.extra.cuda.gdc_wait()
    xs = normed + tl.minimum(token, tokens - 1).to(tl.int64)[:, None] * HIDDEN + k[None, :]
    ws = router + tl.minimum(index, EXPERTS - 1)[:, None] * HIDDEN + k[None, :]
    logit = tl.zeros([ROWS, COLUMNS], tl.float32)
    for at in tl.range(split * length, tl.minimum((split + 1) * length, HIDDEN), BLOCK_K):
        if HIDDEN % BLOCK_K:
            inside = (at + k < HIDDEN)[None, :]
            part = tl.load(xs + at, mask=inside, other=0.0)
            w = tl.load(ws + at, mask=inside, other=0.0)
        else:
            part = tl.load(xs + at)
            w = tl.load(ws + at)
        logit = tl.dot(part, tl.trans(w), logit, input_precision="ieee")
    to = (split.to(tl.int64) * tokens + token)[:, None] * ALL + index[None, :]
    tl.store(parts + to, logit, mask=(token < tokens)[:, None])


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["live"])
def _choose(
    parts,
    chosen,
    weights,
    places,
    counts,
    live,
    totals,
    tokens,
    EXPERTS: tl.constexpr,
    SPLITS: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    ALL: tl.constexpr,
    NORMALISED: tl.constexpr,
    COUNT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Choose the experts for a block of ROWS tokens and count each expert's choices."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    index = tl.arange(0, ALL)
    inside = (token < tokens)[:, None]
    logit = tl.zeros([ROWS, ALL], tl.float32)
    for split in tl.static_range(SPLITS):
        of_token = (tl.cast(split, tl.int64) * tokens + token)[:, None] * ALL
        logit += tl.load(parts + of_token + index[None, :], mask=inside, other=0.0)
    # Replace NaN, which fails the comparison, with the lowest logit. Adding zero makes a negative zero
    # positive.
    logit = tl.where(logit > _LOWEST, logit, _LOWEST) + 0.0
    # Map the logits to integers that sort in the same order, because the GPU can find the largest integer
    # among 32 threads in one instruction.
    key = logit.to(tl.int32, bitcast=True)
    key = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    # Padding and experts already chosen get the lowest value, which is below that of experts with a NaN
    # logit.
    excluded = -0x80000000
    key = tl.where((index < EXPERTS)[None, :], key, excluded)
    rank = tl.full([ROWS, ALL], TOP_K, tl.int32)
    for turn in tl.static_range(TOP_K):
        highest = tl.max(key, axis=1)
        best = tl.min(tl.where(key == highest[:, None], index[None, :], ALL), axis=1)
        now = index[None, :] == best[:, None]
        rank = tl.where(now, turn, rank)
        key = tl.where(now, excluded, key)
    picked = rank < TOP_K
    counted = picked if NORMALISED else (index < EXPERTS)[None, :]
    top = tl.max(tl.where(rank == 0, logit, float("-inf")), axis=1)
    share = tl.where(counted, tl.exp(logit - top[:, None]), 0.0)
    share = share / tl.sum(share, axis=1)[:, None]
    picked = picked & inside
    to = token.to(tl.int64)[:, None] * TOP_K + rank
    tl.store(chosen + to, tl.broadcast_to(index[None, :], [ROWS, ALL]), mask=picked)
    tl.store(weights + to, share, mask=picked)
    taken = picked.to(tl.int32)
    tl.store(places + to, tl.cumsum(taken, axis=0) - taken, mask=picked)
    tl.store(counts + tl.program_id(0) * ALL + index, tl.sum(taken, axis=0))
    if COUNT:
        padding = tl.load(live + token, mask=token < tokens, other=-1) < 0
        added = tl.sum(tl.where(padding[:, None], 0, taken), axis=0)
        tl.atomic_add(totals + index, added.to(tl.int64), mask=added > 0, sem="relaxed")
