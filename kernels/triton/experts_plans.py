"""The rules that divide the kernels of mixture-of-experts layers into programs.

This module does not import Triton, so plans can be made and tested on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from kernels.triton.linear_plans import HOPPER_SHARED

_REGISTERS, _MAX_REGISTERS = 1 << 16, 255
"""Registers of a multiprocessor, and the largest number of registers of a thread (CUDA programming guide)."""


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """How one kernel of the experts is divided into programs."""

    form: Literal["gemv", "dot", "grouped"]
    """The kernel variant. gemv: a program multiplies weight rows of one chosen expert by one token on the
    CUDA cores. dot: a program multiplies weight rows of one expert by all tokens on the tensor cores, and
    keeps the results of the tokens that have chosen the expert (both in `experts_few`). grouped: tokens are
    sorted by expert (`experts_many`)."""
    rows: int
    """Number of tokens in the tile, padding included."""
    block_n: int
    """Number of weight rows per program or tile."""
    block_k: int
    """Number of columns per pipeline step."""
    warps: int
    stages: int = 1
    """Number of pipeline stages: steps whose weights are being loaded."""
    programs: int = 1
    """Number of programs per multiprocessor, for `grouped`, whose programs compute several tiles."""

    @property
    def max_registers(self) -> int:
        """Number of registers per thread with which `programs` programs fit on a multiprocessor."""
        return min(_MAX_REGISTERS, _REGISTERS // (self.programs * self.warps * 32) // 8 * 8)


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """The plans of the two GEMMs of the experts. Either both are `grouped` or none."""

    up: ExpertsPlan
    down: ExpertsPlan

    @property
    def grouped(self) -> bool:
        return self.up.form == "grouped"


MAX_GEMV_TOKENS = 2
"""Largest number of tokens for `gemv`. With more tokens, several tokens choose the same expert, whose weights
`gemv` reads again for each of them."""

MAX_FEW_TOKENS = 64
"""Largest number of tokens for `dot`. With more tokens, multiplying each expert by all tokens takes longer
than reading its weights."""


def choose(
    tokens: int,
    top_k: int,
    experts: int,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    shared_bytes: int = HOPPER_SHARED,
) -> LayerPlans:
    """Return the plans for experts with weights of `dtype`, for a GPU with `shared_bytes` of shared memory
    per program. intermediate: width of one expert on this rank."""
    size = dtype.itemsize
    if tokens <= MAX_GEMV_TOKENS:
        # FP8: each program quantises the activations of `down` itself, so it has more weight rows.
        up = ExpertsPlan("gemv", 1, 4 if size > 1 else 8, min(1024, _power_of_2(hidden)), warps=4)
        down = ExpertsPlan("gemv", 1, 4 if size > 1 else 8, min(256, _power_of_2(intermediate)), warps=4)
        return LayerPlans(up, down)
    if tokens <= MAX_FEW_TOKENS:
        rows = max(16, _power_of_2(tokens))
        one = ExpertsPlan("dot", rows, 64, 0, warps=4, stages=4)
    else:
        # Tiles fit the mean number of tokens of an expert; an expert with more tokens gets several tiles.
        mean = -(-tokens * top_k // experts)
        rows = min(128, max(16, _power_of_2(mean)))
        if rows == 128:
            one = ExpertsPlan("grouped", rows, 128, 64 * 2 // size, warps=8, stages=3, programs=2)
        else:
            one = ExpertsPlan("grouped", rows, 64, 0, warps=4, stages=4, programs=3)
    return LayerPlans(_fit(one, hidden, size, shared_bytes), _fit(one, intermediate, size, shared_bytes))


def _fit(plan: ExpertsPlan, k: int, size: int, shared_bytes: int) -> ExpertsPlan:
    """Return the plan with steps of 256 bytes, or less where K or the shared memory requires less."""
    block_k = plan.block_k or 256 // size
    while k % block_k and block_k > 64 // size:
        block_k //= 2
    step = (plan.block_n + plan.rows) * block_k * size
    available = shared_bytes // plan.programs - (4 << 10)
    stages = max(1, min(plan.stages, available // step, -(-k // block_k)))
    return ExpertsPlan(plan.form, plan.rows, plan.block_n, block_k, plan.warps, stages, plan.programs)


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
