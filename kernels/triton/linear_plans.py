"""The rules for GEMMs that have no entry in a `linear_table`. The rules either select cuBLAS or determine how
the GEMM is divided into programs.

The constants are the best values measured on an H200 for the shapes of an 8B decoder
(docs/performance-notes-linear.md). This module does not import Triton, so plans can be created and tested on
any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from kernels import DeferredNorm

MAX_ROWS = 64
"""Maximum number of rows for which a plan is chosen. With more, the GEMM is no longer limited by memory
bandwidth, and cuBLAS is faster. For e4m3 weights with few outputs, the limit is twice as high, because cuBLAS
reads them at only a third of the memory bandwidth. Weights with one scale per block have other rules
(`choose`)."""

MAX_SPLIT_PROGRAMS = 180
"""Maximum number of programs for a split-K GEMM. The number of splits is doubled until another doubling would
exceed this limit."""

HOPPER_SHARED = 227 << 10
"""Shared memory, in bytes, available to a program on a Hopper GPU. The rules were derived from measurements
on Hopper GPUs."""

MULTIPROCESSORS = 132
"""Number of multiprocessors of an H100 or H200."""

_SHARED_BESIDE = 2 << 10
"""Upper bound, in bytes, on the shared memory that a program uses in addition to its tiles."""

WORKSPACE_SUMS, WORKSPACE_TILES = 1 << 22, 512
"""Capacity of the split-K workspace: number of float32 partial sums, and number of tiles."""

ALIGNMENT = 64
"""K, the inner dimension of a GEMM, must be a multiple of this."""


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """Describes how one GEMM is divided into GPU programs."""

    form: Literal["gemv", "stream", "dot", "tiles"]
    """The kernel variant. `gemv` computes one row on the CUDA cores, and `dot` computes several rows from
    tiles in shared memory (both in `linear_rows`). `stream` computes one row, with weights loaded directly
    into tensor-core registers (`linear_stream`). `tiles` is similar to `dot`, but its weight loads start
    before the previous kernel has ended. It needs a Hopper GPU (`linear_tiles`)."""
    rows: int
    """Number of tokens per tile, including padding."""
    block_n: int
    """Number of weight rows per program."""
    block_k: int
    """Number of columns of K per pipeline step: per warp for `stream`, per program for the other kernels."""
    warps: int
    stages: int = 1
    """Pipeline stages: the number of steps whose weights can be in flight at the same time."""
    split: int = 1
    """Number of programs among which K is split (split-K)."""

    @property
    def tiled(self) -> bool:
        """Whether each program computes a tile of several tokens. If not, the GEMM cannot share a norm."""
        return self.form in ("dot", "tiles")

    @property
    def k_divisor(self) -> int:
        """Number by which K must be divisible, because the kernel has no masks for columns past the last."""
        if self.form == "gemv":
            return 1
        return self.block_k * (self.warps if self.form == "stream" else self.split)


@dataclass(frozen=True, slots=True)
class FusedOps:
    """Arguments of the operations fused into a GEMM's prologue and epilogue, documented in
    `kernels.triton.linear.linear`."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    eps: float = 0.0
    silu_mul: bool = False
    squares: torch.Tensor | None = None
    next_gain: torch.Tensor | None = None
    deferred_norm: DeferredNorm | None = None


