"""The rules for dividing mixture-of-experts kernels into programs. This module does not import Triton, so
plans can be created and tested on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from kernels.triton.linear_plans import HOPPER_SHARED

_SHARED_BESIDE = 4 << 10
"""Upper bound, in bytes, on the shared memory that a program uses in addition to its tiles."""

_REGISTERS, _MAX_REGISTERS = 1 << 16, 255
"""Number of registers per multiprocessor, and the maximum number per thread (CUDA programming guide)."""


@dataclass(frozen=True, slots=True)
class ExpertsPlan:
    """Describes how a kernel that computes experts is divided into programs."""

    form: Literal["gemv", "stream", "dot", "grouped"]
    """The kernel variant. In `gemv`, a program multiplies weight rows of one chosen expert by one token on
    the CUDA cores. `stream` does the same with e4m3 weights on the tensor cores (`experts_stream`). In `dot`,
    a program multiplies weight rows of one expert by all tokens on the tensor cores, and keeps the results of
    the tokens that chose the expert (`experts_few`). In `grouped`, the tokens are sorted by expert
    (`experts_many`)."""
    rows: int
    """Number of tokens per tile, including padding."""
    block_n: int
    """Number of weight rows per program or tile."""
    block_k: int
    """Number of columns of K per pipeline step."""
    warps: int
    stages: int = 1
    """Pipeline stages: the number of steps whose weights can be in flight at the same time."""
    programs: int = 1
    """Number of programs per multiprocessor. Used only by `grouped`, whose programs compute several tiles
    each."""

    @property
    def quantises(self) -> bool:
        """Whether `down` itself quantises its input when the weights are quantised."""
        return self.form in ("gemv", "stream")

    @property
    def max_registers(self) -> int:
        """Maximum number of registers per thread at which `programs` programs still fit on a
        multiprocessor."""
        return min(_MAX_REGISTERS, _REGISTERS // (self.programs * self.warps * 32) // 8 * 8)


@dataclass(frozen=True, slots=True)
class LayerPlans:
    """The plans for the experts' two GEMMs. Either both are `grouped`, or neither is."""

    up: ExpertsPlan
    down: ExpertsPlan

    @property
    def grouped(self) -> bool:
        return self.up.form == "grouped"


@dataclass(frozen=True, slots=True)
class ExpertsShape:
    """The sizes of an MoE layer on one rank, which together with the token count determine the layer's
    kernels."""

    dtype: torch.dtype
    """Dtype of the experts' weights."""
    experts: int
    """Total number of experts on all ranks."""
    top_k: int
    hidden: int
    intermediate: int
    """Width of an expert's intermediate layer on this rank."""
    held: int
    """Number of experts on this rank."""
    group: int = 0
    """Columns of the blocks of `down`, whose blocks are the smallest, or 0 if weights have one scale per
    output. Tables have no entries for weights with one scale per block."""

    def __str__(self) -> str:
        held = "" if self.held == self.experts else f"/{self.held}"
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} {self.experts}x{self.top_k}{held} {self.hidden}x{self.intermediate}"


MAX_GEMV_TOKENS = 2
"""Maximum number of tokens for `gemv`. With more, several tokens choose the same expert, and `gemv` would
read that expert's weights once for each of them."""

