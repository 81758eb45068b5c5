"""How each product of few rows is cut into programs, and where cuBLAS takes over: rules for shapes that no
table has (`linear_table`).

The figures are what won on an H200 with the shapes of an 8B decoder (docs/measurements). No Triton here:
plans can be made and tested anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from kernels import DeferredNorm

MAX_ROWS = 64
"""Above, the tensor cores' rate begins to count, and cuBLAS has better tiles. Twice as many where the weights
are e4m3 and outputs few: there the library reads them at a third of the memory's rate."""

MAX_SPLIT_PROGRAMS = 180
"""Most programs of a split product: splits double while there are fewer than half as many."""

HOPPER_SHARED = 227 << 10
"""Bytes of shared memory that a program can have on Hopper, for which these rules were made."""

_SHARED_BESIDE = 2 << 10
"""That a tiled program takes besides its tiles, at most."""

WORKSPACE_SUMS, WORKSPACE_TILES = 1 << 22, 512
"""Most float32 sums and tiles that the programs of a split product keep between them."""

ALIGNMENT = 64
"""K must be a multiple."""


@dataclass(frozen=True, slots=True)
class GemmPlan:
    """The programs of one product."""

    form: Literal["gemv", "stream", "dot", "tiles"]
    """gemv: one row on the ordinary cores; dot: tiles in shared memory (both in `linear_rows`). stream: one
    row, weights straight into tensor-core registers (`linear_stream`). tiles: as dot, with weights on their
    way before the kernel in front has ended; needs a Hopper GPU (`linear_tiles`)."""
    rows: int
    """Tokens of the tile, padding included."""
    block_n: int
    """Rows of the weight of a program."""
    block_k: int
    """Columns of a step: of a program; of a warp, in a stream."""
    warps: int
    stages: int = 1
    """Steps of weights under way."""
    split: int = 1
    """Programs that share K."""

    @property
    def tiled(self) -> bool:
        """Whether a program has a tile of all tokens, and may share a norm with another product."""
        return self.form in ("dot", "tiles")


@dataclass(frozen=True, slots=True)
class FusedOps:
    """What a product does on the way. Shapes: `kernels.triton.linear.linear`."""

    bias: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    norm_weight: torch.Tensor | None = None
    eps: float = 0.0
    silu_mul: bool = False
    squares: torch.Tensor | None = None
    next_gain: torch.Tensor | None = None
    deferred_norm: DeferredNorm | None = None


def fits_workspace(plan: GemmPlan, n: int) -> bool:
    """Whether the sums of a split product of `n` outputs have room."""
    tiles = -(-n // plan.block_n)
    return tiles <= WORKSPACE_TILES and tiles * plan.split * plan.block_n * plan.rows <= WORKSPACE_SUMS


def tile_bytes(plan: GemmPlan, itemsize: int) -> int:
    """Of shared memory, for the tiles of a program with weights of so many bytes each."""
    return plan.stages * (plan.block_n + plan.rows) * plan.block_k * itemsize


def choose(
    rows: int, n: int, k: int, dtype: torch.dtype, shared_bytes: int = HOPPER_SHARED
) -> GemmPlan | None:
    """The plan of `[rows, k] × [n, k]ᵀ` with weights of `dtype`, on a GPU whose programs can have so many
    bytes of shared memory; None where cuBLAS does better or we do not serve the shape."""
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
"""Outputs from which one wave of programs is a small part of all."""


def _gemv(n: int, k: int, dtype: torch.dtype) -> GemmPlan:
    whole = _power_of_2(k)
    if dtype.itemsize == 1:
        return GemmPlan("gemv", 1, 8, min(2048, whole), warps=4)
    # 4096 columns at once of many rows, or long ones; else two steps, of which the first is before the wait.
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
    columns = 128 * 2 // dtype.itemsize  # 256 bytes of a row
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
