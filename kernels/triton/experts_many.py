# mypy: allow-untyped-defs
"""Computes the experts for many tokens. The choices, i.e. (token, expert) pairs, are sorted by expert on the
device. Each GEMM is one launch for all experts' tokens.

`sort` is the second half of a stable counting sort. The router has already counted each expert's choices in
each block of tokens. `sort` is a single launch, which adds up all blocks' counts and writes each choice to
its position. It also lists the groups of choices that form the GEMMs' tiles, so that programs need not search
for their choices. `up` reads the tokens in the sorted order and computes SwiGLU. `down` writes its results in
the original order of the choices. `combine` multiplies the results by their routing weights. It then adds
each token's results, in the order of its choices, and the residual. No kernel uses atomic additions, so the
results do not depend on timing.

The GEMMs (`experts_grouped`) read the number of groups on the device. No launch depends on the routing, so
all launches can be captured in a CUDA graph.

A rank with only some of the experts sorts all choices, but forms groups only for its own experts. `combine`
skips the results of all other experts.

Results are rounded as in the reference, except that the residual is added to the float32 sum before the sum
is rounded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.block_scales import block_constants, check_scales, check_step
from kernels.triton.experts_grouped import _grouped
from kernels.triton.experts_plans import ExpertsPlan
from kernels.triton.experts_route import Routed, block_tokens
from kernels.triton.linear_rows import check_results

_SUMMED = 1 << 14
"""Maximum number of counts a `sort` program adds up at a time."""

_SMALL_ROWS = 32
"""Rows per tile for groups with few choices, even if the plan specifies larger tiles."""

_COMBINED_COLUMNS = 1024
"""Number of columns that a `combine` program computes."""


@dataclass(frozen=True, slots=True)
class Sorted:
    """All (token, expert) choices, sorted by expert and then by token. Choice `i` of a token is numbered
    token × top_k + i."""

    order: torch.Tensor
    """The number of each choice, in sorted order: [tokens × top_k] int32."""
    groups: dict[int, torch.Tensor]
    """For each tile height (row count), the groups into which each expert's choices are divided: [groups + 1,
    4] int32. A group has at most as many choices as a tile has rows. The first row begins with the number of
    groups. Each of the other rows describes one group: its expert (numbered from this rank's first expert),
    its first position in `order`, and the end of the expert's range in `order`. The last column is unused."""
    held: int
    """Number of experts on this rank."""


@dataclass(frozen=True, slots=True)
class ComputedChoices:
    """Selects the choices whose experts are on this rank, if the rank has only some of the experts."""

    chosen: torch.Tensor
    """Ids of the chosen experts: [tokens, top_k] int32."""
    first: int
    """Id of this rank's first expert."""
    experts: int
    """Number of experts on this rank."""


def sort(
    routed: Routed,
    experts: int,
    rows: tuple[int, int],
    *,
    first: int = 0,
    held: int | None = None,
    pdl: bool = True,
) -> Sorted:
    """Sort the choices made by `experts_route.route_many`. A token never chooses an expert twice.

    experts: total number of experts on all ranks.
    rows: row counts of the tiles of `up` and `down`. first, held: this rank's first expert and number of
      experts. By default, the rank has all experts.
    """
    if routed.places is None or routed.counts is None:
        raise ValueError("routed has no counts; route the tokens with route_many")
    tokens, top_k = routed.chosen.shape
    device = routed.chosen.device
    order = torch.empty(tokens * top_k, dtype=torch.int32, device=device)
    held = experts if held is None else held
    total = tokens * top_k
    groups = {
        size: torch.empty((min(total, total // size + held) + 1, 4), dtype=torch.int32, device=device)
        for size in rows
    }
    blocks, every = routed.counts.shape
    block = block_tokens(tokens, experts)
    _place[(max(blocks, 1),)](
        routed.chosen,
        routed.places,
        routed.counts,
        order,
        groups[rows[0]],
        groups[rows[1]],
        total,
        blocks,
        first,
        EXPERTS=held,
        ROWS_UP=rows[0],
        ROWS_DOWN=rows[1],
        CHOICES=block * top_k,
        BLOCK=triton.next_power_of_2(block * top_k),
        SUMMED=min(triton.next_power_of_2(max(blocks, 1)), _SUMMED // every),
        ALL=every,
        PDL=pdl,
        num_warps=8,
        launch_pdl=pdl,
    )
    return Sorted(order, groups, held)


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
    block: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Return `silu(gate) × up` for each choice, in `by_expert` order: `[tokens × top_k, intermediate]` in the
    model's dtype.

    x, x_scale, weight, weight_scale, block, dtype: as in `experts_few.up`.
    multiprocessors: number of multiprocessors of the device.

    Results of experts on other ranks are undefined.
    """
    columns = weight.shape[1] // 2
    out = torch.empty((len(x) * top_k, columns), dtype=dtype or x.dtype, device=x.device)
    _launch(x, x_scale, by_expert, weight, weight_scale, block, out, plan, multiprocessors, pdl, top_k)
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
    block: tuple[int, int] | None = None,
    dtype: torch.dtype | None = None,
    pdl: bool = True,
) -> torch.Tensor:
    """Return `down(x)` in the original order of the choices: `[tokens × top_k, hidden]` in the model's dtype.

    x: `[tokens × top_k, intermediate]` in the order of `by_expert`, in the weight's dtype; if it is
      quantised, x_scale is `[tokens × top_k, 1]`.
    weight: `[experts, hidden, intermediate]`.
    weight_scale: `[experts, hidden]`.
    block: as in `experts_few.down`.
    """
    out = torch.empty((len(x), weight.shape[1]), dtype=dtype or x.dtype, device=x.device)
    _launch(x, x_scale, by_expert, weight, weight_scale, block, out, plan, multiprocessors, pdl, None)
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
    """Return the sum of each token's results, each multiplied by its routing weight, plus the residual:
    `[tokens, hidden]` in the dtype of `results`. If `out` is given, the sum is written to it. `out` may be
    the residual. results: `[tokens × top_k, hidden]`. weights: routing weights, `[tokens, top_k]` float32.
    computed: selects the results computed on this rank; None means all of them."""
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
    block: tuple[int, int] | None,
    out: torch.Tensor,
    plan: ExpertsPlan,
    multiprocessors: int,
    pdl: bool,
    top_k: int | None,
) -> None:
    """Launch `_grouped` for `up`, or for `down` if top_k is None."""
    experts, n, k = weight.shape
    if x.shape[1] != k or not x.is_contiguous() or not weight.is_contiguous():
        raise ValueError(
            f"x is {tuple(x.shape)} and weight {tuple(weight.shape)}; their last dimensions must be equal, "
            "and both must be contiguous"
        )
    if len(by_expert.order) != len(out) or by_expert.held != experts:
        raise ValueError(
            f"by_expert assigns {len(by_expert.order)} rows to {by_expert.held} experts; "
            f"expected {len(out)} rows and {experts} experts"
        )
    if weight_scale is not None:
        check_scales(x, x_scale, weight, weight_scale, block)
    check_step(plan.block_k, block)
    if not len(x):
        return
    _grouped[(plan.programs * multiprocessors,)](
        x,
        x_scale,
        by_expert.order,
        by_expert.groups[plan.rows],
        weight,
        weight_scale,
        out,
        len(out),
        COLUMNS=out.shape[1],
        N=n,
        K=k,
        TOP_K=top_k or 1,
        UP=top_k is not None,
        ROWS=plan.rows,
        SMALL=min(plan.rows // 2, _SMALL_ROWS),
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        SCALED=weight_scale is not None,
        **block_constants(block),
        PDL=pdl,
        num_warps=plan.warps,
        num_stages=plan.stages,
        maxnreg=plan.max_registers,
        launch_pdl=pdl,
    )


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _write_groups(
    groups,
    end_positions,
    totals,
    first_expert,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    ALL: tl.constexpr,
):
    """Divide the choices (pairs of token and expert) that are routed to this rank's experts into groups of at
    most ROWS choices and write the groups. end_positions: the position after each expert's last choice.
    totals: the number of choices for each expert."""
    expert = tl.arange(0, ALL) - first_expert
    here = (expert >= 0) & (expert < EXPERTS)
    count = tl.where(here, (totals + ROWS - 1) // ROWS, 0)
    group_ends = tl.cumsum(count, axis=0)
    tl.store(groups, tl.sum(count, axis=0))
    for number in tl.range(0, tl.max(count, axis=0)):
        to = groups + 4 * (1 + group_ends - count + number)
        more = number < count
        tl.store(to, expert, mask=more)
        tl.store(to + 1, end_positions - totals + number * ROWS, mask=more)
        tl.store(to + 2, end_positions, mask=more)


@triton.jit(do_not_specialize=["total", "blocks", "first_expert"])
def _place(
    chosen,
    places,
    counts,
    order,
    groups_up,
    groups_down,
    total,
    blocks,
    first_expert,
    EXPERTS: tl.constexpr,
    ROWS_UP: tl.constexpr,
    ROWS_DOWN: tl.constexpr,
    CHOICES: tl.constexpr,
    BLOCK: tl.constexpr,
    SUMMED: tl.constexpr,
    ALL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Write the CHOICES choices of a block of tokens to their sorted positions. Every program adds up all
    blocks' counts, SUMMED blocks at a time. The first and last programs also write the groups for `up` and
    `down`."""
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
    end_positions = tl.cumsum(totals, axis=0)
    if tl.program_id(0) == 0:
        _write_groups(groups_up, end_positions, totals, first_expert, EXPERTS, ROWS_UP, ALL)
    if ROWS_DOWN != ROWS_UP and tl.program_id(0) == tl.num_programs(0) - 1:
        _write_groups(groups_down, end_positions, totals, first_expert, EXPERTS, ROWS_DOWN, ALL)
    place += tl.gather(end_positions - totals + earlier, expert, 0)
    tl.store(order + place, choice, mask=inside)


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
    """For BLOCK columns of one token, add the chosen experts' results in the order of the token's choices."""
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
