"""The rules for GEMMs of few rows without a measured entry (`linear_table`): how a GEMM is divided into
programs, and when cuBLAS computes it.

The constants are the best values on an H200 for the shapes of an 8B decoder
(docs/performance-notes-linear.md). This module does not import Triton, so plans can be made and tested on any
machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from kernels import DeferredNorm

MAX_ROWS = 64
"""Largest number of rows of a plan. Above it the GEMM is no longer limited by memory, and cuBLAS has better
tiles. The limit is twice as high for e4m3 weights with few outputs, which cuBLAS reads at a third of the
memory bandwidth."""

MAX_SPLIT_PROGRAMS = 180
"""Upper limit on the number of programs of a split-K GEMM: the split doubles while there are fewer than half
as many programs."""

HOPPER_SHARED = 227 << 10
"""Bytes of shared memory available to a program on Hopper, for which these rules were made."""

_SHARED_BESIDE = 2 << 10
"""Upper bound on the shared memory in bytes that a program uses besides its tiles."""

WORKSPACE_SUMS, WORKSPACE_TILES = 1 << 22, 512
"""Capacity of the split-K workspace: number of float32 partial sums, and number of tiles."""

ALIGNMENT = 64
"""K must be a multiple of this number."""


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """How one GEMM is divided into programs."""

    form: Literal["gemv", "stream", "dot", "tiles"]
    """The kernel variant. gemv: one row on the CUDA cores; dot: tiles in shared memory (both in
    `linear_rows`). stream: one row, weights loaded directly into tensor-core registers (`linear_stream`).
    tiles: like dot, but weight loads start before the previous kernel has ended; needs a Hopper GPU
    (`linear_tiles`)."""
    rows: int
    """Number of tokens in the tile, padding included."""
    block_n: int
    """Number of weight rows per program."""
    block_k: int
    """Number of columns (of K) per pipeline step: of a program, or of a warp in a stream."""
    warps: int
    stages: int = 1
    """Number of pipeline stages: steps whose weights are being loaded."""
    split: int = 1
    """Number of programs that divide K among them (split-K)."""

    @property
    def tiled(self) -> bool:
        """Whether a program has a tile with all tokens, so that the GEMM can share a norm with another
        GEMM."""
        return self.form in ("dot", "tiles")


@dataclass(frozen=True, slots=True)
class FusedOps:
    """Operations that a GEMM fuses into its prologue and epilogue. `kernels.triton.linear.linear` documents
    the shapes."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    eps: float = 0.0
    silu_mul: bool = False
    squares: torch.Tensor | None = None
    next_gain: torch.Tensor | None = None
    deferred_norm: DeferredNorm | None = None


def fits_workspace(plan: GemmPlan, n: int) -> bool:
    """Return whether the workspace has room for the partial sums of a split-K GEMM with `n` outputs."""
    tiles = -(-n // plan.block_n)
    return tiles <= WORKSPACE_TILES and tiles * plan.split * plan.block_n * plan.rows <= WORKSPACE_SUMS


def tile_bytes(plan: GemmPlan, itemsize: int) -> int:
    """Return the bytes of shared memory that a program's tiles take with weights of `itemsize` bytes."""
    return plan.stages * (plan.block_n + plan.rows) * plan.block_k * itemsize


def choose(
    rows: int, n: int, k: int, dtype: torch.dtype, shared_bytes: int = HOPPER_SHARED
) -> GemmPlan | None:
    """Return the plan of `[rows, k] × [n, k]ᵀ` with weights of `dtype`, for a GPU with `shared_bytes` of
    shared memory per program. None: cuBLAS is faster, or the kernels do not support the shape."""
    if dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return None
    most = 2 * MAX_ROWS if dtype.itemsize == 1 and n < _MANY else MAX_ROWS
    if not 1 <= rows <= most or k % ALIGNMENT or n < 16:
        return None
    if rows > 1:
        plan = _dot(rows, n, k, dtype)
        while tile_bytes(plan, dtype.itemsize) + _SHARED_BESIDE > shared_bytes:
            plan = replace(plan, stages=plan.stages - 1)
        return plan
    return _stream(n, k) if dtype.itemsize == 1 and k < 8192 else _gemv(n, k, dtype)


_MANY = 16384
"""Number of outputs from which one wave of programs is a small part of the whole GEMM."""


def _gemv(n: int, k: int, dtype: torch.dtype) -> GemmPlan:
    whole = _power_of_2(k)
    if dtype.itemsize == 1:
        return GemmPlan("gemv", 1, 8, min(2048, whole), warps=4)
    # For weights with many or long rows, a program loads 4096 columns at once. Otherwise it takes two steps,
    # and loads the first one before the wait for the previous kernel.
    block_k = 4096 if k >= 8192 or (n >= _MANY and k >= 4096) else max(256, min(2048, whole // 2))
    return GemmPlan("gemv", 1, 4, min(block_k, whole), warps=4)


def _stream(n: int, k: int) -> GemmPlan:
    plan = GemmPlan("stream", 1, 16, 256, warps=4, stages=3 if n <= 4096 else 2)
    while k % (plan.warps * plan.block_k) and plan.block_k > 64:
        plan = replace(plan, block_k=plan.block_k // 2)
    while k % (plan.warps * plan.block_k):
        plan = replace(plan, warps=plan.warps // 2)
    return plan


def _dot(rows: int, n: int, k: int, dtype: torch.dtype) -> GemmPlan:
    padded = max(16, _power_of_2(rows))
    columns = 128 * 2 // dtype.itemsize  # a tile loads 256 bytes of a row
    if n >= _MANY:
        if padded == 64 or (padded == 32 and dtype.itemsize == 2):
            plan = GemmPlan("dot", padded, 128, columns, warps=8, stages=4)
        else:
            plan = GemmPlan("dot", padded, 64, columns, warps=4, stages=4)
    else:
        split = 1
        while (
            -(-n // 64) * split < MAX_SPLIT_PROGRAMS // 2 and split < 8 and k % (2 * split * ALIGNMENT) == 0
        ):
            split *= 2
        stages = {16: 6, 32: 5, 64: 5, 128: 4}[padded]
        plan = GemmPlan("dot", padded, 64, columns, warps=4, stages=stages, split=split)
    while k // plan.split % plan.block_k:
        plan = replace(plan, block_k=plan.block_k // 2)
    return plan


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