def fits_workspace(plan: GemmPlan, n: int) -> bool:
    """Return whether the workspace can hold the partial sums of a split-K GEMM with `n` outputs."""
    tiles = -(-n // plan.block_n)
    return tiles <= WORKSPACE_TILES and tiles * plan.split * plan.block_n * plan.rows <= WORKSPACE_SUMS


def tile_bytes(plan: GemmPlan, itemsize: int) -> int:
    """Return the shared memory, in bytes, taken up by a program's tiles. Each number takes `itemsize`
    bytes."""
    return plan.stages * (plan.block_n + plan.rows) * plan.block_k * itemsize


def choose(
    rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
    shared_bytes: int = HOPPER_SHARED,
    block: tuple[int, int] | None = None,
    hopper: bool = False,
) -> GemmPlan | None:
    """Return the rule-based plan of the GEMM `[rows, k] × [n, k]ᵀ` with weights of `dtype`, on a GPU with
    `shared_bytes` of shared memory per program. Return None if cuBLAS is faster or the kernels do not support
    the shape.

    block: rows and columns of the weight's blocks, if it has one scale per block. `dot` computes such weights
      for any number of rows. On Hopper GPUs, `tiles` and cuBLAS are faster, but do not support every shape.
    hopper: whether the GPU is a Hopper GPU.
    """
    if block is not None:
        if hopper and rows > _most_rows_of_tiles(n, k) and _library_supports_blocks(n, k, block):
            return None
        return _fit(_blocks(rows, n, k, dtype, block[1], hopper), dtype, shared_bytes)
    if dtype not in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        return None
    most = 2 * MAX_ROWS if dtype.itemsize == 1 and n < _MANY else MAX_ROWS
    if not 1 <= rows <= most or k % ALIGNMENT or n < 16:
        return None
    if rows > 1:
        return _fit(_dot(rows, n, k, dtype), dtype, shared_bytes)
    return _stream(n, k) if dtype.itemsize == 1 and k < 8192 else _gemv(n, k, dtype)


_MANY = 16384
"""Minimum number of outputs for which a GEMM is assumed to need many waves of programs."""


def _gemv(n: int, k: int, dtype: torch.dtype) -> GemmPlan:
    whole = _power_of_2(k)
    if dtype.itemsize == 1:
        return GemmPlan("gemv", 1, 8, min(2048, whole), warps=4)
    # If the weight has many or long rows, a program loads up to 4096 columns at a time. Otherwise, K is
    # divided into at least two steps, so that the first step's weights can be loaded before waiting for the
    # previous kernel.
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
    columns = 128 * 2 // dtype.itemsize  # a program loads 256 bytes of a row at a time
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


def _library_supports_blocks(n: int, k: int, block: tuple[int, int]) -> bool:
    """Return whether cuBLAS on a Hopper GPU supports a weight with these blocks. CUDA must be version 12.9 or
    later, and each row of the weight's scales must have a multiple of 16 bytes. If torch was built without
    CUDA, kernels are compiled for another machine, and the function assumes that its version suffices."""
    version = torch.version.cuda
    new = version is None or tuple(int(part) for part in version.split(".")[:2]) >= (12, 9)
    return new and block == (128, 128) and n % 128 == 0 and k % 512 == 0


def _most_rows_of_tiles(n: int, k: int) -> int:
    """Return the maximum number of rows for which `tiles` multiplies a weight with blocks faster than cuBLAS,
    which has too few programs for a weight with few, long rows."""
    return 2 * MAX_ROWS if k >= 8192 and n <= 4096 else MAX_ROWS


def _tiles(rows: int, n: int, k: int) -> GemmPlan:
    """Return the plan of `tiles` for a weight with one scale per block. Two programs fit on a multiprocessor.
    The split of K is doubled as long as there are at most two programs per multiprocessor (1.5 with more than
    16 rows, whose partial sums take longer), and also if a program would have more than 32 steps."""
    plan = GemmPlan("tiles", max(8, _power_of_2(rows)), 64, 128, warps=4)
    most_programs = MULTIPROCESSORS * (4 if rows <= 16 else 3) // 2
    while k % (2 * plan.split * 128) == 0:
        more = replace(plan, split=2 * plan.split)
        few = -(-n // plan.block_n) * more.split <= most_programs and k // more.split >= 4 * 128
        if not (few or k // plan.split > 32 * 128) or not fits_workspace(more, n):
            break
        plan = more
    scales = _power_of_2(k // plan.split // 128) * (plan.block_n + plan.rows) * 4
    available = HOPPER_SHARED // 2 - _SHARED_BESIDE - scales
    return replace(plan, stages=max(1, min(12, available // tile_bytes(plan, 1))))


def _blocks(rows: int, n: int, k: int, dtype: torch.dtype, group: int, hopper: bool) -> GemmPlan:
    """Return the plan for a weight with one scale per block: one of `tiles` or of `dot`. Each step's columns
    belong to one block. `dot` computes many rows in tiles of 64. Larger tiles would spill registers, which
    hold each step's partial sums in addition to the running total."""
    if hopper and rows <= _most_rows_of_tiles(n, k) and group % 128 == 0 and k % 128 == 0:
        return _tiles(rows, n, k)
    if rows <= MAX_ROWS:
        plan = _dot(rows, n, k, dtype)
    else:
        few = -(-n // 128) * -(-rows // 64) < MAX_SPLIT_PROGRAMS // 2
        plan = GemmPlan("dot", 64, 64, 128, warps=4, stages=4)
        if not few:
            plan = replace(plan, block_n=128, warps=8)
    block_k = min(plan.block_k, group)
    while k // plan.split % block_k:
        block_k //= 2
    return replace(plan, block_k=block_k)


def _fit(plan: GemmPlan, dtype: torch.dtype, shared_bytes: int) -> GemmPlan:
    """Return the plan with as many of its stages as fit into shared memory."""
    while tile_bytes(plan, dtype.itemsize) + _SHARED_BESIDE > shared_bytes:
        plan = replace(plan, stages=plan.stages - 1)
    return plan


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
