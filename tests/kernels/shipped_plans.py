"""The plans of all shipped tables without duplicates, and GEMMs that use them. The parity and PDL tests and
the sanitizer's exercise iterate over these plans, so they cover every newly tuned table exactly as it is
shipped.

Each GEMM has the row counts and K of a shipped plan, but only two and a half tiles of outputs. It fuses as
many operations as its form can fuse at the same time.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels import DeferredNorm
from kernels.triton import linear, linear_table
from kernels.triton.linear_plans import GemmPlan
from tests.kernels.linear_cases import DEVICE, Case, Fp8Case

FP8 = torch.float8_e4m3fn
PARTS = 7
"""Number of partial sums of squares that the preceding GEMM is assumed to write."""


@dataclass(frozen=True, slots=True)
class Shipped:
    """A shipped plan for weights of `dtype`."""

    dtype: torch.dtype
    plan: GemmPlan
    uses: tuple[tuple[int, int], ...]
    """Sorted `(max_rows, k)` pairs, one for each GEMM that uses this plan."""

    def __str__(self) -> str:
        p = self.plan
        tile = f"{p.form} {p.rows}x{p.block_n}x{p.block_k} warps {p.warps} stages {p.stages} split {p.split}"
        return f"{str(self.dtype).removeprefix('torch.')} {tile}"

    @property
    def cases(self) -> list[tuple[int, int]]:
        """Return the pairs of row count and K to test. They include the largest and the smallest row count of
        each range for which a table uses the plan. The smallest is one more than half of the largest."""
        return sorted({(rows, k) for most, k in self.uses for rows in (most, most // 2 + 1)})

    @property
    def short_k(self) -> int:
        """Return a K that takes `stages` + 2 steps of the pipeline, or the smallest shipped K if that is
        smaller."""
        plan = self.plan
        step = {"gemv": plan.block_k, "stream": plan.warps * plan.block_k}
        least = (plan.stages + 2) * step.get(plan.form, plan.split * plan.block_k)
        return min(least, *(k for _, k in self.uses))


def shipped_plans() -> list[Shipped]:
    """Return the plans of all shipped tables. Raises TableError if a table is invalid."""
    uses: dict[tuple[torch.dtype, GemmPlan], set[tuple[int, int]]] = {}
    for path in sorted(linear_table.FOLDER.glob("*.json")):
        for product, entries in linear_table.read_table(path).products.items():
            for most, entry in entries.items():
                if entry.plan is not None:
                    uses.setdefault((product.dtype, entry.plan), set()).add((most, product.k))
    return [Shipped(dtype, plan, tuple(sorted(found))) for (dtype, plan), found in uses.items()]


class Product:
    """A GEMM with a shipped plan. `dtype` is the dtype of the tokens. Weights have the same dtype, unless
    they are e4m3."""

    def __init__(
        self, shipped: Shipped, rows: int, k: int, silu: bool, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.plan, self.silu = shipped.plan, silu
        # The result has two and a half tiles. The tiles of one-row plans are so narrow that results may start
        # at any alignment.
        n = 96 if silu and not self.plan.tiled else self.plan.block_n * 5 // 2
        extras = ("norm", "bias", "silu" if silu else "residual")
        if shipped.dtype == FP8:
            self.case: Case = Fp8Case(rows, n, k, extras, dtype, FP8)
        else:
            self.case = Case(rows, n, k, extras, dtype)
        self.shares = self.plan.tiled and shipped.dtype != FP8
        self.gains = self.shares and not silu
        self.gain = self.case.weight[:, 0].contiguous()
        self.workspace = linear.allocate_workspace(DEVICE)
        self.inputs: dict[str, torch.Tensor | None] = {"x": self.case.x, "residual": self.case.residual}
        if self.shares:
            half = self.case.half_normed(PARTS)
            self.inputs |= {"x": half.values, "squares": half.squares}

    def run(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        out: torch.Tensor,
        squares: torch.Tensor | None = None,
        deferred_norm: DeferredNorm | None = None,
        pdl: bool = True,
    ) -> list[torch.Tensor]:
        """Run the GEMM. Returns the result and its deferred norm, which is `deferred_norm` if that was
        given."""
        case = self.case
        options = {**case.options(), "residual": residual, "out": out}
        options |= {"workspace": self.workspace, "plan": self.plan, "pdl": pdl}
        if isinstance(case, Fp8Case):
            return [linear.linear_fp8(x, case.quantised, case.weight_scale, **options)]
        if self.shares:
            options |= {"norm_weight": None, "squares": squares}
        if not self.gains:
            return [linear.linear(x, case.weight, **options)]
        deferred_norm = deferred_norm or linear.allocate_deferred_norm(self.plan, out)
        options |= {"next_gain": self.gain, "deferred_norm": deferred_norm}
        return [linear.linear(x, case.weight, **options), deferred_norm.values, deferred_norm.squares]
