"""Tests of GEMMs with few rows against their reference implementations.

The interpreter (on a CPU, in CI) verifies indexing and masking of the Triton kernels (gemv and dot) in
float32 and float16: the weights and tokens that are multiplied, outputs and columns that are not multiples of
a tile, split-K, and fused operations. The stream kernel is written in Gluon and runs only on a GPU. Only the
tests marked `gpu` verify the numerics of bfloat16 and e4m3, that results with and without PDL are bitwise
equal, that runs are deterministic, and that a graph replays the captured kernels.

Tolerances: the error against float64 is at most the sum of three terms. The first is twice the reference's
error. The second is half a unit in the last place of the largest value, because the reference may be accurate
by chance. The third is √K × 2**-24 times the sum of the terms' magnitudes, which is the error of K float32
additions in any order (Higham and Mary 2019). The third term dominates for 32-bit results; with tensor cores
that round to TF32, the error would be 60 times as large.

FP8 results are compared by norm with the GEMM of quantised values. The tolerance is 4e-3 higher, for two
reasons: with more than one row, the tensor cores sum in about 14 bits, and a rounding error of the norm may
change a quantised value by one step. The bound applies to the norm of the whole result and of each row. In
addition, the error of each element must be within a hundredth of the largest element. Truncation to 14 bits
at each step of 32 causes half of that error at K = 14336.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import DeferredNorm, Fp8Activation, Fp8Weight, reference
from kernels.triton.linear_plans import MAX_ROWS, MAX_SPLIT_PROGRAMS, GemmPlan, choose
from tests.kernels.closeness import error, worst_error
from tests.kernels.linear_cases import (
    ALL,
    DEVICE,
    EPS,
    POISON,
    Case,
    CudaOps,
    Fp8Case,
    check,
    check_fp8,
    linear,
    on_gpu,
    random_tensor,
)

GEMV = GemmPlan("gemv", 1, 2, 256, warps=4)
RAGGED_GEMV = GemmPlan("gemv", 1, 4, 512, warps=4)
DOT = GemmPlan("dot", 16, 64, 64, warps=4, stages=3)
SPLIT_DOT = GemmPlan("dot", 16, 64, 64, warps=4, stages=3, split=3)
HIGH_DOT = GemmPlan("dot", 16, 128, 64, warps=4, stages=3)


# ── on any machine ───────────────────────────────────────────────────────────────────────────────────

CASES = [
    # Fields: rows, outputs, K, extras, plan. Outputs and K are not multiples of the tile.
    (1, 160, 384, ALL, GEMV),
    (1, 160, 384, ("norm", "bias", "silu"), RAGGED_GEMV),
    (1, 96, 192, ("residual",), DOT),
    (5, 160, 384, ALL, DOT),
    (16, 160, 384, ("norm", "bias", "silu"), replace(DOT, block_n=128)),
    (3, 160, 384, ALL, SPLIT_DOT),
    (13, 160, 192, ("norm", "bias", "silu", "residual"), SPLIT_DOT),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_output_of_a_gemm_is_correct(case: tuple, dtype: torch.dtype) -> None:
    *shape, plan = case
    if DEVICE.type == "cuda" and dtype == torch.float32 and plan.form == "dot":
        plan = replace(plan, stages=2)
    made = Case(*shape, dtype)
    check(made, linear.linear(made.x, made.weight, **made.options(), plan=plan, pdl=False))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_output_of_a_scaled_gemm_is_correct(case: tuple) -> None:
    *shape, plan = case
    made = Fp8Case(*shape, torch.float16, torch.float16)
    product = linear.linear_fp8(
        made.x, made.quantised, made.weight_scale, **made.options(), plan=plan, pdl=False
    )
    check_fp8(made, product)


GAINING = [
    # Fields: rows, outputs, K, extras, plan. Outputs are not multiples of the tile.
    (5, 160, 192, ("residual",), DOT),
    (16, 157, 192, ("bias", "residual"), HIGH_DOT),
    (3, 200, 384, ("residual",), SPLIT_DOT),
    (13, 257, 192, (), SPLIT_DOT),
]


def poisoned_deferred_norm(out: torch.Tensor, plan: GemmPlan) -> tuple[DeferredNorm, list[torch.Tensor]]:
    """Allocate a deferred norm for a result with the shape of `out`. Returns the deferred norm and the memory
    that follows it, which must stay unchanged."""
    rows, columns = out.shape
    parts = -(-columns // plan.block_n)
    values = torch.full((rows + 2, columns), POISON, dtype=out.dtype, device=DEVICE)
    squares = torch.full((parts + 1, rows), POISON, device=DEVICE)
    return DeferredNorm(values[:rows], squares[:parts]), [values[rows:], squares[parts:]]


def check_deferred_norm(
    deferred_norm: DeferredNorm, result: torch.Tensor, gain: torch.Tensor, plan: GemmPlan
) -> None:
    """Assert that the deferred norm matches the GEMM's result."""
    assert torch.equal(deferred_norm.values, (result.float() * gain.float()).to(result.dtype))
    for part, squared in zip(
        result.double().pow(2).split(plan.block_n, dim=1), deferred_norm.squares, strict=True
    ):
        assert torch.allclose(squared.double(), part.sum(1), rtol=1e-5)


