# mypy: allow-untyped-defs
"""Contains the Triton kernels for GEMMs with few rows: `gemv` for one row on the CUDA cores, and `dot` for
more rows on the tensor cores.

In `gemv`, each program multiplies a few weight rows by one token, which it normalises and quantises itself.
In `dot`, the weight is the 64-row operand of the tensor-core instruction. The tokens, padded to a power of
two, are the other operand. K may be split over programs (split-K). The last program to finish a tile adds the
float32 partial sums in the order of the splits, so results do not depend on timing.

`kernels.triton.linear` documents the fused operations and the rounding.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.block_scales import add_scaled, block_constants, load_scales, scale_offsets
from kernels.triton.fused import scales_stride
from kernels.triton.linear_plans import WORKSPACE_SUMS, WORKSPACE_TILES, FusedOps, GemmPlan, fits_workspace


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory shared by the programs of a split-K GEMM. Each stream needs its own workspace, which all of its
    GEMMs can share, because they run one after another. A GEMM that starts early (PDL) accesses the workspace
    only after the previous kernel has finished."""

    partials: torch.Tensor
    """The splits' partial sums, float32."""
    arrived: torch.Tensor
    """For each tile, the number of splits that have finished: int32. Zero between launches."""


def allocate_workspace(device: torch.device) -> Workspace:
    """Allocate a workspace large enough for every plan from `linear_plans.choose` or from a table."""
    partials = torch.empty(WORKSPACE_SUMS, dtype=torch.float32, device=device)
    return Workspace(partials, torch.zeros(WORKSPACE_TILES, dtype=torch.int32, device=device))


def check_workspace(plan: GemmPlan, n: int) -> None:
    """Raise ValueError if the workspace cannot hold the partial sums of a GEMM with `n` outputs."""
    if plan.split > 1 and not fits_workspace(plan, n):
        raise ValueError(
            f"the partial sums of {plan} for {n} outputs do not fit into the workspace "
            f"({WORKSPACE_SUMS} sums in {WORKSPACE_TILES} tiles)"
        )


# ── launching ────────────────────────────────────────────────────────────────────────────────────────


def check_results(out: torch.Tensor, residual: torch.Tensor | None, shape: tuple[int, int]) -> None:
    """Raise ValueError unless the result and any residual are contiguous and have this shape."""
    for name, tensor in (("out", out), ("residual", residual)):
        if tensor is not None and (tensor.shape != shape or not tensor.is_contiguous()):
            raise ValueError(f"{name} is {tuple(tensor.shape)}; expected {shape}, contiguous")


def launch_gemv(
    plan: GemmPlan,
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    fused: FusedOps,
    out: torch.Tensor,
    pdl: bool,
) -> None:
    """Launch the GEMV for one row. With `weight_scale`, the kernel quantises x."""
    _gemv[(triton.cdiv(weight.shape[0], plan.block_n),)](
        x,
        weight,
        weight_scale,
        fused.norm_weight,
        fused.bias,
        fused.residual,
        out,
        out.shape[1],
        fused.eps,
        K=x.shape[1],
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        WHOLE=triton.next_power_of_2(x.shape[1]),
        VECTOR=16 // weight.element_size(),
        NORM=fused.norm_weight is not None,
        QUANTISE=weight_scale is not None,
        SILU=fused.silu_mul,
        BIAS=fused.bias is not None,
        RESIDUAL=fused.residual is not None,
        PDL=pdl,
        num_warps=plan.warps,
        launch_pdl=pdl,
    )


