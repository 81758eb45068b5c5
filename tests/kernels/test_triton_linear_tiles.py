"""Tests of GEMMs with `linear_tiles` against their reference implementations, like `test_triton_linear` for
the other kernels.

The kernel is written in Gluon, so only tests on a Hopper GPU (marked `gpu`) verify its results. The other
tests run on any machine: they compile the kernel for Hopper, and check that weight loads start before the
wait for the previous kernel.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.triton.linear_plans import GemmPlan
from tests.kernels import test_triton_linear as products
from tests.kernels.linear_cases import DEVICE, EPS, POISON, on_hopper
from tests.kernels.test_compiling import compiled

linear = pytest.importorskip("kernels.triton.linear", exc_type=ImportError)

ROWS = (2, 3, 7, 8, 9, 16, 17, 33, 64)
BF16, F16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn

SHAPES: list[tuple[int, int, tuple[str, ...], GemmPlan]] = [
    # Fields: outputs, K, extras, plan for 2-byte weights
    (1024, 2048, ("residual",), GemmPlan("tiles", 8, 64, 128, 4, 6, 2)),
    (2880, 1024, ("norm", "silu", "bias", "residual"), GemmPlan("tiles", 8, 128, 64, 8, 4)),
    (720, 2048, ("silu",), GemmPlan("tiles", 8, 64, 128, 4, 3, 4)),
    (1000, 384, ("norm", "bias"), GemmPlan("tiles", 8, 64, 64, 4, 9)),
    (1152, 1024, ("bias", "residual"), GemmPlan("tiles", 8, 128, 128, 4, 2, 2)),
]


def plan_for(shape: tuple[int, int, tuple[str, ...], GemmPlan], rows: int, dtype: torch.dtype) -> GemmPlan:
    """Return the plan for a shape, with tokens padded to 8, 16, 32 or 64. A step of the pipeline has the same
    number of bytes for every dtype."""
    plan = shape[-1]
    padded = next(most for most in (8, 16, 32, 64) if rows <= most)
    return replace(plan, rows=padded, block_k=plan.block_k * 2 // dtype.itemsize)


# ── on any machine ───────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def kernels() -> dict[str, Any]:
    """Return the order of operations of each compiled kernel."""
    done = compiled("tests.kernels.tiles_compiled")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_weights_are_requested_before_the_wait_and_x_after_it(kernels: dict[str, Any]) -> None:
    assert len(kernels) == 5
    for name, kernel in kernels.items():
        events = [event for event in kernel["events"] if event != "load"]
        wait, first_product = events.index("wait"), events.index("product")
        assert events[0] == "launch_dependents", name
        # Before the wait, the kernel starts one copy of weights per stage. It also starts one copy of rows
        # beyond the end of x, which transfers no data and only prefetches the descriptor of x.
        assert events[1:wait] == ["copy"] * (kernel["stages"] + 1), name
        assert events[wait + 1 : first_product] == ["copy"] * kernel["stages"], name
        assert kernel["shared"] <= 113 << 10, name  # two programs fit on a multiprocessor


def test_loads_of_a_shared_norm_overlap_with_the_gemm(kernels: dict[str, Any]) -> None:
    def loads(name: str) -> tuple[int, int, int]:
        """Return the number of loads before the wait, between the wait and the first product, and after the
        first product."""
        events = kernels[name]["events"]
        wait, product = events.index("wait"), events.index("product")
        return tuple(part.count("load") for part in (events[:wait], events[wait:product], events[product:]))

    gains, residual, _ = loads("gaining")
    assert gains > 0 and residual > 0
    assert loads("gaining")[2] == loads("normed_after")[2] == 0
    # The 128 threads load 64 partial sums for each of 8 tokens.
    assert loads("normed_after") == (0, 4, 0)


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_gemm_is_as_accurate_as_the_reference(shape: tuple, dtype: torch.dtype) -> None:
    for rows in ROWS:
        case = products.Case(rows, *shape[:3], dtype)
        plan = plan_for(shape, rows, dtype)
        products.check(case, linear.linear(case.x, case.weight, **case.options(), plan=plan))


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_an_fp8_gemm_is_as_accurate_as_the_reference(shape: tuple) -> None:
    for rows in ROWS:
        case = products.Fp8Case(rows, *shape[:3], BF16, FP8)
        weight, plan = (case.quantised, case.weight_scale), plan_for(shape, rows, FP8)
        products.check_fp8(case, linear.linear_fp8(case.x, *weight, **case.options(), plan=plan))
        values, scales = linear.quantise(case.normed().contiguous())
        options = {**case.options(), "norm_weight": None}
        found = linear.linear_fp8(values, *weight, x_scale=scales, **options, plan=plan)
        products.check_fp8(case, found, (values, scales))


@on_hopper
@pytest.mark.gpu
def test_rows_may_have_any_stride_and_the_residual_may_be_the_output() -> None:
    case = products.Case(5, 1024, 2048, ("residual",), BF16)
    plan = plan_for(SHAPES[0], 5, BF16)
    wide = torch.full((5, 1100), POISON, dtype=BF16, device=DEVICE)
    out = wide[:, :1024]
    expected = linear.linear(case.x, case.weight, residual=case.residual, plan=plan)
    for columns, start in ((2304, 128), (2304, 3), (2051, 0)):
        wide_x = torch.full((5, columns), POISON, dtype=BF16, device=DEVICE)
        x = wide_x[:, start : start + 2048]
        x.copy_(case.x)
        out.copy_(case.residual)
        linear.linear(x, case.weight, residual=out, out=out, plan=plan)
        assert torch.equal(out, expected)
    assert wide[:, 1024:].eq(POISON).all()


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_a_norm_is_shared_with_the_gemm_before_and_after(shape: tuple, dtype: torch.dtype) -> None:
    n, k, extras, _ = shape
    for rows in ROWS:
        plan = plan_for(shape, rows, dtype)
        plain = tuple(extra for extra in extras if extra in ("bias", "residual"))
        products.check_gemm_with_deferred_norm(products.Case(rows, n, k, plain, dtype), plan)
        normed = ("norm", *(extra for extra in extras if extra != "norm"))
        products.check_as_good_as_apart(products.Case(rows, n, k, normed, dtype), plan)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 8, 16, 64])
def test_pdl_and_graphs_change_no_bit_of_a_shared_norm(rows: int) -> None:
    case = products.Case(rows, 4096, 4096, ("norm",), BF16)
    workspace = linear.allocate_workspace(DEVICE)
    few = plan_for(SHAPES[0], rows, BF16)
    dot = GemmPlan("dot", max(16, few.rows), 64, 128, 4, 4, 2)
    for plans in ((few, replace(few, split=1)), (replace(few, split=4), dot), (dot, few)):
        products.check_bits(lambda pdl, plans=plans: products.sharing_layers(case, workspace, pdl, plans))
    assert workspace.arrived.eq(0).all()


def _layer(case: products.Fp8Case, workspace: object, pdl: bool) -> list[torch.Tensor]:
    """Return a chain of dependent GEMMs. A GEMM that starts too early reads stale data."""
    rows, results = len(case.x), [case.x]
    few = plan_for(SHAPES[0], rows, BF16)
    for _ in range(4):
        x, options = results[-1], {"workspace": workspace, "pdl": pdl}
        x = linear.linear(
            x, case.weight, norm_weight=case.norm, eps=EPS, residual=results[-1], plan=few, **options
        )
        x = linear.linear(x, case.weight, plan=replace(few, split=1), **options)
        quantised = (case.quantised, case.weight_scale)
        options["plan"] = plan_for(SHAPES[0], rows, FP8)
        x = linear.linear_fp8(x, *quantised, norm_weight=case.norm, eps=EPS, residual=x, **options)
        results.append(linear.linear_fp8(x, *quantised, **options))
    return results


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [8, 64])
def test_pdl_repetition_and_graphs_change_no_bit(rows: int) -> None:
    case = products.Fp8Case(rows, 4096, 4096, ("norm",), BF16, FP8)
    workspace = linear.allocate_workspace(DEVICE)
    products.check_bits(lambda pdl: _layer(case, workspace, pdl))
    assert workspace.arrived.eq(0).all()