def check_gemm_with_deferred_norm(case: Case, plan: GemmPlan) -> None:
    """Run a GEMM with a deferred norm. Check both results and the memory around them."""
    gain = random_tensor(case.out.shape[1], seed=6, dtype=case.x.dtype)
    deferred_norm, behind = poisoned_deferred_norm(case.out, plan)
    alone = linear.linear(case.x, case.weight, **{**case.options(), "out": None}, plan=plan, pdl=False)
    options = {"next_gain": gain, "deferred_norm": deferred_norm, "plan": plan, "pdl": False}
    assert torch.equal(linear.linear(case.x, case.weight, **case.options(), **options), alone)
    check_deferred_norm(deferred_norm, alone, gain, plan)
    assert all(part.eq(POISON).all() for part in behind)
    made = linear.allocate_deferred_norm(plan, alone)
    assert (
        made.values.shape == deferred_norm.values.shape and made.squares.shape == deferred_norm.squares.shape
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", GAINING, ids=str)
def test_a_deferred_norm_is_written_beside_the_result(case: tuple, dtype: torch.dtype) -> None:
    *shape, plan = case
    if DEVICE.type == "cuda" and dtype == torch.float32:
        plan = replace(plan, stages=2)
    check_gemm_with_deferred_norm(Case(*shape, dtype), plan)


AFTER = [
    # Fields: rows, outputs, K, extras, plan, and number of partial sums of squares.
    (5, 160, 384, ALL, DOT, 3),
    (16, 160, 384, ("norm", "bias", "silu"), HIGH_DOT, 6),
    (3, 160, 384, ("norm",), SPLIT_DOT, 1),
    (13, 160, 192, ("norm", "bias", "silu"), SPLIT_DOT, 5),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", AFTER, ids=str)
def test_a_deferred_norm_is_applied_after_the_gemm(case: tuple, dtype: torch.dtype) -> None:
    *shape, plan, parts = case
    if DEVICE.type == "cuda" and dtype == torch.float32:
        plan = replace(plan, stages=2)
    made = Case(*shape, dtype)
    made.x *= torch.arange(1, len(made.x) + 1, device=DEVICE).unsqueeze(1) / 4  # different norm factors
    deferred_norm = made.half_normed(parts)
    check(
        made,
        linear.linear(
            deferred_norm.values, made.weight, **made.options_after(deferred_norm), plan=plan, pdl=False
        ),
    )


def test_the_counters_of_a_split_are_zero_again() -> None:
    case = Case(5, 160, 192, (), torch.float16)
    workspace = linear.allocate_workspace(DEVICE)
    first = linear.linear(case.x, case.weight, workspace=workspace, plan=SPLIT_DOT, pdl=False)
    assert workspace.arrived.eq(0).all()
    workspace.partials.fill_(POISON)
    assert torch.equal(
        linear.linear(case.x, case.weight, workspace=workspace, plan=SPLIT_DOT, pdl=False), first
    )


def test_rows_may_be_strided_and_the_residual_may_be_the_output() -> None:
    case = Case(5, 160, 192, ("residual",), torch.float16)
    wide_x = torch.full((5, 256), POISON, dtype=torch.float16, device=DEVICE)
    wide_x[:, :192] = case.x
    wide = torch.full((5, 200), POISON, dtype=torch.float16, device=DEVICE)
    out = wide[:, :160]
    out.copy_(case.residual)
    linear.linear(wide_x[:, :192], case.weight, residual=out, out=out, plan=DOT, pdl=False)
    expected = linear.linear(case.x, case.weight, residual=case.residual, plan=DOT, pdl=False)
    assert torch.equal(out, expected)
    assert wide[:, 160:].eq(POISON).all()


def test_a_row_of_zeros_is_quantised_to_zeros() -> None:
    x = random_tensor(2, 64, seed=0, dtype=torch.float32)
    x[1] = 0
    values, scales = linear.quantise(x, values=torch.float32, pdl=False)
    assert torch.allclose(values * scales, x) and scales[1] == 0
    assert values[0].abs().max().item() == pytest.approx(448.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn], ids=str)
def test_a_plan_fits_its_shape(dtype: torch.dtype) -> None:
    for rows in (1, 2, 8, 9, 16, 17, 32, 33, 64):
        for n in (64, 384, 1000, 4096, 6144, 28672, 128256):
            for k in (64, 192, 384, 1024, 4096, 8192, 14336, 28672):
                plan = choose(rows, n, k, dtype)
                assert plan is not None and plan.rows >= rows
                if plan.form == "stream":
                    assert rows == 1 and k % (plan.warps * plan.block_k) == 0 and plan.block_k >= 64
                if plan.form == "dot":
                    assert k % plan.split == 0 and k // plan.split % plan.block_k == 0
                    assert plan.block_k >= 32
                    assert plan.split == 1 or -(-n // 64) * plan.split < MAX_SPLIT_PROGRAMS


def test_other_shapes_are_left_to_cublas() -> None:
    assert choose(MAX_ROWS + 1, 4096, 4096, torch.bfloat16) is None
    assert choose(1, 4096, 4000, torch.bfloat16) is None
    assert choose(1, 4096, 4096, torch.float32) is None


def test_e4m3_gemms_with_few_outputs_have_plans_for_twice_the_rows() -> None:
    fp8 = torch.float8_e4m3fn
    plan = choose(2 * MAX_ROWS, 4096, 14336, fp8)
    assert plan is not None and plan.rows == 128 and plan.split == 2
    assert choose(2 * MAX_ROWS, 28672, 4096, fp8) is None
    assert choose(2 * MAX_ROWS + 1, 4096, 14336, fp8) is None


def test_an_argument_that_does_not_match_is_reported() -> None:
    x = torch.zeros(2, 64)
    weight = torch.zeros(32, 64)
    with pytest.raises(ValueError, match=r"bias has shape \(31,\) .* expected shape \(32,\)"):
        linear.linear(x, weight, bias=torch.zeros(31))
    with pytest.raises(ValueError, match="second dimensions must be equal"):
        linear.linear(x, torch.zeros(32, 63))
    with pytest.raises(ValueError, match="dtypes must be equal"):
        linear.linear(x, weight.half())
    with pytest.raises(ValueError, match="weight_scale"):
        linear.linear_fp8(x, weight, torch.zeros(1))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Replace the library's FP8 GEMM with one that returns bfloat16 and requires a bfloat16 bias, as torch's
    GEMM does on every GPU. Return a list to which each call appends the dtype of its result."""
    given = []

    def scaled_mm(
        x: torch.Tensor, weight: torch.Tensor, *, scale_a: torch.Tensor, scale_b: torch.Tensor, **options: Any
    ) -> torch.Tensor:
        bias, dtype = options["bias"], options["out_dtype"]
        assert dtype == torch.bfloat16 and (bias is None or bias.dtype == dtype)
        product = x.float() @ weight.float() * scale_a * scale_b
        given.append(dtype)
        return (product if bias is None else product + bias.float()).to(dtype)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    return given


@pytest.mark.parametrize("extras", [(), ("bias",), ("bias", "residual"), ("bias", "silu")], ids=str)
def test_the_librarys_gemm_has_the_models_dtype(extras: tuple[str, ...], library: list[torch.dtype]) -> None:
    case = Fp8Case(130, 96, 192, extras, torch.float16, torch.float8_e4m3fn)
    values, scales = reference.quantise_fp8(case.x)
    weight = (case.quantised, case.weight_scale)
    options = {**case.options(), "x_scale": scales, "dtype": torch.float16, "pdl": False}
    for out in (case.out, None):
        found = linear.linear_fp8(values, *weight, **{**options, "out": out})
        assert found.dtype == torch.float16
        check_fp8(case, found, rounded=torch.bfloat16)
    assert len(library) == 2


def test_a_gemm_of_a_sharded_model_has_its_dtype(library: list[torch.dtype]) -> None:
    """In a sharded model, a GEMM may have no residual that determines the result's dtype."""
    case = Fp8Case(130, 96, 192, ("bias",), torch.float16, torch.float8_e4m3fn)
    quantised = Fp8Activation(*reference.quantise_fp8(case.x), torch.float16)
    weight = Fp8Weight(case.quantised, case.weight_scale)
    for ops in (CudaOps(pdl=False), reference):
        found = ops.linear(quantised, weight, case.bias)
        assert found.dtype == torch.float16
        check_fp8(case, found, rounded=torch.bfloat16)
    assert library == [torch.bfloat16]


def test_a_norm_that_cannot_be_shared_is_refused() -> None:
    x, weight, squares = torch.zeros(2, 64), torch.zeros(32, 64), torch.zeros(1, 2)
    with pytest.raises(ValueError, match="can share a norm; this GEMM uses cuBLAS"):
        linear.linear(x, weight, squares=squares)
    with pytest.raises(ValueError, match=r"squares is \(1, 3\); expected \(1, 2\)"):
        linear.linear(x, weight, squares=torch.zeros(1, 3), plan=DOT)
    with pytest.raises(ValueError, match="squares and norm_weight are both given"):
        linear.linear(x, weight, squares=squares, norm_weight=torch.zeros(64), plan=DOT)
    deferred_norm = linear.allocate_deferred_norm(DOT, torch.zeros(2, 32))
    with pytest.raises(ValueError, match=r"next_gain is None; expected \(32,\)"):
        linear.linear(x, weight, deferred_norm=deferred_norm, plan=DOT)
    options = {"next_gain": torch.zeros(32), "deferred_norm": deferred_norm}
    with pytest.raises(ValueError, match=r"deferred_norm.squares is \(1, 2\); expected \(2, 2\)"):
        linear.linear(x, weight, **options, plan=replace(DOT, block_n=16))
    with pytest.raises(ValueError, match="without SwiGLU"):
        linear.linear(x, weight, **options, silu_mul=True, plan=DOT)


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────

SHAPES = [
    (6144, 4096, ("norm",)),
    (4096, 4096, ("residual",)),
    (28672, 4096, ("norm", "silu")),
    (4096, 14336, ("residual",)),
    (1152, 1024, ("norm", "bias")),
    (2048, 384, ("norm", "silu", "bias")),
    (1000, 192, ()),
    (384, 1024, ("bias", "residual")),
]
ROWS = (1, 2, 7, 8, 9, 16, 17, 33, 64, 65)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_gemm_is_as_accurate_as_the_reference(shape: tuple, dtype: torch.dtype) -> None:
    for rows in ROWS:
        case = Case(rows, *shape, dtype)
        check(case, linear.linear(case.x, case.weight, **case.options()))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] % 16 == 0], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_an_fp8_gemm_is_as_accurate_as_the_reference(shape: tuple, dtype: torch.dtype) -> None:
    """The library computes the GEMM with the largest number of rows, and first rounds its result to
    bfloat16."""
    rounded = torch.bfloat16 if dtype == torch.float16 else torch.float64
    for rows in (*ROWS, 200):
        case = Fp8Case(rows, *shape, dtype, torch.float8_e4m3fn)
        weight = (case.quantised, case.weight_scale)
        check_fp8(case, linear.linear_fp8(case.x, *weight, **case.options()), rounded=rounded)
        values, scales = linear.quantise(case.normed().contiguous())
        expected, expected_scales = reference.quantise_fp8(case.normed())
        assert torch.equal(scales, expected_scales)
        assert torch.equal(values.view(torch.uint8), expected.view(torch.uint8))
        options = {**case.options(), "norm_weight": None, "x_scale": scales, "dtype": dtype}
        check_fp8(case, linear.linear_fp8(values, *weight, **options), (values, scales), rounded)
        assert linear.linear_fp8(values, *weight, **{**options, "out": None}).dtype == dtype


