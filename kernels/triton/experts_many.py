# mypy: allow-untyped-defs
"""Computes the experts of many tokens. The choices are sorted by expert on the device, and each GEMM is one
launch for the tokens of all experts.

`sort` is the second half of a stable counting sort. The router has counted the choices of each expert in
each block of tokens. One launch adds the counts of all blocks and writes each choice to its position. `up`
reads the tokens in the sorted order and computes SwiGLU. `down` writes its results in the original order of
the choices. `combine` multiplies the results by their routing weights, and adds each token's results, in the
order of its choices, and the residual. No kernel uses atomic additions, so results do not depend on timing.

The GEMMs have a fixed number of programs, which read each expert's number of tokens on the device and compute
the tiles one after another. No launch depends on the routing, so all launches can be captured in a CUDA
graph. The weight is the 64-row operand of the tensor-core instruction, so small tiles suffice for experts
with few tokens.

A rank may have only some of the experts. The choices of all experts are sorted, but the GEMMs compute only
the tiles of the rank's experts, and `combine` skips the results of all other experts.

Results are rounded as in the reference, except that the residual is added to the float32 sum before the sum
is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.experts_plans import ExpertsPlan
from kernels.triton.experts_route import Routed, block_tokens
from kernels.triton.linear_rows import check_results, gated, weight_rows

_SUMMED = 1 << 14
"""Maximum number of counts that a `sort` program adds up at a time."""

_COMBINED_COLUMNS = 1024
"""Number of columns per program of `combine`."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """The choices of all tokens, sorted by expert and then by token. Choice `i` of a token has the number
    token × top_k + i."""

    order: torch.Tensor
    """Numbers of the choices: [tokens × top_k] int32."""
    begins: torch.Tensor
    """Each expert's first position in `order`, followed by the number of choices: [experts + 1] int32."""


@dataclass(frozen=True, slots=True)
class ComputedChoices:
    """The choices whose experts are on this rank, if the rank has only some of the experts."""

    chosen: torch.Tensor
    """Expert ids: [tokens, top_k] int32."""
    first: int
    """First expert of this rank."""
    experts: int
    """Number of experts of this rank."""