MAX_FEW_TOKENS = 32
"""Maximum number of tokens for `dot`. With more, multiplying each expert by all tokens takes longer than
sorting the tokens."""

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
    group: int = 0,
) -> LayerPlans:
    """Return the plans for experts with weights of `dtype`, for a GPU with `shared_bytes` of shared memory
    per program. intermediate: width of an expert's intermediate layer on this rank. group: see
    `ExpertsShape.group`."""
    size = dtype.itemsize
    if group:
        plans = choose(tokens, top_k, experts, hidden, intermediate, dtype, shared_bytes)
        up, down = _for_blocks(plans.up, group), _for_blocks(plans.down, group)
        if tokens == 2 and down.form == "gemv":
            down = replace(down, block_k=group, warps=4)
        if down.rows > 64:
            down = replace(down, rows=64)  # `down` spills registers with larger tiles
        return LayerPlans(_fit(up, hidden, size, shared_bytes), _fit(down, intermediate, size, shared_bytes))
    if tokens > MAX_FEW_TOKENS:
        one = _grouped(tokens * top_k / experts, size)
        return LayerPlans(_fit(one, hidden, size, shared_bytes), _fit(one, intermediate, size, shared_bytes))
    rows = max(16, _power_of_2(tokens))
    one = other = ExpertsPlan("dot", rows, 64, 256 // size, warps=4, stages=3)
    if rows == 16:
        other = ExpertsPlan("dot", rows, 128, 128, warps=8, stages=3 if size > 1 else 4)
    up, down = _fit(one, hidden, size, shared_bytes), _fit(other, intermediate, size, shared_bytes)
    if tokens <= MAX_GEMV_TOKENS:
        up = ExpertsPlan("gemv", 1, 8, min(1024, _power_of_2(hidden)), warps=4)
        chosen = _power_of_2(top_k)
        if size > 1 or chosen * _power_of_2(intermediate) <= _QUANTISED:
            # A program loads about `columns` columns at a time, divided evenly among the chosen experts.
            columns, block_n, warps = (2048, 16, 8) if tokens == 1 or size == 1 else (1024, 8, 4)
            block_k = min(max(64, columns // chosen), _power_of_2(intermediate))
            down = ExpertsPlan("gemv", 1, block_n, block_k, warps)
    return LayerPlans(up, down)


def problem(plan: ExpertsPlan, tokens: int, shape: ExpertsShape, k: int, shared_bytes: int) -> str | None:
    """Return why a plan cannot compute the GEMM with matrices `[n, k]` for up to `tokens` tokens, or None if
    it can. Every plan supports any `n`."""
    if plan.form not in ("gemv", "stream", "dot", "grouped"):
        return f"form is {plan.form!r}; expected gemv, stream, dot or grouped"
    for name in ("rows", "block_n", "block_k", "warps", "stages", "programs"):
        value = getattr(plan, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            return f"{name} is {value!r}, not a positive integer"
        if name not in ("stages", "programs") and value & (value - 1):
            return f"{name} is {value}, not a power of two"
    if plan.form == "gemv":
        return None
    if plan.form == "stream":
        return _stream_problem(plan, shape, k)
    if plan.form == "dot" and plan.rows < tokens:
        return f"rows is {plan.rows}; the entry needs at least {tokens}"
    if plan.rows < 8 or plan.block_n < 16 * plan.warps or plan.warps % 4:
        return (
            f"a tile is {plan.rows} x {plan.block_n} with {plan.warps} warps; "
            f"expected at least 8 x {16 * plan.warps}, and a multiple of 4 warps"
        )
    if k % plan.block_k:
        return f"block_k is {plan.block_k}, which does not divide {k}"
    step = (plan.block_n + plan.rows) * plan.block_k * shape.dtype.itemsize
    if plan.programs * (plan.stages * step + _SHARED_BESIDE) > shared_bytes:
        return (
            f"stages is {plan.stages} and programs is {plan.programs}; "
            f"this needs more than {shared_bytes} bytes of shared memory"
        )
    return None


def _stream_problem(plan: ExpertsPlan, shape: ExpertsShape, k: int) -> str | None:
    if shape.dtype != torch.float8_e4m3fn:
        return f"form is 'stream', which needs float8_e4m3fn weights, not {shape.dtype}"
    if plan.block_n < 16 or plan.block_k < 64:
        return f"a tile is {plan.block_n} x {plan.block_k}; stream needs at least 16 x 64"
    up = k == shape.hidden
    if not up and (shape.top_k != plan.warps or plan.warps > 16):
        return f"warps is {plan.warps}; down needs one warp per choice ({shape.top_k}), and supports up to 16"
    step = plan.block_k * (plan.warps if up else 1)
    if k % step:
        return f"block_k is {plan.block_k}; {k} is not a multiple of {step}"
    return None


def _grouped(mean: float, size: int) -> ExpertsPlan:
    """Return the plan for experts that are each chosen by `mean` tokens on average. A tile holds about twice
    as many tokens, because an expert's weights are read again if its tokens do not fit into one tile."""
    if mean <= 8:
        return ExpertsPlan("grouped", 16, 64, 256 // size, warps=4, stages=3, programs=3)
    if mean <= 16:
        return ExpertsPlan("grouped", 32, 128, 128 // size, warps=4, stages=4, programs=2)
    if size == 1 and mean >= 256:
        return ExpertsPlan("grouped", 128, 128, 128, warps=4, stages=3, programs=2)
    if mean < 64 or (mean <= 64 and size == 1):
        return ExpertsPlan("grouped", 64, 128, 128 // size, warps=8, stages=4, programs=2)
    return ExpertsPlan("grouped", 128, 256, 128 // size, warps=8, stages=3)


def _for_blocks(plan: ExpertsPlan, group: int) -> ExpertsPlan:
    """Return the plan, adjusted so that the columns of each step belong to one block or, with `gemv`, are
    complete blocks. The values are the best measured on an H200 (docs/performance-notes-experts.md)."""
    if plan.form == "gemv":
        return replace(plan, block_n=8, block_k=max(plan.block_k, group))
    if plan.rows >= 64:
        rows = plan.rows if group >= 128 else 64
        return replace(plan, rows=rows, block_n=128, block_k=group, warps=4, programs=2, stages=4)
    block_k = min(plan.block_k, group)
    return replace(plan, block_k=block_k, stages=plan.stages * plan.block_k // block_k)


def _fit(plan: ExpertsPlan, k: int, size: int, shared_bytes: int) -> ExpertsPlan:
    """Return the plan, adjusted so that its step size divides K and as many stages as possible fit into
    shared memory."""
    block_k = plan.block_k
    while k % block_k and block_k > 32:
        block_k //= 2
    step = (plan.block_n + plan.rows) * block_k * size
    available = shared_bytes // plan.programs - _SHARED_BESIDE
    return replace(plan, block_k=block_k, stages=max(1, min(plan.stages, available // step)))


def _power_of_2(size: int) -> int:
    return 1 << (size - 1).bit_length()