def check_as_good_as_apart(case: Case, plan: GemmPlan) -> None:
    """Compare a GEMM that applies a deferred norm to x with the same GEMM that reads x after the norm."""
    deferred_norm = case.half_normed(7)
    shared = linear.linear(
        deferred_norm.values, case.weight, **case.options_after(deferred_norm), plan=plan
    ).clone()
    apart = linear.linear(case.x, case.weight, **case.options(), plan=plan)
    exact = case.exact(case.exact_normed() @ case.weight.double().T)
    assert error(shared, exact) <= 1.5 * error(apart, exact)
    assert worst_error(shared, exact) <= 2 * worst_error(apart, exact)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if "norm" in shape[2]], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_shared_norm_costs_no_accuracy(shape: tuple, dtype: torch.dtype) -> None:
    for rows in ROWS[1:-1]:
        plan = choose(rows, *shape[:2], dtype)
        assert plan is not None
        check_as_good_as_apart(Case(rows, *shape, dtype), plan)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 7, 16, 33, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_deferred_norm_is_written_in_every_dtype(rows: int, dtype: torch.dtype) -> None:
    for shape in ((4096, 4096, ("residual",)), (1000, 192, ("bias", "residual"))):
        plan = choose(rows, *shape[:2], dtype)
        assert plan is not None
        check_gemm_with_deferred_norm(Case(rows, *shape, dtype), plan)