def sort(routed: Routed, experts: int, *, pdl: bool = True) -> Sorted:
    """Sort the choices of `experts_route.route_many`; the experts of a token are distinct."""
    if routed.places is None or routed.counts is None:
        raise ValueError("routed has no counts; route the tokens with route_many")
    tokens, top_k = routed.chosen.shape
    device = routed.chosen.device
    order = torch.empty(tokens * top_k, dtype=torch.int32, device=device)
    begins = torch.empty(experts + 1, dtype=torch.int32, device=device)
    blocks, every = routed.counts.shape
    block = block_tokens(tokens, experts)
    _place[(max(blocks, 1),)](
        routed.chosen,
        routed.places,
        routed.counts,
        order,
        begins,
        tokens * top_k,
        blocks,
        EXPERTS=experts,
        CHOICES=block * top_k,
        BLOCK=triton.next_power_of_2(block * top_k),
        SUMMED=min(triton.next_power_of_2(max(blocks, 1)), _SUMMED // every),
        ALL=every,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return Sorted(order, begins)


def up(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    by_expert: Sorted,
    top_k: int,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    plan: ExpertsPlan,
    multiprocessors: int,
    *,
    first: int | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Return `silu(gate) × up` of the choices in the order of `by_expert`: `[tokens × top_k, intermediate]`
    in the model's dtype.

    x, x_scale, weight, weight_scale, dtype: as in `experts_few.up`. multiprocessors: number of the device's
    multiprocessors. first: if given, `weight` has only the experts from this one onwards, and the results of
    all other experts are undefined.
    """
    columns = weight.shape[1] // 2
    out = torch.empty((len(x) * top_k, columns), dtype=dtype or x.dtype, device=x.device)
    _launch(x, x_scale, by_expert, weight, weight_scale, out, plan, multiprocessors, pdl, top_k, first)
    return out


def down(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    by_expert: Sorted,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    plan: ExpertsPlan,
    multiprocessors: int,
    *,
    first: int | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Return `down(x)` in the order of the choices: `[tokens × top_k, hidden]` in the model's dtype.

    x: `[tokens × top_k, intermediate]` in the order of `by_expert`, in the weight's dtype; if it is
    quantised, x_scale is `[tokens × top_k, 1]`. weight: `[experts, hidden, intermediate]`; weight_scale:
    `[experts, hidden]`. first: as in `up`.
    """
    out = torch.empty((len(x), weight.shape[1]), dtype=dtype or x.dtype, device=x.device)
    _launch(x, x_scale, by_expert, weight, weight_scale, out, plan, multiprocessors, pdl, None, first)
    return out


def combine(
    results: torch.Tensor,
    weights: torch.Tensor,
    *,
    residual: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    computed: ComputedChoices | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Return the sum of each token's `results [tokens × top_k, hidden]` times its routing `weights [tokens,
    top_k]` float32, plus the residual: `[tokens, hidden]` in the dtype of `results`. The sum is written to
    `out` if given, which may be the residual. computed: the results that have been computed; None means
    all."""
    tokens, top_k = weights.shape
    hidden = results.shape[1]
    out = torch.empty((tokens, hidden), dtype=results.dtype, device=results.device) if out is None else out
    check_results(out, residual, (tokens, hidden))
    if tokens:
        block = min(_COMBINED_COLUMNS, triton.next_power_of_2(hidden))
        _combine[(tokens, triton.cdiv(hidden, block))](
            results,
            weights,
            None if computed is None else computed.chosen,
            residual,
            out,
            hidden,
            0 if computed is None else computed.first,
            TOP_K=top_k,
            EXPERTS=0 if computed is None else computed.experts,
            PARTIAL=computed is not None,
            BLOCK=block,
            RESIDUAL=residual is not None,
            PDL=pdl,
            num_warps=max(1, block // 256),
            launch_pdl=pdl,
        )
    return out


def _launch(
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    by_expert: Sorted,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    out: torch.Tensor,
    plan: ExpertsPlan,
    multiprocessors: int,
    pdl: bool,
    top_k: int | None,
    first: int | None,
) -> None:
    """Launch `_grouped` for `up`, or for `down` if top_k is None."""
    experts, n, k = weight.shape
    if x.shape[1] != k or not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; their last dimensions must be equal, "
            "and both contiguous"
        )
    every = len(by_expert.begins) - 1
    if len(by_expert.order) != len(out) or (every != experts if first is None else every < first + experts):
        raise ValueError(
            f"the choices are {len(by_expert.order)} of {every} experts; needs {len(out)} of {experts}"
        )
    if not len(x):
        return
    _grouped[(plan.programs * multiprocessors,)](
        x,
        x_scale,
        by_expert.order,
        by_expert.begins,
        weight,
        weight_scale,
        out,
        first or 0,
        EXPERTS=experts,
        COLUMNS=out.shape[1],
        N=n,
        K=k,
        TOP_K=top_k or 1,
        UP=top_k is not None,
        ROWS=plan.rows,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        ALL=triton.next_power_of_2(experts),
        SCALED=weight_scale is not None,
        PDL=pdl,
        num_warps=plan.warps,
        num_stages=plan.stages,
        maxnreg=plan.max_registers,
        launch_pdl=pdl,
    )


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["total", "blocks"])
def _place(
    chosen,
    places,
    counts,
    order,
    begins,
    total,
    blocks,
    EXPERTS: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED: tl.constexpr,
    ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the CHOICES choices of a block of tokens to their sorted positions. Every program adds up the
    counts of all blocks, SUMMED blocks at a time."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.arange(0, ALL)
    at = tl.arange(0, BLOCK)
    choice = tl.program_id(0) * CHOICES + at
    inside = (at < CHOICES) & (choice < total)
    expert = tl.load(chosen + choice, mask=inside, other=0)
    place = tl.load(places + choice, mask=inside, other=0)
    totals = tl.zeros([ALL], tl.int32)
    earlier = tl.zeros([ALL], tl.int32)
    for first in tl.range(0, blocks, SUMMED):
        block = first + tl.arange(0, SUMMED)
        count = tl.load(
            counts + block[:, None] * ALL + index[None, :], mask=(block < blocks)[:, None], other=0
        )
        totals += tl.sum(count, axis=0)
        earlier += tl.sum(tl.where((block < tl.program_id(0))[:, None], count, 0), axis=0)
    ends = tl.cumsum(totals, axis=0)
    if tl.program_id(0) == 0:
        tl.store(begins, 0)
        tl.store(begins + 1 + index, ends, mask=index < EXPERTS)
    place += tl.gather(ends - totals + earlier, expert, 0)
    tl.store(order + place, choice, mask=inside)


@triton.jit
def _tile(number, order, begin, end, group_ends, ROWS: tl.constexpr, across: tl.constexpr):
    """Return the expert of a tile, its number across the weight's rows, the sorted positions of its ROWS
    choices, the expert's last position, and the numbers of the choices. Rows past the expert's last choice
    repeat that choice. The arguments are those of `_grouped` after its wait; the results of a tile past the
    last one are arbitrary."""
    index = tl.arange(0, begin.shape[0])
    group = number // across
    expert = tl.sum((group_ends <= group).to(tl.int32), axis=0)
    this = index == expert
    groups = (end - begin + ROWS - 1) // ROWS
    last = tl.sum(tl.where(this, end, 0), axis=0) - 1
    first = tl.sum(tl.where(this, begin - (group_ends - groups) * ROWS, 0), axis=0) + group * ROWS
    place = first + tl.arange(0, ROWS)
    choice = tl.load(order + tl.maximum(tl.minimum(place, last), 0))
    return expert, number % across, place, last, choice


@triton.jit(do_not_specialize=["first_expert"])
def _grouped(
    x,
    x_scale,
    order,
    begins,
    weight,
    weight_scale,
    out,
    first_expert,
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ALL: tl.constexpr,
    SCALED: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute tiles of BLOCK_N weight rows by ROWS choices of one expert. With UP, x has one row per token,
    and the result is SwiGLU in the sorted order. Otherwise, x has one row per choice in the sorted order, and
    results are written in the original order of the choices.

    The choices of the next tile, and the scales, are loaded while a tile's products are computed, unless the
    tile's sums need most registers."""
    dtype: tl.constexpr = out.dtype.element_ty
    width: tl.constexpr = BLOCK_N // 2 if UP else BLOCK_N
    across: tl.constexpr = (COLUMNS + width - 1) // width
    early: tl.constexpr = ROWS * BLOCK_N <= 8192
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = tl.arange(0, ALL)
    begin = tl.load(begins + first_expert + index, mask=index < EXPERTS, other=0)
    end = tl.load(begins + first_expert + 1 + index, mask=index < EXPERTS, other=0)
    groups = (end - begin + ROWS - 1) // ROWS
    group_ends = tl.cumsum(groups, axis=0)
    k = tl.arange(0, BLOCK_K)
    tiles = tl.sum(groups, axis=0) * across
    if early:
        following = _tile(tl.program_id(0), order, begin, end, group_ends, ROWS, across)
    for number in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        if early:
            expert, tile, place, last, choice = following
            following = _tile(number + tl.num_programs(0), order, begin, end, group_ends, ROWS, across)
        else:
            expert, tile, place, last, choice = _tile(number, order, begin, end, group_ends, ROWS, across)
        source = choice // TOP_K if UP else tl.minimum(place, last)
        weight_row = weight_rows(tile, COLUMNS, BLOCK_N, UP) + expert.to(tl.int64) * N
        ws = weight + weight_row[:, None] * K + k[None, :]
        xs = x + source.to(tl.int64)[:, None] * K + k[None, :]
        if SCALED and early:
            of_choice = tl.load(x_scale + source)
            of_row = tl.load(weight_scale + weight_row)
        acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
        for at in tl.range(0, K, BLOCK_K):
            if K % BLOCK_K:
                inside = (at + k < K)[None, :]
                w = tl.load(ws + at, mask=inside, other=0.0)
                part = tl.load(xs + at, mask=inside, other=0.0)
            else:
                w = tl.load(ws + at)
                part = tl.load(xs + at)
            acc = tl.dot(w, tl.trans(part), acc, input_precision="ieee")
        if SCALED:
            if not early:
                of_choice = tl.load(x_scale + source)
                of_row = tl.load(weight_scale + weight_row)
            acc = acc * of_choice[None, :] * of_row[:, None]
        column = tile * width + tl.arange(0, width)
        if UP:
            result = gated(acc, dtype).to(dtype)
            to = place
        else:
            result = acc.to(dtype)
            to = choice
        inside = (column < COLUMNS)[:, None] & (place <= last)[None, :]
        tl.store(out + to.to(tl.int64)[None, :] * COLUMNS + column[:, None], result, mask=inside)


@triton.jit(do_not_specialize=["first_expert"])
def _combine(
    results,
    weights,
    chosen,
    residual,
    out,
    hidden,
    first_expert,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    PARTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Add the results of one token in the order of its choices, for BLOCK columns."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < hidden
    total = tl.zeros([BLOCK], tl.float32)
    for turn in tl.static_range(TOP_K):
        choice = token * TOP_K + turn
        computed = inside
        if PARTIAL:
            expert = tl.load(chosen + choice) - first_expert
            computed = inside & (expert >= 0) & (expert < EXPERTS)
        result = tl.load(results + choice * hidden + column, mask=computed, other=0.0)
        total += result.to(tl.float32) * tl.load(weights + choice)
    if RESIDUAL:
        total += tl.load(residual + token * hidden + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * hidden + column, total.to(out.dtype.element_ty), mask=inside)
