# mypy: allow-untyped-defs
"""Contains the kernel that `experts_many` launches for each of the experts' two GEMMs. It has a fixed number
of programs, which read the number of groups on the device and compute one tile after another. The weight is
the 64-row operand of the tensor-core instruction, so small tiles suffice for experts with few tokens. With
one scale per block and many tokens, the tokens are this operand (`_compute_halves`). Even if a plan specifies
large tiles, groups with few (token, expert) pairs use smaller ones.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.block_scales import add_scaled, load_scales, scale_offsets
from kernels.triton.fused import scales_stride
from kernels.triton.linear_rows import gated, swiglu, weight_rows


@triton.jit
def _group(groups, group, count):
    """Return a group's expert, the group's first position in the sorted choices, and the end of the expert's
    positions there. A number past the last group selects the last group."""
    at = groups + 4 * (1 + tl.maximum(tl.minimum(group, count - 1), 0))
    return tl.load(at), tl.load(at + 1), tl.load(at + 2)


@triton.jit
def _choices(order, first, end, total, ROWS: tl.constexpr):
    """Return the indices of the (token, expert) choices in the group that starts at position `first`. All of
    them are for the same expert. Rows past this expert's last choice repeat that choice."""
    place = tl.minimum(first + tl.arange(0, ROWS), end - 1)
    return tl.load(order + tl.maximum(tl.minimum(place, total - 1), 0))