def sharing_layers(
    case: Case, workspace: object, pdl: bool, plans: tuple[GemmPlan, GemmPlan]
) -> list[torch.Tensor]:
    """Return a chain of dependent GEMMs that share norms. A GEMM that starts too early reads stale data."""
    results = [case.x]
    for _ in range(4):
        x, options = results[-1], {"workspace": workspace, "pdl": pdl}
        deferred_norm = linear.allocate_deferred_norm(plans[0], x)
        first = {"residual": x, "next_gain": case.norm, "deferred_norm": deferred_norm, "plan": plans[0]}
        x = linear.linear(x, case.weight, **first, **options)
        then = {"squares": deferred_norm.squares, "eps": EPS, "plan": plans[1]}
        results += [x, deferred_norm.values, deferred_norm.squares]
        results.append(linear.linear(deferred_norm.values, case.weight, **then, **options))
    return results


def check_bits(run: Callable[[bool], list[torch.Tensor]]) -> None:
    """Assert that runs with PDL, repeated runs and graph replays are bitwise equal to a run without PDL.
    `run` takes a flag that enables PDL, and returns tensors of which the first is its input."""
    expected = run(False)
    assert not any(tensor.isnan().any() for tensor in expected)
    for _ in range(5):
        assert all(map(torch.equal, run(True), expected))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(True)
    for _ in range(5):
        for tensor in captured[1:]:
            tensor.fill_(POISON)
        graph.replay()
        assert all(map(torch.equal, captured, expected))


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 8, 16, 64])
def test_pdl_and_graphs_change_no_bit_of_a_shared_norm(rows: int) -> None:
    case = Case(rows, 4096, 4096, ("norm",), torch.bfloat16)
    workspace = linear.allocate_workspace(DEVICE)
    plan = choose(rows, 4096, 4096, torch.bfloat16)
    assert plan is not None
    for plans in ((plan, plan), (replace(plan, split=4), replace(plan, split=1))):
        check_bits(lambda pdl, plans=plans: sharing_layers(case, workspace, pdl, plans))
    assert workspace.arrived.eq(0).all()


def _layer(case: Case, workspace: object, pdl: bool) -> list[torch.Tensor]:
    """Return a chain of dependent GEMMs. A GEMM that starts too early reads stale data."""
    results = [case.x]
    for _ in range(4):
        x = results[-1]
        options = {"workspace": workspace, "pdl": pdl}
        x = linear.linear(x, case.weight, norm_weight=case.norm, eps=EPS, residual=results[-1], **options)
        if isinstance(case, Fp8Case):
            quantised = (case.quantised, case.weight_scale)
            x = linear.linear_fp8(x, *quantised, norm_weight=case.norm, eps=EPS, residual=x, **options)
            x = linear.linear_fp8(x, *quantised, **options)
        results.append(x)
    return results


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 64])
def test_pdl_repetition_and_graphs_change_no_bit(rows: int) -> None:
    case = Fp8Case(rows, 4096, 4096, ("norm",), torch.bfloat16, torch.float8_e4m3fn)
    workspace = linear.allocate_workspace(DEVICE)
    check_bits(lambda pdl: _layer(case, workspace, pdl))
    assert workspace.arrived.eq(0).all()
