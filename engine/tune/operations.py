"""Extends the decoder's operations for the tuner, which can then replace kernel plans, record which linears
use a plan, skip one linear's operations, and check results against the reference implementation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from kernels import Fp8Activation, Fp8Weight, KvPool, Residual, Rotation, reference
from kernels.compiling import GpuModel
from kernels.cuda import CudaOps
from kernels.triton import fused
from kernels.triton.experts_plans import ExpertsShape, LayerPlans
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import Product, Table


class TunedOps(CudaOps):
    """GPU operations with a table of plans that can be replaced. They also record which linears look up a
    plan. If `attention` is false, attention is not computed (see `attend`).
    """

    def __init__(self, gpu: GpuModel, attention: bool) -> None:
        super().__init__(0, pdl=gpu.pdl)
        self._attention = attention
        self.asked: list[Product] = []
        """The linears that looked up a plan, in order. A linear may occur several times."""
        self.use(Table())

    def use(self, table: Table) -> None:
        """Use the plans from `table` in all later operations."""
        self.asked.clear()
        self._table = cast(Table, _NotingTable(table, self.asked))

    def forget_workspaces(self) -> None:
        """Free the attention workspaces. Call when the number of rows changes, because the workspaces' sizes
        depend on that number."""
        self._decode_workspaces = {}

    def attend(
        self,
        qkv: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        rotation: Rotation,
        pool: KvPool,
        heads: int,
        *others: Any,
    ) -> torch.Tensor:
        """Implement `Ops.attend`. If attention is disabled, only apply RoPE, write the cache, and return the
        rotated queries."""
        if self._attention:
            return super().attend(qkv, positions, slots, rotation, pool, heads, *others)
        return fused.rope_cache_write(qkv, positions, slots, rotation, pool, heads, pdl=self.pdl)


class _NotingTable:
    """Wraps a table of plans and records each linear that looks up a plan."""

    def __init__(self, table: Table, asked: list[Product]) -> None:
        self._table, self._asked = table, asked

    def choose(
        self, rows: int, n: int, k: int, dtype: torch.dtype, block: tuple[int, int] | None = None
    ) -> GemmPlan | None:
        self._asked.append(Product(dtype, n, k))
        return self._table.choose(rows, n, k, dtype, block)

    def choose_experts(self, tokens: int, shape: ExpertsShape) -> LayerPlans:
        return self._table.choose_experts(tokens, shape)


class WatchedOps:
    """Wraps `TunedOps`. Can skip one linear's operations, or check results against the reference
    implementation."""

    def __init__(self, backend: TunedOps) -> None:
        self.backend = backend
        self.without: Product | None = None
        self.errors: list[float] | None = None
        """Relative errors of the checked operations, or None if results are not being checked."""
        self._results: dict[tuple[str, Product | None], Any] = {}
        """Results of the linears' operations during `find`, keyed by operation name and linear."""
        self._finding = False

    def find(self, run: Callable[[], object]) -> list[Product]:
        """Return the linears that look up a plan during `run`. Those whose results are added to the residual
        come first."""
        self.without, self._finding = None, True
        self._results.clear()
        self.backend.asked.clear()
        run()
        self._finding = False
        results = self._results.items()
        writers = [product for (_, product), result in results if product and isinstance(result, Residual)]
        return list(dict.fromkeys([*writers, *self.backend.asked]))

    def compare(self, run: Callable[[], object]) -> float:
        """Return the largest relative error of any operation in `run`, or NaN if a result contains NaN."""
        self.without, self.errors = None, []
        try:
            run()
            return max(self.errors, key=lambda error: (math.isnan(error), error), default=math.nan)
        finally:
            self.errors = None

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.backend, name)
        if not callable(operation) or name == "next_norm":  # `next_norm` computes nothing
            return operation

        def watched(*arguments: Any, **options: Any) -> Any:
            products = [one for one in map(_product_of, arguments) if (name, one) in self._results]
            if self.without is not None and self.without in products:
                streams = [one for one in arguments if isinstance(one, Residual)]
                result = self._results[name, self.without]
                # A skipped operation that adds to the residual returns the residual unchanged.
                return streams[0] if isinstance(result, Residual) else result
            if self.errors is not None and products:
                expected = _reference(name, arguments, options)
                result = operation(*arguments, **options)
                # Separate quantisations are not compared, because only linears computed by cuBLAS need them.
                if not isinstance(result, Fp8Activation):
                    self.errors.append(_difference(result, expected))
                return result
            asked = len(self.backend.asked)
            result = operation(*arguments, **options)
            if self._finding:
                self._results |= {(name, product): result for product in self.backend.asked[asked:]}
            return result

        return watched


def _reference(name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Any:
    """Return the reference implementation's result, computed in float32. With e4m3 weights, the input is not
    converted to float32, because the kernels also quantise activations in the model's dtype."""
    exact = not any(isinstance(one, Fp8Weight) for one in arguments)
    return getattr(reference, name)(*(_copied(one, exact) for one in arguments), **options)


def _product_of(argument: Any) -> Product | None:
    """Return the linear that a weight belongs to, or None if the argument is not a linear's weight."""
    weight = argument.values if isinstance(argument, Fp8Weight) else argument
    if not isinstance(weight, torch.Tensor) or weight.dim() != 2:
        return None
    return Product(weight.dtype, *weight.shape)


def _copied(argument: Any, exact: bool) -> Any:
    """Return a copy of an argument that an operation may overwrite. The copy is in float32 if `exact` is
    true."""
    if isinstance(argument, Residual):
        return Residual(_copied(argument.values, exact).clone())
    if isinstance(argument, torch.Tensor) and argument.is_floating_point() and exact:
        return argument.float()
    return argument


def _difference(result: torch.Tensor | Residual, expected: torch.Tensor | Residual) -> float:
    got, wanted = (one.values if isinstance(one, Residual) else one for one in (result, expected))
    return float((got.float() - wanted.float()).norm() / wanted.float().norm())