def launch_dot(
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
    norm's values, and this GEMM multiplies its results by each token's factor.

    block: rows and columns of the weight's blocks, if it has one scale per block. x has one scale per group
      of as many columns, and any number of rows if `plan.split` is 1.
    """
    check_workspace(plan, weight.shape[0])
    tiles = triton.cdiv(weight.shape[0], plan.block_n)
    if block is not None:
        tiles *= triton.cdiv(x.shape[0], plan.rows)
    parts = 0 if fused.squares is None else fused.squares.shape[0]
    _dot[(tiles * plan.split,)](
        x,
        x_scale,
        weight,
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
        x.stride(0),
        0 if fused.residual is None else fused.residual.stride(0),
        out.stride(0),
        fused.eps,
        K=x.shape[1],
        ROWS=plan.rows,
        BLOCK_N=plan.block_n,
        BLOCK_K=plan.block_k,
        SPLIT=plan.split,
        PARTS=triton.next_power_of_2(parts),
        SCALED=weight_scale is not None and block is None,
        SILU=fused.silu_mul,
        BIAS=fused.bias is not None,
        RESIDUAL=fused.residual is not None,
        GAIN=fused.deferred_norm is not None,
        **block_constants(block),
        PDL=pdl,
        num_warps=plan.warps,
        num_stages=plan.stages,
        launch_pdl=pdl,
    )


# ── parts of the kernels ─────────────────────────────────────────────────────────────────────────────


@triton.jit
def weight_rows(tile, columns, BLOCK_N: tl.constexpr, SILU: tl.constexpr):
    """Return the weight rows of a tile as int64. With SwiGLU, the gate and up rows of a column are
    adjacent."""
    row = tl.arange(0, BLOCK_N)
    if SILU:
        column = tl.minimum(tile * (BLOCK_N // 2) + row // 2, columns - 1)
        return (column + (row % 2) * columns).to(tl.int64)
    return tl.minimum(tile * BLOCK_N + row, columns - 1).to(tl.int64)


@triton.jit
def gated(acc, dtype: tl.constexpr):
    """Return silu(gate) × up, `[n / 2, rows]` float32, for the sums `acc [n, rows]` of the rows returned by
    `weight_rows`. The operands are rounded to `dtype` as in `reference.silu_mul`."""
    width: tl.constexpr = acc.shape[0] // 2
    rows: tl.constexpr = acc.shape[1]
    gate, up = tl.split(tl.permute(tl.reshape(acc, [width, 2, rows]), 0, 2, 1))
    return swiglu(gate, up, dtype)


@triton.jit
def swiglu(gate, up, dtype: tl.constexpr):
    """Return silu(gate) × up in float32, rounded as in `gated`."""
    gate = gate.to(dtype).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    return silu * up.to(dtype).to(tl.float32)


@triton.jit
def _finish(
    acc,
    tile,
    bias,
    residual,
    out,
    rows,
    columns,
    residual_stride,
    out_stride,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
):
    """Apply the epilogue to the sums `acc [BLOCK_N, ROWS]`, store the result and return it."""
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.arange(0, ROWS)
    if BIAS:
        weight_row = weight_rows(tile, columns, BLOCK_N, SILU)
        acc += tl.load(bias + weight_row).to(tl.float32)[:, None]
    width: tl.constexpr = BLOCK_N // 2 if SILU else BLOCK_N
    column = tile * width + tl.arange(0, width)
    if SILU:
        acc = gated(acc, dtype)
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    if RESIDUAL:
        before = residual + row.to(tl.int64)[None, :] * residual_stride + column[:, None]
        acc += tl.load(before, mask=inside, other=0.0).to(tl.float32)
    to = out + row.to(tl.int64)[None, :] * out_stride + column[:, None]
    result = acc.to(dtype)
    tl.store(to, result, mask=inside)
    return result


@triton.jit
def _write_deferred_norm(
    x, gain, tile, deferred_values, squares, rows, columns, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Store the deferred norm of one result tile `x [BLOCK_N, ROWS]`, computed with the following norm's
    `gain [BLOCK_N]`."""
    row = tl.arange(0, ROWS)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (column < columns)[:, None] & (row < rows)[None, :]
    x = x.to(tl.float32)
    to = deferred_values + row.to(tl.int64)[None, :] * columns + column[:, None]
    tl.store(to, (x * gain.to(tl.float32)[:, None]).to(deferred_values.dtype.element_ty), mask=inside)
    squared = tl.sum(tl.where(inside, x * x, 0.0), axis=0)
    tl.store(squares + tile * rows + row, squared, mask=row < rows)


@triton.jit
def widen(values):
    """Convert values to float32. e4m3 values are first converted to float16, because a single instruction
    converts two of them."""
    if values.dtype.primitive_bitwidth == 8:
        values = values.to(tl.float16)
    return values.to(tl.float32)


# ── kernels ──────────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["rows", "parts"])
def _dot(
    x,
    x_scale,
    weight,
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
    x_stride,
    residual_stride,
    out_stride,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SPLIT: tl.constexpr,
    PARTS: tl.constexpr,
    SCALED: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GAIN: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_N weight rows by all tokens. Each program sums over one of SPLIT equal parts of K.

    With GROUP_K, weights have a scale per block of GROUP_N rows and GROUP_K columns, and tokens have a scale
    per group of GROUP_K columns. A program then multiplies its weight rows by ROWS tokens. Programs with the
    same weight rows are adjacent.
    """
    depth: tl.constexpr = K // SPLIT
    program = tl.program_id(0)
    if GROUP_K:
        token_tiles = (rows + ROWS - 1) // ROWS
        first = (program % token_tiles).to(tl.int64) * ROWS
        program = program // token_tiles
        stride = scales_stride(rows)
        rows = tl.minimum(rows - first, ROWS)
        x += first * x_stride
        x_scale += first
        out += first * out_stride
        if RESIDUAL:
            residual += first * residual_stride
    tile = program // SPLIT
    split = program % SPLIT
    weight_row = weight_rows(tile, columns, BLOCK_N, SILU)
    k = split * depth + tl.arange(0, BLOCK_K)
    row = tl.arange(0, ROWS)
    live = row < rows
    weights = weight + weight_row[:, None] * K + k[None, :]
    xs = x + row.to(tl.int64)[:, None] * x_stride + k[None, :]
    if GAIN:
        gain = tl.load(next_gain + weight_row)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if PARTS:
        # Load the squares before the GEMM and sum them afterwards, so that the loads overlap with the GEMM.
        which = tl.arange(0, PARTS)
        there = (which < parts)[:, None] & live[None, :]
        squared = tl.load(x_squares + which[:, None] * rows + row[None, :], mask=there, other=0.0)
    if GROUP_K:
        one: tl.constexpr = GROUP_N % BLOCK_N == 0 and not SILU
        of_rows = weight_scale + scale_offsets(0, weight_row, 0, K, GROUP_N, GROUP_K, one)
        of_tokens = x_scale + row
        begin = split * depth
        row_scale, token_scale = load_scales(of_rows, of_tokens, stride, begin, K, GROUP_K, live)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for at in tl.range(0, depth, BLOCK_K):
        w = tl.load(weights + at, eviction_policy="evict_first")
        part = tl.load(xs + at, mask=live[:, None], other=0.0)
        if GROUP_K:
            after = begin + at + BLOCK_K
            scales = load_scales(of_rows, of_tokens, stride, after, K, GROUP_K, live)
            acc = add_scaled(acc, w, part, row_scale, token_scale)
            row_scale, token_scale = scales
        else:
            acc = tl.dot(w, tl.trans(part), acc, input_precision="ieee")

    last = True
    if SPLIT > 1:
        size: tl.constexpr = BLOCK_N * ROWS
        sums = partials + tile * SPLIT * size
        cell = tl.arange(0, BLOCK_N)[:, None] * ROWS + row[None, :]
        tl.store(sums + split * size + cell, acc)
        # All threads must have stored their sums before any thread increments the counter.
        tl.debug_barrier()
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == SPLIT - 1
        if last:
            tl.store(arrived + tile, 0)
            acc = tl.load(sums + cell, cache_modifier=".cg")
            for other in tl.static_range(1, SPLIT):
                acc += tl.load(sums + other * size + cell, cache_modifier=".cg")
    if last:
        if SCALED:
            of_token = tl.load(x_scale + row, mask=live, other=0.0)
            acc = acc * of_token[None, :] * tl.load(weight_scale + weight_row)[:, None]
        if PARTS:
            acc = acc * tl.rsqrt(tl.sum(squared, axis=0) / K + eps)[None, :]
        result = _finish(
            acc,
            tile,
            bias,
            residual,
            out,
            rows,
            columns,
            residual_stride,
            out_stride,
            ROWS,
            BLOCK_N,
            SILU,
            BIAS,
            RESIDUAL,
        )
        if GAIN:
            _write_deferred_norm(result, gain, tile, deferred_values, squares, rows, columns, ROWS, BLOCK_N)


@triton.jit
def _gemv(
    x,
    weight,
    weight_scale,
    norm_weight,
    bias,
    residual,
    out,
    columns,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    VECTOR: tl.constexpr,
    NORM: tl.constexpr,
    QUANTISE: tl.constexpr,
    SILU: tl.constexpr,
    BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_N weight rows by one token, over all of K. The first block of weights is loaded before
    waiting for the previous kernel."""
    tile = tl.program_id(0)
    weight_row = weight_rows(tile, columns, BLOCK_N, SILU)
    k = tl.arange(0, BLOCK_K)
    weights = weight + weight_row[:, None] * K + k[None, :]
    ragged: tl.constexpr = K % BLOCK_K != 0
    if ragged:
        w = tl.load(weights, mask=(k < K)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        w = tl.load(weights, eviction_policy="evict_first")
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    inverse = 1.0
    if NORM or QUANTISE:
        # Load the whole row at once, because a loop over parts of it would need more registers.
        column = tl.arange(0, WHOLE)
        row = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
        if NORM:
            inverse = tl.rsqrt(tl.sum(row * row, axis=0) / K + eps)
            if QUANTISE:
                row *= tl.load(norm_weight + column, mask=column < K, other=0.0).to(tl.float32)
        if QUANTISE:
            most = tl.max(tl.abs(row), axis=0)
            if NORM:
                most = (most * inverse).to(x.dtype.element_ty).to(tl.float32)
            scale = tl.div_rn(most, 448.0)
            factor = tl.div_rn(448.0, tl.where(most > 0.0, most, 1.0))

    # First sum the values in each thread's 16 bytes, which requires no exchange between threads.
    acc = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
    for at in tl.static_range(0, K, BLOCK_K):
        inside = at + k < K
        if at > 0:
            if ragged:
                w = tl.load(weights + at, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
            else:
                w = tl.load(weights + at, eviction_policy="evict_first")
        part = tl.load(x + at + k, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            gain = tl.load(norm_weight + at + k, mask=inside, other=0.0).to(tl.float32)
            part = (part * gain * inverse).to(x.dtype.element_ty).to(tl.float32)
        if QUANTISE:
            part = widen((part * factor).to(weight.dtype.element_ty))
        products = widen(w) * part[None, :]
        acc += tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // VECTOR, VECTOR]), axis=2)
    total = tl.sum(acc, axis=1)
    if QUANTISE:
        total = total * scale * tl.load(weight_scale + weight_row)
    _finish(total[:, None], tile, bias, residual, out, 1, columns, 0, 0, 1, BLOCK_N, SILU, BIAS, RESIDUAL)
