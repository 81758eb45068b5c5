# mypy: allow-untyped-defs, disable-error-code="assignment"
# ruff: noqa: RUF005 (kernel code supports only + to extend lists)
"""Computes GEMMs with few rows on Hopper GPUs, loading weights before the previous kernel has ended.

As in `linear_rows.dot`, the weight is the 64-row operand of the tensor-core instruction, the tokens are the
other operand, and K may be split over programs. Unlike in `dot`, the copy engine (TMA) loads the tiles. The
kernel is written in Gluon, Triton's lower-level language, which controls when each load starts. Each program
first requests the weights of all its stages, then waits for the previous kernel, and only then requests x.
Programs are small, so that the next GEMM's programs fit on a multiprocessor alongside the running ones and
can load their first weights while the running ones finish.

Each stage has a barrier in shared memory that counts the bytes of its two tiles. With SwiGLU, half of a
weight tile contains rows of the gate, and the other half contains the corresponding rows of the up
projection.

If the weight has one scale per block, each step's columns belong to one block. The scales of all steps are
copied to shared memory before the first step. Each step multiplies its product by its scales and adds it to
the total in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.triton.block_scales import block_constants
from kernels.triton.fused import scales_stride
from kernels.triton.linear_plans import FusedOps, GemmPlan
from kernels.triton.linear_rows import Workspace, check_workspace


def launch_tiles(
    plan: GemmPlan,
    x: torch.Tensor,
    x_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    workspace: Workspace,
    fused: FusedOps,
    out: torch.Tensor,
    pdl: bool,
    block: tuple[int, int] | None = None,
) -> None:
    """Launch the GEMM for up to `plan.rows` rows of x. x and the weight have the same dtype; for e4m3, both
    have scales. x must already be normalised unless `fused.squares` is given: x then contains a deferred
    norm's values, and this GEMM multiplies its results by each token's factor. block: as in `launch_dot`."""
    n, k = weight.shape
    check_workspace(plan, n)
    size = weight.element_size()
    if x.data_ptr() % 16 or x.stride(0) * size % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # the copy engine needs 16-byte alignment
    tiles = triton.cdiv(n, plan.block_n)
    parts = 0 if fused.squares is None else fused.squares.shape[0]
    _tiles[(tiles * plan.split,)](
        _weight_tiles(plan, weight, fused.silu_mul),
        TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [plan.rows, plan.block_k], _shared(size, 2)),
        x_scale,
        weight_scale,
        fused.squares,
        fused.bias,
        fused.residual,
        out,
        fused.next_gain,
        None if fused.deferred_norm is None else fused.deferred_norm.values,
        None if fused.deferred_norm is None else fused.deferred_norm.squares,
        workspace.partials,
        workspace.arrived,
        x.shape[0],
        parts,
        out.shape[1],
        0 if fused.residual is None else fused.residual.stride(0),
        out.stride(0),
        fused.eps,
        K=k,
        ROWS=plan.rows,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        STAGES=plan.stages,
        SPLIT=plan.split,
        PARTS=triton.next_power_of_2(parts),
        SCALED=weight_scale is not None and block is None,
        SILU=fused.silu_mul,
        BIAS=fused.bias is not None,
        RESIDUAL=fused.residual is not None,
        GAIN=fused.deferred_norm is not None,
        **block_constants(block),
        PDL=pdl,
        WARPS=plan.warps,
        num_warps=plan.warps,
        launch_pdl=pdl,
    )


def _weight_tiles(plan: GemmPlan, weight: torch.Tensor, silu: bool) -> TensorDescriptor:
    n, k = weight.shape
    if not silu:
        shared = _shared(weight.element_size(), 2)
        return TensorDescriptor(weight, [n, k], [k, 1], [plan.block_n, plan.block_k], shared)
    shared = _shared(weight.element_size(), 3)
    halves, tile = [2, n // 2, k], [2, plan.block_n // 2, plan.block_k]
    return TensorDescriptor(weight, halves, [n // 2 * k, k, 1], tile, shared)


def _shared(element_size: int, rank: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout for rows of 128 bytes, with the swizzling expected by the tensor
    cores."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8 * element_size, rank=rank)


@gluon.jit
def _signal(text: gl.constexpr):
    gl.inline_asm_elementwise(text, "=r", [], gl.int32, False, 1)


@gluon.constexpr_function
def _to_store(width, rows, warps):
    """Return the layout for storing a tensor `[width, rows, 2]`. Adjacent threads hold adjacent columns, and
    each thread holds both elements of the last dimension."""
    vector = min(8, max(1, width * rows // (32 * warps)))
    lanes = min(32, width // vector)
    return gl.BlockedLayout([vector, 1, 2], [lanes, 32 // lanes, 1], [1, warps, 1], [2, 0, 1])


@gluon.constexpr_function
def _power_of_2(size):
    return triton.next_power_of_2(size)


@gluon.constexpr_function
def _to_add_up(rows, warps):
    """Return the layout for summing a tensor `[parts, rows]` over its parts. Adjacent threads hold adjacent
    rows."""
    lanes = min(32, rows)
    return gl.BlockedLayout([1, 1], [32 // lanes, lanes], [warps, 1], [1, 0])


@gluon.jit
def _share(scales):
    """Store `scales [steps, n]` in shared memory and return it, indexed by step."""
    in_rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    shared = gl.allocate_shared_memory(gl.float32, scales.shape, in_rows)
    shared.store(scales)
    return shared._reinterpret(gl.float32, scales.shape, gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def _fetch_weights(w_tiles, tile, k, ready, w, wanted, BLOCK_N: gl.constexpr, SILU: gl.constexpr):
    if SILU:
        tma.async_copy_global_to_shared(w_tiles, [0, tile * (BLOCK_N // 2), k], ready, w, wanted)
    else:
        tma.async_copy_global_to_shared(w_tiles, [tile * BLOCK_N, k], ready, w, wanted)


@gluon.jit
def _gated(acc, DTYPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Return silu(gate) × up, `[n / 2, rows]`, for sums `[n, rows]` that contain both the gate and the up
    values."""
    n: gl.constexpr = acc.shape[0]
    rows: gl.constexpr = acc.shape[1]
    both = gl.permute(gl.reshape(acc, [2, n // 2, rows]), [1, 2, 0])
    gate, up = gl.split(gl.convert_layout(both, LAYOUT))
    gate = gate.to(DTYPE).to(gl.float32)
    gated = (gate / (1.0 + gl.exp(-gate))).to(DTYPE).to(gl.float32)
    return gated * up.to(DTYPE).to(gl.float32)


@gluon.jit(do_not_specialize=["rows", "parts"])
def _tiles(
    w_tiles,
    x_tiles,
    x_scale,
    weight_scale,
    x_squares,
    bias,
    residual,
    out,
    next_gain,
    deferred_values,
    squares,
    partials,
    arrived,
    rows,
    parts,
    columns,
    residual_stride,
    out_stride,
    eps,
    K: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SPLIT: gl.constexpr,
    PARTS: gl.constexpr,
    SCALED: gl.constexpr,
    SILU: gl.constexpr,
    BIAS: gl.constexpr,
    RESIDUAL: gl.constexpr,
    GAIN: gl.constexpr,
    GROUP_N: gl.constexpr,
    GROUP_K: gl.constexpr,
    PDL: gl.constexpr,
    WARPS: gl.constexpr,
):
    """Multiply BLOCK_N weight rows by all tokens. Each program sums over one of SPLIT equal parts of K."""
    values: gl.constexpr = w_tiles.dtype
    bits: gl.constexpr = values.primitive_bitwidth
    dtype: gl.constexpr = out.dtype.element_ty
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, ROWS, 256 // bits])
    steps: gl.constexpr = K // SPLIT // BLOCK_K
    early: gl.constexpr = min(STAGES, steps)
    stage_bytes: gl.constexpr = (BLOCK_N + ROWS) * BLOCK_K * bits // 8
    tile = gl.program_id(0) // SPLIT
    split = gl.program_id(0) % SPLIT
    first_k = split * (K // SPLIT)

    if PDL:
        _signal("griddepcontrol.launch_dependents; mov.u32 $0, 0;")
    ready = gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout())
    ws = gl.allocate_shared_memory(values, [STAGES] + w_tiles.block_type.shape, w_tiles.layout)
    xs = gl.allocate_shared_memory(values, [STAGES, ROWS, BLOCK_K], x_tiles.layout)
    for stage in gl.static_range(early):
        mbarrier.init(ready.index(stage), count=1)
    described = ready.index(STAGES)
    if PDL:
        mbarrier.init(described, count=1)
    for stage in gl.static_range(early):
        mbarrier.expect(ready.index(stage), stage_bytes)
        k = first_k + stage * BLOCK_K
        _fetch_weights(w_tiles, tile, k, ready.index(stage), ws.index(stage), True, BLOCK_N, SILU)

    # Load weight scales, bias and gain before waiting for the previous kernel, because they do not depend on
    # it.
    index = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(1, mma))
    if SILU:
        column = gl.minimum(tile * (BLOCK_N // 2) + index % (BLOCK_N // 2), columns - 1)
        weight_row = column + index // (BLOCK_N // 2) * columns
    else:
        weight_row = gl.minimum(tile * BLOCK_N + index, columns - 1)
    if SCALED:
        of_row = gl.load(weight_scale + weight_row)
    if GROUP_K:
        # Copy the scales of all steps to shared memory. A step would wait longer for scales in global memory
        # than for its weights.
        to_copy: gl.constexpr = _to_add_up(min(ROWS, BLOCK_N), WARPS)
        padded: gl.constexpr = _power_of_2(steps)
        at_step = gl.arange(0, padded, layout=gl.SliceLayout(1, to_copy))
        group = gl.minimum(first_k + at_step * BLOCK_K, K - 1) // GROUP_K
        of_rows = weight_row // GROUP_N * ((K + GROUP_K - 1) // GROUP_K)
        of_rows = gl.convert_layout(of_rows, gl.SliceLayout(0, to_copy))
        row_scales = _share(gl.load(weight_scale + group[:, None] + of_rows[None, :]))
    if BIAS:
        added = gl.load(bias + weight_row).to(gl.float32)
    width: gl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    halves: gl.constexpr = _to_store(width, ROWS, WARPS)
    to_store: gl.constexpr = gl.SliceLayout(2, halves)
    column = tile * width + gl.arange(0, width, layout=gl.SliceLayout(1, to_store))
    if GAIN:
        gain = gl.load(next_gain + gl.minimum(column, columns - 1))

    if PDL:
        # Load a tile past the last row of x, to make the copy engine fetch the descriptor of x before the
        # wait. The load returns zeros and does not read x.
        mbarrier.expect(described, ROWS * BLOCK_K * bits // 8)
        tma.async_copy_global_to_shared(x_tiles, [ROWS, 0], described, xs.index(0))
        mbarrier.wait(described, 0)
        _signal("griddepcontrol.wait; mov.u32 $0, 0;")
    for stage in gl.static_range(early):
        k = first_k + stage * BLOCK_K
        tma.async_copy_global_to_shared(x_tiles, [0, k], ready.index(stage), xs.index(stage))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, mma))
    if SCALED:
        of_token = gl.load(x_scale + row, mask=row < rows, other=0.0)
    if GROUP_K:
        of_tokens = gl.arange(0, ROWS, layout=gl.SliceLayout(0, to_copy))[None, :]
        from_groups = x_scale + group[:, None] * scales_stride(rows) + of_tokens
        token_scales = _share(gl.load(from_groups, mask=of_tokens < rows, other=0.0))
    if PARTS:
        to_add_up: gl.constexpr = _to_add_up(ROWS, WARPS)
        part = gl.arange(0, PARTS, layout=gl.SliceLayout(1, to_add_up))[:, None]
        of_part = gl.arange(0, ROWS, layout=gl.SliceLayout(0, to_add_up))[None, :]
        there = (part < parts) & (of_part < rows)
        squared = gl.load(x_squares + part * rows + of_part, mask=there, other=0.0)
    token = gl.arange(0, ROWS, layout=gl.SliceLayout(0, to_store))
    inside = (column < columns)[:, None] & (token < rows)[None, :]
    at_token, at_column = token.to(gl.int64)[None, :], column[:, None]
    if RESIDUAL:
        before = gl.load(residual + at_token * residual_stride + at_column, mask=inside, other=0.0)

    acc = gl.zeros([BLOCK_N, ROWS], gl.float32, layout=mma)
    stage = 0
    phase = 0
    for step in range(steps):
        if GROUP_K:
            row_scale = row_scales.index(step).load(gl.SliceLayout(1, mma))
            token_scale = token_scales.index(step).load(gl.SliceLayout(0, mma))
        mbarrier.wait(ready.index(stage), phase)
        w = ws.index(stage).reshape([BLOCK_N, BLOCK_K])
        if GROUP_K:
            product = warpgroup_mma(w, xs.index(stage).permute([1, 0]), acc, use_acc=False)
        else:
            acc = warpgroup_mma(w, xs.index(stage).permute([1, 0]), acc)
        # The data in this stage is no longer needed. Refill the stage for step `step + STAGES`.
        more = step + STAGES < steps
        k = first_k + (step + STAGES) * BLOCK_K
        mbarrier.expect(ready.index(stage), stage_bytes, more)
        _fetch_weights(w_tiles, tile, k, ready.index(stage), ws.index(stage), more, BLOCK_N, SILU)
        tma.async_copy_global_to_shared(x_tiles, [0, k], ready.index(stage), xs.index(stage), more)
        if GROUP_K:
            acc += product * (row_scale[:, None] * token_scale[None, :])
        turn = stage == STAGES - 1
        stage = gl.where(turn, 0, stage + 1)
        phase = gl.where(turn, 1 - phase, phase)

    last = True
    if SPLIT > 1:
        size: gl.constexpr = BLOCK_N * ROWS
        sums = partials + tile * SPLIT * size
        cell = index[:, None] * ROWS + row[None, :]
        gl.store(sums + split * size + cell, acc)
        # All threads must have stored their sums before any thread increments the counter.
        tl.debug_barrier()
        last = gl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            gl.store(arrived + tile, 0)
            acc = gl.load(sums + cell, cache_modifier=".cg")
            for other in gl.static_range(1, SPLIT):
                acc += gl.load(sums + other * size + cell, cache_modifier=".cg")
    if last:
        if SCALED:
            acc = acc * of_token[None, :] * of_row[:, None]
        if PARTS:
            factor = gl.rsqrt(gl.sum(squared, axis=0) / K + eps)
            acc = acc * gl.convert_layout(factor, gl.SliceLayout(0, mma))[None, :]
        if BIAS:
            acc += added[:, None]
        if SILU:
            result = gl.convert_layout(_gated(acc, dtype, halves), to_store)
        else:
            result = gl.convert_layout(acc, to_store)
        if RESIDUAL:
            result += before.to(gl.float32)
        result = result.to(dtype)
        gl.store(out + at_token * out_stride + at_column, result, mask=inside)
        if GAIN:
            # Store the deferred norm, as `linear_rows._write_deferred_norm` does.
            x = result.to(gl.float32)
            product = (x * gain.to(gl.float32)[:, None]).to(dtype)
            gl.store(deferred_values + at_token * columns + at_column, product, mask=inside)
            squared_x = gl.sum(gl.where(inside, x * x, 0.0), axis=0)
            gl.store(squares + tile * rows + token, squared_x, mask=token < rows)
