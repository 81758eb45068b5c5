# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (kernel code supports only + to extend tuples)
"""Multiplies one row by an FP8 weight (GEMV), with weights loaded from memory straight into tensor-core
registers.

The kernel is written in Gluon, Triton's lower-level language. Unlike Triton, Gluon can load a tensor in the
layout of a tensor-core operand. A thread loads 16 consecutive bytes along K and uses them directly as
operands of the next products, without shared memory. The tensor cores therefore process the elements of K in
a different order. The result is still correct, because both operands use the same order. Each warp computes
its own part of K, and the warps' float32 sums are added up at the end in a fixed order. The normalised and
quantised row is stored in shared memory and broadcast to all 8 rows of the tensor-core operand.

The e4m3 weights are converted to float16 without loss, and the products are summed in float32. Hopper's FP8
tensor cores would keep only about 14 bits of a sum.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.triton.linear_plans import FusedOps, GemmPlan


def launch_stream(
    plan: GemmPlan,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    fused: FusedOps,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """Launch the GEMV for one row. Every program normalises and quantises the row itself."""
    k = x.shape[1]
    _stream[(triton.cdiv(weight.shape[0], plan.block_n),)](
        x,
        weight,
        weight_scale,
        fused.norm_weight,
        fused.bias,
        fused.residual,
        out,
        out.shape[1],
        fused.eps,
        K=k,
        BLOCK_N=plan.block_n,
        STEP=plan.block_k,
        AHEAD=plan.stages,
        NORM=fused.norm_weight is not None,
        SILU=fused.silu_mul,
        BIAS=fused.bias is not None,
        RESIDUAL=fused.residual is not None,
        PDL=pdl,
        WARPS=plan.warps,
        num_warps=plan.warps,
        launch_pdl=pdl,
    )


@gluon.jit
def _weight_row(tile, index, columns, BLOCK_N: gl.constexpr, SILU: gl.constexpr):
    """Return the weight rows of a tile as int64. With SwiGLU, the gate and up rows of a column are
    adjacent."""
    if SILU:
        column = gl.minimum(tile * (BLOCK_N // 2) + index // 2, columns - 1)
        return (column + (index % 2) * columns).to(gl.int64)
    return gl.minimum(tile * BLOCK_N + index, columns - 1).to(gl.int64)


@gluon.constexpr_function
def _power_of_2(size):
    return 1 << (size - 1).bit_length()


@gluon.jit
def _prepare(
    x,
    norm_weight,
    eps,
    prepared,
    K: gl.constexpr,
    STEP: gl.constexpr,
    NORM: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Normalise and quantise the input row, store it in shared memory, and return its scale. The row is
    stored as float16, which represents every e4m3 value exactly. Each warp later reads only what it has
    stored itself."""
    layout: gl.constexpr = gl.BlockedLayout([1, STEP // 32], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout))
    at = warp[:, None] * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))[None, :]
    dtype: gl.constexpr = x.dtype.element_ty
    stride: gl.constexpr = WARPS * STEP
    squares = gl.zeros([WARPS, STEP], gl.float32, layout=layout)
    largest = gl.zeros([WARPS, STEP], gl.float32, layout=layout)
    parts = ()
    for start in gl.static_range(0, K, stride):
        part = gl.load(x + start + at).to(gl.float32)
        if NORM:
            squares += part * part
            part = part * gl.load(norm_weight + start + at).to(gl.float32)
        largest = gl.maximum(largest, gl.abs(part))
        parts = parts + (part,)
    inverse = 1.0
    most = gl.max(gl.max(largest, axis=1), axis=0)
    if NORM:
        inverse = gl.rsqrt(gl.sum(gl.sum(squares, axis=1), axis=0) / K + eps)
        most = (most * inverse).to(dtype).to(gl.float32)
    # Use approximate divisions, because exactly rounded ones need so many registers that one program fewer
    # would fit on a multiprocessor.
    factor = 448.0 / gl.where(most > 0.0, most, 1.0)
    for step in gl.static_range(K // stride):
        part = parts[step]
        if NORM:
            part = (part * inverse).to(dtype).to(gl.float32)  # type: ignore[attr-defined]
        quantised = (part * factor).to(gl.float8e4nv)
        prepared.slice(step * WARPS, WARPS, 0).store(quantised.to(gl.float16))
    return most / 448.0


@gluon.jit
def _stream(
    x,
    weight,
    weight_scale,
    norm_weight,
    bias,
    residual,
    out,
    columns,
    eps,
    K: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STEP: gl.constexpr,
    AHEAD: gl.constexpr,
    NORM: gl.constexpr,
    SILU: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Multiply BLOCK_N weight rows by one token. Each warp handles a part of K and keeps AHEAD steps of
    weights in flight."""
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    in_w: gl.constexpr = gl.DotOperandLayout(0, mma, 16)  # a thread loads 16 e4m3 values of a row at a time
    in_x: gl.constexpr = gl.DotOperandLayout(1, mma, 16)
    stride: gl.constexpr = WARPS * STEP
    steps: gl.constexpr = K // stride
    tile = gl.program_id(0)

    part = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, in_w)))
    index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, in_w)))
    k = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_w)))
    row = _weight_row(tile, index, columns, BLOCK_N, SILU)
    weights = weight + row[None, :, None] * K + part[:, None, None] * STEP + k[None, None, :]
    tiles = ()
    for step in gl.static_range(min(AHEAD, steps)):
        tiles = tiles + (gl.load(weights + step * stride, eviction_policy="evict_first"),)
    if PDL:
        launch: gl.constexpr = "griddepcontrol.launch_dependents; mov.u32 $0, 0;"
        wait: gl.constexpr = "griddepcontrol.wait; mov.u32 $0, 0;"
        gl.inline_asm_elementwise(launch, "=r", [], gl.int32, False, 1)
        gl.inline_asm_elementwise(wait, "=r", [], gl.int32, False, 1)

    shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    prepared = gl.allocate_shared_memory(gl.float16, [_power_of_2(steps * WARPS), STEP], shared)
    scale = _prepare(x, norm_weight, eps, prepared, K, STEP, NORM, WARPS)
    acc = gl.zeros([WARPS, BLOCK_N, 8], gl.float32, layout=mma)
    for step in gl.static_range(steps):
        if step + AHEAD < steps:
            tiles = tiles + (gl.load(weights + (step + AHEAD) * stride, eviction_policy="evict_first"),)
        one = prepared.slice(step * WARPS, WARPS, 0).load(gl.SliceLayout(2, in_x))
        eight, _ = gl.broadcast(gl.expand_dims(one, 2), gl.zeros([WARPS, STEP, 8], gl.float16, layout=in_x))
        acc = mma_v2(tiles[step].to(gl.float16), eight, acc)

    # ── epilogue: all eight rows are equal, and only one is stored ────────────────────
    dtype: gl.constexpr = out.dtype.element_ty
    # Each thread holds both the gate and the up value of a column.
    pairs: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [1, WARPS], [0, 1])
    total = gl.convert_layout(gl.sum(acc, axis=0), pairs)
    row = _weight_row(tile, gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, pairs)), columns, BLOCK_N, SILU)
    total = total * scale * gl.load(weight_scale + row)[:, None]
    if BIAS:
        total += gl.load(bias + row).to(gl.float32)[:, None]
    if SILU:
        gate, up = gl.split(gl.permute(gl.reshape(total, [BLOCK_N // 2, 2, 8]), [0, 2, 1]))
        gate = gate.to(dtype).to(gl.float32)
        gated = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        _write(gated * up.to(dtype).to(gl.float32), tile, residual, out, columns, BLOCK_N // 2, RESIDUAL)
    else:
        _write(total, tile, residual, out, columns, BLOCK_N, RESIDUAL)


@gluon.jit
def _write(total, tile, residual, out, columns, WIDTH: gl.constexpr, RESIDUAL: gl.constexpr):
    layout: gl.constexpr = total.type.layout
    column = tile * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))[:, None]
    copy = gl.arange(0, 8, layout=gl.SliceLayout(0, layout))[None, :]
    inside = (column < columns) & (copy == 0)
    if RESIDUAL:
        total += gl.load(residual + column + copy * 0, mask=inside, other=0.0).to(gl.float32)
    gl.store(out + column + copy * 0, total.to(out.dtype.element_ty), mask=inside)
