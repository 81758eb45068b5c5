"""Contains the rules that divide the kernels of mixture-of-experts layers into programs.

This module does not import Triton, so plans can be created and tested on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from kernels.triton.linear_plans import HOPPER_SHARED

_SHARED_BESIDE = 4 << 10
"""Upper bound on the bytes of shared memory that a program uses in addition to its tiles."""

_REGISTERS, _MAX_REGISTERS = 1 << 16, 255
"""Number of registers of a multiprocessor, and maximum number of registers per thread (CUDA programming
guide)."""


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Describes how one of the experts' kernels is divided into programs."""

    form: Literal["gemv", "dot", "grouped"]
    """The kernel variant. In `gemv`, a program multiplies weight rows of one chosen expert by one token on
    the CUDA cores. In `dot`, a program multiplies weight rows of one expert by all tokens on the tensor
    cores, and keeps the results of the tokens that have chosen the expert. Both are in `experts_few`. In
    `grouped`, the tokens are sorted by expert (`experts_many`)."""
    rows: int
    """Number of tokens in a tile, including padding."""
    block_n: int
    """Number of weight rows per program or tile."""
    block_k: int
    """Number of columns per pipeline step."""
    warps: int
    stages: int = 1
    """Number of pipeline stages, that is, of steps whose weights can be in flight at the same time."""
    programs: int = 1
    """Number of programs per multiprocessor. Only used by `grouped`, whose programs each compute several
    tiles."""

    @property
    def max_registers(self) -> int:
        """Maximum number of registers per thread with which `programs` programs fit on a multiprocessor."""
        return min(_MAX_REGISTERS, _REGISTERS // (self.programs * self.warps * 32) // 8 * 8)


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """The plans of the experts' two GEMMs. Either both plans are `grouped`, or neither is."""

    up: ExpertsPlan
    down: ExpertsPlan

    @property
    def grouped(self) -> bool:
        return self.up.form == "grouped"


MAX_GEMV_TOKENS, MAX_FP8_GEMV_TOKENS = 2, 1
"""Maximum number of tokens for `gemv`, for 16-bit and for FP8 weights. With more tokens, several tokens
choose the same expert, and `gemv` reads its weights once for each of these tokens. The limit for FP8 weights
is lower, because `gemv` converts them on the CUDA cores."""

MAX_FEW_TOKENS = 64
"""Maximum number of tokens for `dot`. With more tokens, multiplying each expert by all tokens takes longer
than reading its weights."""

_QUANTISED = 1 << 14
"""Maximum number of a token's activations that a `gemv` program quantises in registers."""


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
    if tokens > MAX_FEW_TOKENS:
        # Tiles are sized for the mean number of tokens per expert. Experts with more tokens get several
        # tiles.
        mean = -(-tokens * top_k // experts)
        rows = min(128, max(16, _power_of_2(mean)))
        if rows == 128:
            one = ExpertsPlan("grouped", rows, 128, 128 // size, warps=8, stages=3, programs=2)
        else:
            one = ExpertsPlan("grouped", rows, 64, 256 // size, warps=4, stages=4, programs=3)
        return LayerPlans(_fit(one, hidden, size, shared_bytes), _fit(one, intermediate, size, shared_bytes))
    rows = max(16, _power_of_2(tokens))
    one = ExpertsPlan("dot", rows, 64, 256 // size, warps=4, stages=4 if rows < 64 else 3)
    up, down = (_fit(one, k, size, shared_bytes) for k in (hidden, intermediate))
    if tokens <= (MAX_GEMV_TOKENS if size > 1 else MAX_FP8_GEMV_TOKENS):
        # With FP8 weights, every program quantises the activations, so each program gets more weight rows.
        block_n = 4 if size > 1 else 8
        up = ExpertsPlan("gemv", 1, block_n, min(1024, _power_of_2(hidden)), warps=4)
        chosen = _power_of_2(top_k)
        if size > 1 or chosen * _power_of_2(intermediate) <= _QUANTISED:
            block_k = min(max(64, 2048 // chosen), _power_of_2(intermediate))
            down = ExpertsPlan("gemv", 1, block_n, block_k, warps=4)
    return LayerPlans(up, down)


def _fit(plan: ExpertsPlan, k: int, size: int, shared_bytes: int) -> ExpertsPlan:
    """Return the plan with a step size that divides K, and with as many stages as fit into shared memory."""
    block_k = plan.block_k
    while k % block_k and block_k > 32:
        block_k //= 2
    step = (plan.block_n + plan.rows) * block_k * size
    available = shared_bytes // plan.programs - _SHARED_BESIDE
    return replace(plan, block_k=block_k, stages=max(1, min(plan.stages, available // step)))


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
