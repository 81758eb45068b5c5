# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (kernel code supports only + to extend tuples)
"""Computes the FP8 experts of one or two tokens. Weights are loaded from memory straight into tensor-core
registers, as in `linear_stream`, which explains the layouts.

In `gemv`, converting e4m3 weights to float32 on the CUDA cores takes about as long as reading them. These
kernels only convert the weights to float16, without loss, and the tensor cores sum the products in float32.

In `up`, each warp of a program sums over a part of K for one chosen expert. In `down`, each warp computes one
of a token's chosen experts. The warp quantises this expert's activations itself, because no other warp needs
them. All weights of a `down` program are loaded before it waits for `up`. The warps' sums are added in a
fixed order.

The kernels are written in Gluon, which Triton's interpreter does not support, so their results are tested
only on a GPU.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.triton.experts_plans import ExpertsPlan
from kernels.triton.linear_stream import _weight_row, _write


def launch_up(
    plan: ExpertsPlan,
    x: torch.Tensor,
    x_scale: torch.Tensor,
    chosen: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    out: torch.Tensor,
    first: int | None,
    pdl: bool,
) -> None:
    """Launch `up` with the arguments of `experts_few.up`."""
    experts, rows, hidden = weight.shape
    tokens, top_k = chosen.shape
    _up_stream[(tokens * top_k * triton.cdiv(rows, plan.block_n),)](
        x,
        x_scale,
        chosen,
        weight,
        weight_scale,
        out,
        first or 0,
        COLUMNS=rows // 2,
        K=hidden,
        TOP_K=top_k,
        BLOCK_N=plan.block_n,
        STEP=plan.block_k,
        AHEAD=plan.stages,
        EXPERTS=experts,
        PARTIAL=first is not None,
        PDL=pdl,
        WARPS=plan.warps,
        num_warps=plan.warps,
        launch_pdl=pdl,
    )


def launch_down(
    plan: ExpertsPlan,
    x: torch.Tensor,
    chosen: torch.Tensor,
    weights: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    residual: torch.Tensor | None,
    out: torch.Tensor,
    first: int | None,
    pdl: bool,
) -> None:
    """Launch `down` with the arguments of `experts_few.down`. The plan has one warp per choice of a token."""
    experts, columns, width = weight.shape
    tokens, top_k = chosen.shape
    _down_stream[(tokens * triton.cdiv(columns, plan.block_n),)](
        x,
        chosen,
        weights,
        weight,
        weight_scale,
        residual,
        out,
        first or 0,
        COLUMNS=columns,
        K=width,
        BLOCK_N=plan.block_n,
        STEP=plan.block_k,
        EXPERTS=experts,
        PARTIAL=first is not None,
        RESIDUAL=residual is not None,
        PDL=pdl,
        WARPS=top_k,
        num_warps=top_k,
        launch_pdl=pdl,
    )


@gluon.constexpr_function
def _power_of_2(size):
    return 1 << (size - 1).bit_length()


@gluon.jit
def _wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)


@gluon.jit
def _launch_dependents():
    start: gl.constexpr = "griddepcontrol.launch_dependents; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(start, "=r", [], gl.int32, False, 1)


@gluon.jit
def _load(at, inside, MASKED: gl.constexpr):
    if MASKED:
        return gl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return gl.load(at, eviction_policy="evict_first")


@gluon.jit(do_not_specialize=["first_expert"])
def _up_stream(
    x,
    x_scale,
    chosen,
    weight,
    weight_scale,
    out,
    first_expert,
    COLUMNS: gl.constexpr,
    K: gl.constexpr,
    TOP_K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STEP: gl.constexpr,
    AHEAD: gl.constexpr,
    EXPERTS: gl.constexpr,
    PARTIAL: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Multiply BLOCK_N weight rows of one chosen expert by the token that chose it. Each warp computes a part
    of K and keeps AHEAD steps of weights in flight."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    in_w: gl.constexpr = gl.DotOperandLayout(0, mma, 16)  # a thread loads 16 e4m3 values of a row at a time
    in_x: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
    across: gl.constexpr = (2 * COLUMNS + BLOCK_N - 1) // BLOCK_N
    stride: gl.constexpr = WARPS * STEP
    steps: gl.constexpr = K // stride
    pair = gl.program_id(0) // across
    tile = gl.program_id(0) % across
    token = pair // TOP_K
    part = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, in_w)))
    index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, in_w)))
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_w)))
    part_x = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, in_x)))
    k_x = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, in_x)))
    row = _weight_row(tile, index, COLUMNS, BLOCK_N, True)
    if PDL:
        # Let the next kernel start only after this wait, because the next kernel reads the chosen experts
        # before waiting for this kernel.
        _wait()
        _launch_dependents()
    expert = gl.load(chosen + pair).to(gl.int64)
    live = True
    if PARTIAL:
        expert -= first_expert
        live = (expert >= 0) & (expert < EXPERTS)
    if live:
        of_expert = weight + expert * (2 * COLUMNS * K)
        weights = of_expert + row[None, :, None] * K + part[:, None, None] * STEP + k[None, None, :]
        xs = x + token.to(gl.int64) * K + part_x[:, None] * STEP + k_x[None, :]
        tiles = ()
        ones = ()
        for step in gl.static_range(min(AHEAD, steps)):
            tiles = tiles + (gl.load(weights + step * stride, eviction_policy="evict_first"),)
            ones = ones + (gl.load(xs + step * stride),)
        pairs: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [1, WARPS], [0, 1])
        stored = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, pairs))
        scale_row = _weight_row(tile, stored, COLUMNS, BLOCK_N, True)
        scale = gl.load(x_scale + token) * gl.load(weight_scale + expert * (2 * COLUMNS) + scale_row)
        acc = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, layout=mma)
        for step in gl.static_range(steps):
            if step + AHEAD < steps:
                more = gl.load(weights + (step + AHEAD) * stride, eviction_policy="evict_first")
                tiles = tiles + (more,)
                ones = ones + (gl.load(xs + (step + AHEAD) * stride),)
            one = gl.expand_dims(ones[step].to(gl.float16), 2)
            eight, _ = gl.broadcast(one, gl.zeros([WARPS, STEP, 8], gl.float16, layout=in_x))
            acc = mma_v2(tiles[step].to(gl.float16), eight, acc)

        # All eight rows of the result are equal, so only one is stored. Each thread holds both the gate and
        # the up value of a column.
        dtype: gl.constexpr = out.dtype.element_ty
        total = gl.convert_layout(gl.sum(acc, axis=0), pairs) * scale[:, None]
        gate, up = gl.split(gl.permute(gl.reshape(total, [BLOCK_N // 2, 2, 8]), [0, 2, 1]))
        gate = gate.to(dtype).to(gl.float32)
        gated = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32) * up.to(dtype).to(gl.float32)
        _write(gated, tile, None, out + pair.to(gl.int64) * COLUMNS, COLUMNS, BLOCK_N // 2, False)


@gluon.jit(do_not_specialize=["first_expert"])
def _down_stream(
    x,
    chosen,
    weights,
    weight,
    weight_scale,
    residual,
    out,
    first_expert,
    COLUMNS: gl.constexpr,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STEP: gl.constexpr,
    EXPERTS: gl.constexpr,
    PARTIAL: gl.constexpr,
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """For each of a token's chosen experts, multiply BLOCK_N weight rows by that expert's activations, and
    add up the weighted results. WARPS is the number of choices: each warp computes one."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    in_w: gl.constexpr = gl.DotOperandLayout(0, mma, 16)
    in_x: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
    of_sums: gl.constexpr = gl.SliceLayout(2, mma)
    across: gl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    steps: gl.constexpr = K // STEP
    token = gl.program_id(0) // across
    tile = gl.program_id(0) % across
    turn = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, in_w)))
    index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, in_w)))
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_w)))
    if PDL:
        _launch_dependents()
    expert, here = _experts(chosen, token, turn, first_expert, WARPS, EXPERTS, PARTIAL)
    row = _weight_row(tile, index, COLUMNS, BLOCK_N, False)
    rows = expert[:, None] * COLUMNS + row[None, :]
    at = weight + rows[:, :, None] * K + k[None, None, :]
    inside = here[:, None, None] & (k >= 0)[None, None, :]
    tiles = ()
    for step in gl.static_range(steps):
        tiles = tiles + (_load(at + step * STEP, inside, PARTIAL),)
    # Combine the routing weight with the weight row's scale. The scale of the activations for the chosen
    # expert is applied below.
    sum_turn = gl.arange(0, WARPS, layout=gl.SliceLayout(1, of_sums))
    sum_index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, of_sums))
    sum_expert, sum_here = _experts(chosen, token, sum_turn, first_expert, WARPS, EXPERTS, PARTIAL)
    sum_row = _weight_row(tile, sum_index, COLUMNS, BLOCK_N, False)
    of_row = gl.load(weight_scale + sum_expert[:, None] * COLUMNS + sum_row[None, :])
    share = gl.load(weights + token * WARPS + sum_turn, mask=sum_here, other=0.0, cache_modifier=".cg")
    if PDL:
        _wait()

    layout: gl.constexpr = gl.BlockedLayout([1, STEP // 32], [1, 32], [WARPS, 1], [1, 0])
    of_warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))
    _, warp_here = _experts(chosen, token, of_warp, first_expert, WARPS, EXPERTS, PARTIAL)
    values = x + (token * WARPS + of_warp).to(gl.int64)[:, None] * K + column[None, :]
    computed = warp_here[:, None] & (column >= 0)[None, :]
    largest = gl.zeros([WARPS, STEP], gl.float32, layout=layout)
    parts = ()
    for step in gl.static_range(steps):
        part = gl.load(values + step * STEP, mask=computed, other=0.0).to(gl.float32)
        largest = gl.maximum(largest, gl.abs(part))
        parts = parts + (part,)
    most = gl.max(largest, axis=1)
    limit = gl.full([WARPS], 448.0, gl.float32, layout=gl.SliceLayout(1, layout))
    factor = gl.div_rn(limit, gl.where(most > 0.0, most, 1.0))
    scale = gl.convert_layout(gl.div_rn(most, limit), gl.SliceLayout(1, of_sums))
    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    prepared = gl.allocate_shared_memory(gl.float16, [_power_of_2(steps * WARPS), STEP], shared)
    for step in gl.static_range(steps):
        quantised = (parts[step] * factor[:, None]).to(gl.float8e4nv)
        prepared.slice(step * WARPS, WARPS, 0).store(quantised.to(gl.float16))
    acc = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, layout=mma)
    for step in gl.static_range(steps):
        one = prepared.slice(step * WARPS, WARPS, 0).load(gl.SliceLayout(2, in_x))
        eight, _ = gl.broadcast(gl.expand_dims(one, 2), gl.zeros([WARPS, STEP, 8], gl.float16, layout=in_x))
        acc = mma_v2(tiles[step].to(gl.float16), eight, acc)
    acc = acc * (of_row * (scale * share)[:, None])[:, :, None]
    written: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [1, WARPS], [0, 1])
    total = gl.convert_layout(gl.sum(acc, axis=0), written)
    begin = token.to(gl.int64) * COLUMNS
    before = residual + begin if RESIDUAL else residual
    _write(total, tile, before, out + begin, COLUMNS, BLOCK_N, RESIDUAL)


@gluon.jit
def _experts(
    chosen,
    token,
    turn,
    first_expert,
    TOP_K: gl.constexpr,
    EXPERTS: gl.constexpr,
    PARTIAL: gl.constexpr,
):
    """Return the experts of some choices, numbered from this rank's first expert, and whether each is on this
    rank. An expert on another rank is returned as 0."""
    expert = gl.load(chosen + token * TOP_K + turn, cache_modifier=".cg").to(gl.int64)
    here = turn >= 0
    if PARTIAL:
        expert -= first_expert
        here = (expert >= 0) & (expert < EXPERTS)
        expert = gl.where(here, expert, 0)
    return expert, here