@triton.jit(do_not_specialize=["total"])
def _grouped(
    x,
    x_scale,
    order,
    groups,
    weight,
    weight_scale,
    out,
    total,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    SMALL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute tiles of BLOCK_N weight rows by ROWS choices of one expert. With UP, x has one row per token,
    and the results of SwiGLU are written in the sorted order. Otherwise, x has one row per choice in the
    sorted order, and results are written in the original order of the choices.

    While computing a tile's products, the program already loads the scales, the next tile's choices, and the
    group of the tile after that, unless the tile's sums need most of the registers.
    """
    width: tl.constexpr = BLOCK_N // 2 if UP else BLOCK_N
    across: tl.constexpr = (COLUMNS + width - 1) // width
    halves: tl.constexpr = GROUP_K > 0 and ROWS >= 64 and K % BLOCK_K == 0
    early: tl.constexpr = ROWS * BLOCK_N <= 8192 and not halves
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    programs = tl.num_programs(0)
    begin = tl.program_id(0)
    count = tl.load(groups)
    if early:
        expert, first, end = _group(groups, begin // across, count)
        choice = _choices(order, first, end, total, ROWS)
        next_expert, next_first, next_end = _group(groups, (begin + programs) // across, count)
    for number in tl.range(begin, count * across, programs):
        tile = number % across
        if early:
            next_choice = _choices(order, next_first, next_end, total, ROWS)
            later_expert, later_first, later_end = _group(groups, (number + 2 * programs) // across, count)
            _compute_tile(
                x, x_scale, weight, weight_scale, out, expert, first, end, choice, tile, total,
                COLUMNS, N, K, TOP_K, UP, ROWS, BLOCK_N, BLOCK_K, SCALED, GROUP_N, GROUP_K, True,
            )  # fmt: skip
            expert, first, end, choice = next_expert, next_first, next_end, next_choice
            next_expert, next_first, next_end = later_expert, later_first, later_end
        else:
            expert, first, end = _group(groups, number // across, count)
            # An expert's last group may have only a few choices.
            if end - first <= SMALL:
                few = _choices(order, first, end, total, SMALL)
                _compute_tile(
                    x, x_scale, weight, weight_scale, out, expert, first, end, few, tile, total,
                    COLUMNS, N, K, TOP_K, UP, SMALL, BLOCK_N, BLOCK_K, SCALED, GROUP_N, GROUP_K, False,
                )  # fmt: skip
            elif halves:
                _compute_halves(
                    x, x_scale, order, weight, weight_scale, out, expert, first, end, tile, total,
                    COLUMNS, N, K, TOP_K, UP, ROWS, BLOCK_N // 2, BLOCK_K, GROUP_N, GROUP_K,
                )  # fmt: skip
            else:
                many = _choices(order, first, end, total, ROWS)
                _compute_tile(
                    x, x_scale, weight, weight_scale, out, expert, first, end, many, tile, total,
                    COLUMNS, N, K, TOP_K, UP, ROWS, BLOCK_N, BLOCK_K, SCALED, GROUP_N, GROUP_K, False,
                )  # fmt: skip


@triton.jit
def _compute_tile(
    x,
    x_scale,
    weight,
    weight_scale,
    out,
    expert,
    first,
    end,
    choice,
    tile,
    total,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Compute one tile of `_grouped`: BLOCK_N weight rows of an expert by the ROWS choices of a group. With
    EARLY, the scales are loaded before computing the products."""
    dtype: tl.constexpr = out.dtype.element_ty
    width: tl.constexpr = BLOCK_N // 2 if UP else BLOCK_N
    last = end - 1
    place = first + tl.arange(0, ROWS)
    source = choice // TOP_K if UP else tl.minimum(place, last)
    k = tl.arange(0, BLOCK_K)
    weight_row = weight_rows(tile, COLUMNS, BLOCK_N, UP) + expert.to(tl.int64) * N
    ws = weight + weight_row[:, None] * K + k[None, :]
    xs = x + source.to(tl.int64)[:, None] * K + k[None, :]
    live = place <= last
    if GROUP_K:
        rows = weight_rows(tile, COLUMNS, BLOCK_N, UP)
        one: tl.constexpr = GROUP_N % BLOCK_N == 0 and not UP
        of_rows = weight_scale + scale_offsets(expert.to(tl.int64), rows, N, K, GROUP_N, GROUP_K, one)
        of_choices = x_scale + source
        stride = scales_stride(total // TOP_K)
        row_scale, choice_scale = load_scales(of_rows, of_choices, stride, 0, K, GROUP_K, live)
    elif SCALED and EARLY:
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
        if GROUP_K:
            scales = load_scales(of_rows, of_choices, stride, at + BLOCK_K, K, GROUP_K, live)
            acc = add_scaled(acc, w, part, row_scale, choice_scale)
            row_scale, choice_scale = scales
        else:
            acc = tl.dot(w, tl.trans(part), acc, input_precision="ieee")
    if SCALED and not GROUP_K:
        if not EARLY:
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


@triton.jit
def _compute_halves(
    x,
    x_scale,
    order,
    weight,
    weight_scale,
    out,
    expert,
    first,
    end,
    tile,
    total,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    UP: tl.constexpr,
    ROWS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
):
    """Compute one tile of `_grouped` for many choices and a weight with one scale per block. The two halves
    of the weight rows are multiplied one after another. The registers then hold a step's product for only one
    half, in addition to the sums of both. With UP, the halves are gate and up. The choices are the first
    operand, so that each thread computes few of them and loads few scales."""
    dtype: tl.constexpr = out.dtype.element_ty
    width: tl.constexpr = HALF if UP else 2 * HALF
    expert = expert.to(tl.int64)
    if UP:
        source = _choices(order, first, end, total, ROWS) // TOP_K
    else:
        source = tl.minimum(first + tl.arange(0, ROWS), end - 1)
    k = tl.arange(0, BLOCK_K)
    column = tile * width + tl.arange(0, HALF)
    row0 = column if COLUMNS % width == 0 else tl.minimum(column, COLUMNS - 1)
    if UP:
        row1 = row0 + COLUMNS
    elif COLUMNS % width == 0:
        row1 = row0 + HALF
    else:
        row1 = tl.minimum(column + HALF, COLUMNS - 1)
    weight += expert * N * K
    ws0 = weight + row0[:, None] * K + k[None, :]
    ws1 = weight + row1[:, None] * K + k[None, :]
    xs = x + source.to(tl.int64)[:, None] * K + k[None, :]
    one: tl.constexpr = GROUP_N % HALF == 0 and (not UP or COLUMNS % GROUP_N == 0)
    of_rows0 = weight_scale + scale_offsets(expert, row0, N, K, GROUP_N, GROUP_K, one)
    of_rows1 = weight_scale + scale_offsets(expert, row1, N, K, GROUP_N, GROUP_K, one)
    of_choices = x_scale + source
    stride = scales_stride(total // TOP_K)
    scale0, scale1, choice_scale = tl.load(of_rows0), tl.load(of_rows1), tl.load(of_choices)
    acc0 = tl.zeros([ROWS, HALF], tl.float32)
    acc1 = tl.zeros([ROWS, HALF], tl.float32)
    for at in tl.range(0, K, BLOCK_K):
        part = tl.load(xs + at)
        w0 = tl.load(ws0 + at)
        w1 = tl.load(ws1 + at)
        group = tl.minimum(at + BLOCK_K, K - 1) // GROUP_K
        next0, next1 = tl.load(of_rows0 + group), tl.load(of_rows1 + group)
        next_choice = tl.load(of_choices + group.to(tl.int64) * stride)
        acc0 = add_scaled(acc0, part, w0, choice_scale, scale0)
        acc1 = add_scaled(acc1, part, w1, choice_scale, scale1)
        scale0, scale1, choice_scale = next0, next1, next_choice
    place = first + tl.arange(0, ROWS)
    live = place < end
    if UP:
        to = out + place.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        inside = live[:, None] & (column < COLUMNS)[None, :]
        tl.store(to, swiglu(acc0, acc1, dtype).to(dtype), mask=inside)
    else:
        choice = _choices(order, first, end, total, ROWS)
        to = out + choice.to(tl.int64)[:, None] * COLUMNS + column[None, :]
        tl.store(to, acc0.to(dtype), mask=live[:, None] & (column < COLUMNS)[None, :])
        tl.store(to + HALF, acc1.to(dtype), mask=live[:, None] & (column + HALF < COLUMNS)[None, :])
