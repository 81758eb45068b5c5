# mypy: allow-untyped-defs
# ruff: noqa: RUF005 (a kernel's tuples know + alone)
"""Products of up to 16 rows, with weights that go from memory straight into tensor-core registers.

Written in Gluon, Triton's lower level, for one thing that Triton does not say: that a load's layout is that
of a tensor-core operand. A thread's 16 bytes along K are then the operand of the next two products, since
any order of K will do that is the same in both operands, and nothing passes through shared memory. Each warp
takes its own part of K; their float32 sums meet at the end, in a fixed order.

e4m3 weights are widened to float16, exactly, and multiplied there: sums are float32 throughout, where
Hopper's FP8 products keep about 14 bits.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from kernels.triton.linear_plans import Fused, Plan


def launch_stream(
    plan: Plan,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    fused: Fused,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """Up to `plan.rows` rows; one, where x is to be normed or quantised on the way."""
    rows, k = x.shape
    quantise = weight_scale is not None and x_scale is None
    _stream[(triton.cdiv(weight.shape[0], plan.block_n),)](
        x,
        x_scale,
        weight,
        weight_scale,
        fused.norm_weight,
        fused.bias,
        fused.residual,
        out,
        rows,
        out.shape[1],
        fused.eps,
        x.stride(0),
        0 if fused.residual is None else fused.residual.stride(0),
        out.stride(0),
        K=k,
        ROWS=plan.rows,
        BLOCK_N=plan.block_n,
        STEP=plan.block_k,
        AHEAD=plan.stages,
        NORM=fused.norm_weight is not None,
        QUANTISE=quantise,
        SCALED=weight_scale is not None,
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
    """The weight's rows of a tile, int64. SwiGLU: gate and up of a column side by side."""
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
    QUANTISE: gl.constexpr,
    VALUES: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Writes one row of x, normed and quantised, to shared memory, where each warp reads what it wrote.
    Returns its scale."""
    layout: gl.constexpr = gl.BlockedLayout([1, STEP // 32], [1, 32], [WARPS, 1], [1, 0])
    warp = gl.arange(0, WARPS, layout=gl.SliceLayout(1, layout))
    at = warp[:, None] * STEP + gl.arange(0, STEP, layout=gl.SliceLayout(0, layout))[None, :]
    dtype: gl.constexpr = x.dtype.element_ty
    stride: gl.constexpr = WARPS * STEP
    squares = gl.zeros([WARPS, STEP], gl.float32, layout=layout)
    largest = gl.zeros([WARPS, STEP], gl.float32, layout=layout)
    parts: tuple = ()
    for start in gl.static_range(0, K, stride):
        part = gl.load(x + start + at).to(gl.float32)
        if NORM:
            squares += part * part
            part = part * gl.load(norm_weight + start + at).to(gl.float32)
        if QUANTISE:
            largest = gl.maximum(largest, gl.abs(part))
        parts = parts + (part,)
    inverse = 1.0
    if NORM:
        inverse = gl.rsqrt(gl.sum(gl.sum(squares, axis=1), axis=0) / K + eps)
    scale = 1.0
    factor = 1.0
    if QUANTISE:
        most = gl.max(gl.max(largest, axis=1), axis=0) * inverse
        if NORM:
            most = most.to(dtype).to(gl.float32)
        scale = most / 448.0
        factor = 448.0 / gl.where(most > 0.0, most, 1.0)
    for step in gl.static_range(K // stride):
        part = parts[step]
        if NORM:
            part = (part * inverse).to(dtype).to(gl.float32)
        if QUANTISE:
            part = (part * factor).to(gl.float8e4nv)
        prepared.slice(step * WARPS, WARPS, 0).store(part.to(VALUES))
    return scale


@gluon.jit(do_not_specialize=["rows"])
def _stream(
    x,
    x_scale,
    weight,
    weight_scale,
    norm_weight,
    bias,
    residual,
    out,
    rows,
    columns,
    eps,
    x_stride,
    residual_stride,
    out_stride,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STEP: gl.constexpr,
    AHEAD: gl.constexpr,
    NORM: gl.constexpr,
    QUANTISE: gl.constexpr,
    SCALED: gl.constexpr,
    SILU: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """BLOCK_N weight rows by all of K, a part of K for each warp; AHEAD steps of weights are on their way."""
    fp8: gl.constexpr = weight.dtype.element_ty.primitive_bitwidth == 8
    values: gl.constexpr = gl.float16 if fp8 else weight.dtype.element_ty
    width: gl.constexpr = 16 if fp8 else 8
    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    in_w: gl.constexpr = gl.DotOperandLayout(0, mma, width)
    in_x: gl.constexpr = gl.DotOperandLayout(1, mma, width)
    stride: gl.constexpr = WARPS * STEP
    steps: gl.constexpr = K // stride
    tile = gl.program_id(0)

    part_w = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, in_w)))
    index_w = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, gl.SliceLayout(2, in_w)))
    k_w = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_w)))
    row_w = _weight_row(tile, index_w, columns, BLOCK_N, SILU)
    weights = weight + row_w[None, :, None] * K + part_w[:, None, None] * STEP + k_w[None, None, :]
    tiles: tuple = ()
    for step in gl.static_range(min(AHEAD, steps)):
        tiles = tiles + (gl.load(weights + step * stride, eviction_policy="evict_first"),)
    if PDL:
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1
        )
        gl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, 0;", "=r", [], gl.int32, False, 1)

    prepares: gl.constexpr = NORM or QUANTISE
    scale = 1.0
    if prepares:
        shared: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        prepared = gl.allocate_shared_memory(values, [_power_of_2(steps * WARPS), STEP], shared)
        scale = _prepare(x, norm_weight, eps, prepared, K, STEP, NORM, QUANTISE, values, WARPS)
    else:
        part_x = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, in_x)))
        k_x = gl.arange(0, STEP, layout=gl.SliceLayout(0, gl.SliceLayout(2, in_x)))
        row_x = gl.minimum(gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, in_x))), rows - 1)
        xs = (
            x
            + row_x.to(gl.int64)[None, None, :] * x_stride
            + part_x[:, None, None] * STEP
            + k_x[None, :, None]
        )
    acc = gl.zeros([WARPS, BLOCK_N, ROWS], gl.float32, layout=mma)
    for step in gl.static_range(steps):
        if step + AHEAD < steps:
            tiles = tiles + (gl.load(weights + (step + AHEAD) * stride, eviction_policy="evict_first"),)
        if prepares:
            one = prepared.slice(step * WARPS, WARPS, 0).load(gl.SliceLayout(2, in_x))
            b, _ = gl.broadcast(gl.expand_dims(one, 2), gl.zeros([WARPS, STEP, ROWS], values, layout=in_x))
        else:
            b = gl.load(xs + step * stride).to(values)
        acc = mma_v2(tiles[step].to(values), b, acc)

    # ── what follows on the sums ──
    pairs: gl.constexpr = gl.BlockedLayout([2, 1], [8, 4], [1, WARPS], [0, 1])  # gate and up in one thread
    total = gl.convert_layout(gl.sum(acc, axis=0), pairs)
    dtype: gl.constexpr = out.dtype.element_ty
    layout: gl.constexpr = total.type.layout
    index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    weight_row = _weight_row(tile, index, columns, BLOCK_N, SILU)
    if SCALED:
        total *= gl.load(weight_scale + weight_row)[:, None]
        if QUANTISE:
            total *= scale
        else:
            total *= gl.load(x_scale + gl.minimum(row, rows - 1))[None, :]
    if BIAS:
        total += gl.load(bias + weight_row).to(gl.float32)[:, None]
    if SILU:
        gate, up = gl.split(gl.permute(gl.reshape(total, [BLOCK_N // 2, 2, ROWS]), [0, 2, 1]))
        gate = gate.to(dtype).to(gl.float32)
        gated = (gate / (1.0 + gl.exp(-gate))).to(dtype).to(gl.float32)
        _write(
            gated * up.to(dtype).to(gl.float32),
            tile,
            residual,
            out,
            rows,
            columns,
            residual_stride,
            out_stride,
            ROWS,
            BLOCK_N // 2,
            RESIDUAL,
        )
    else:
        _write(
            total, tile, residual, out, rows, columns, residual_stride, out_stride, ROWS, BLOCK_N, RESIDUAL
        )


@gluon.jit
def _write(
    total,
    tile,
    residual,
    out,
    rows,
    columns,
    residual_stride,
    out_stride,
    ROWS: gl.constexpr,
    WIDTH: gl.constexpr,
    RESIDUAL: gl.constexpr,
):
    layout: gl.constexpr = total.type.layout
    column = tile * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    if RESIDUAL:
        before = residual + row.to(gl.int64)[None, :] * residual_stride + column[:, None]
        total += gl.load(before, mask=inside, other=0.0).to(gl.float32)
    to = out + row.to(gl.int64)[None, :] * out_stride + column[:, None]
    gl.store(to, total.to(out.dtype.element_ty), mask=inside)
