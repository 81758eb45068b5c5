"""Tests of the operations with FP8 weights that have one scale per block, against the reference
implementation.

The interpreter verifies indexing and masking in float32, with values that are scaled but not rounded: which
scale a weight and a token's input are multiplied by, and sizes that are not multiples of a tile or of a
block. The tests marked `gpu` verify the numerics of bfloat16 and e4m3, and that results with PDL and in
graphs are bitwise equal.

In float32, the error against the reference is at most 2e-5 of the result's largest value, which covers the
different order of sums. With e4m3, inputs are rounded as in the reference, so the error is that of sums on
tensor cores (4e-3) and of rounding the result.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import pytest
import torch

from kernels import Activation, Experts, Fp8Activation, Fp8Weight, Residual, reference
from kernels.triton import experts as moe
from kernels.triton import experts_plans, fused, linear_plans
from kernels.triton.experts_plans import ExpertsPlan, LayerPlans
from tests.kernels.closeness import error
from tests.kernels.linear_cases import DEVICE, EPS, POISON, CudaOps, linear, on_gpu, on_hopper, random_tensor
from tests.kernels.test_compiling import compiled
from tests.kernels.test_triton_linear import check_bits

E4M3 = torch.float8_e4m3fn
SHAPES = [
    # Fields: outputs, inputs, and rows and columns of a block. The last blocks may be incomplete.
    (256, 384, (128, 128)),
    (200, 320, (128, 128)),
    (160, 192, (32, 64)),
    (96, 128, (16, 32)),
]


def uneven(x: torch.Tensor) -> torch.Tensor:
    """Return x with magnitudes that differ between rows and between groups of 32 columns."""
    rows, columns = x.shape[-2:]
    row = torch.arange(rows, device=x.device).unsqueeze(1) // 16
    column = torch.arange(columns, device=x.device) // 32
    return x * (1 + (3 * row + 5 * column) % 7).to(x.dtype)


def blocks(*shape: int, seed: int, block: tuple[int, int], values: torch.dtype) -> Fp8Weight:
    """Return random matrices with one scale per block. If `values` is not e4m3, they are not rounded."""
    whole = uneven(random_tensor(*shape, seed=seed, dtype=torch.float32)) * shape[-1] ** -0.5
    found, scales = zip(*(_quantised(one, block, values) for one in whole.view(-1, *shape[-2:])), strict=True)
    each = Fp8Weight(torch.stack(found).view(shape), torch.stack(scales), block)
    return Fp8Weight(each.values, each.scales if len(shape) == 3 else each.scales[0], block)


def _quantised(
    x: torch.Tensor, block: tuple[int, int], values: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    quantised, scales = reference.quantise_blocks(x, block)
    if values == E4M3:
        return quantised, scales
    return (x / dequantised(Fp8Weight(torch.ones_like(x), scales, block))).to(values), scales


def dequantised(weight: Fp8Weight) -> torch.Tensor:
    """Return the values of a matrix multiplied by their scales, without changing the matrix."""
    return reference.dequantise(Fp8Weight(weight.values.double(), weight.scales, weight.block))


def matrix(weight: Fp8Weight, values: torch.dtype) -> torch.Tensor | Fp8Weight:
    """Return the weight for the reference, which rounds inputs to e4m3 if the weight is quantised."""
    if values == E4M3:
        return weight
    if weight.values.dim() == 2:
        return dequantised(weight)
    each = range(len(weight.values))
    return torch.stack([dequantised(reference.expert_weight(weight, one)) for one in each])


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype and found.isfinite().all()
    slack = 2e-5 if found.dtype == torch.float32 else 4e-3 + torch.finfo(found.dtype).eps
    # Rounding to 16 bits may change the e4m3 code of an input, by an eighth of the input at most, so single
    # results are less accurate than all results on average.
    off = (found.double() - expected.double()).abs().amax()
    assert off <= (slack if slack < 1e-3 else 3e-2) * expected.double().abs().amax()
    assert error(found, expected.double()) <= slack


def check_linears(
    rows: int,
    shape: tuple[int, int, tuple[int, int]],
    dtype: torch.dtype,
    values: torch.dtype,
    pdl: bool,
    hopper: bool = False,
) -> None:
    n, k, block = shape
    ops = CudaOps(pdl=pdl, hopper_multiprocessors=132 if hopper else 0)
    weight = blocks(n, k, seed=1, block=block, values=values)
    whole = matrix(weight, values)
    x = uneven(random_tensor(rows, k, seed=2, dtype=dtype))
    bias = random_tensor(n, seed=3, dtype=dtype)
    close(ops.linear(x, weight, bias), reference.linear(x, whole, bias))
    residual = random_tensor(rows, n, seed=4, dtype=dtype)
    found = ops.linear_add(x, weight, None, Residual(residual.clone()), None).values
    close(found, reference.linear_add(x, whole, None, Residual(residual.clone()), None).values)
    norm = uneven(random_tensor(1, k, seed=5, dtype=dtype)).squeeze(0)
    normed = Residual(x), norm, EPS
    close(ops.norm_linear(*normed, weight, None), reference.norm_linear(*normed, whole, None))
    gated = ops.norm_gate_up(*normed, weight, bias)
    expected = reference.norm_gate_up(*normed, whole, bias)
    if isinstance(gated, Fp8Activation):
        wide = gated.scales.repeat_interleave(block[0], dim=1)[:, : gated.values.shape[1]]
        if values == E4M3:
            assert error(gated.values.double() * wide, expected.double()) <= 4e-2
            return
        gated = gated.values * wide
    close(gated, expected)


@pytest.mark.parametrize("rows", [1, 3, 16, 33, 70])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_inputs_are_multiplied_by_blocks(rows: int, shape: tuple) -> None:
    check_linears(rows, shape, torch.float32, torch.float32, pdl=False)


@pytest.mark.parametrize("rows", [65, 68])
def test_many_rows_are_multiplied_by_blocks_in_cublas_on_hopper(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def scaled_mm(
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        scale_a: torch.Tensor,
        scale_b: torch.Tensor,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """Check the arguments as torch 2.11 does, and multiply in float32."""
        padded = len(a)
        assert scale_a.shape == (padded, 4) and scale_a.stride() == (1, padded) and padded % 4 == 0
        assert scale_b.shape == (4, 2) and scale_b.stride() == (1, 4) and out_dtype == torch.bfloat16
        assert a.stride() == (512, 1) and b.stride() == (1, 512)
        calls.append(padded)
        wide = scale_b.repeat_interleave(128, dim=0).repeat_interleave(128, dim=1)
        return (a * scale_a.repeat_interleave(128, dim=1)) @ (b * wide)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    check_linears(rows, (256, 512, (128, 128)), torch.float32, torch.float32, pdl=False, hopper=True)
    assert calls == [(rows + 3) // 4 * 4] * 4


def test_swiglu_is_quantised_in_groups_as_in_a_separate_launch() -> None:
    gate_up = uneven(random_tensor(5, 400, seed=2, dtype=torch.float32))
    together = fused.silu_mul_fp8(gate_up, values=torch.float32, group=64)
    apart = linear.quantise(fused.silu_mul(gate_up), values=torch.float32, group=64, pdl=False)
    assert together[0].equal(apart[0]) and together[1].equal(apart[1])
    assert together[1].shape == (5, 4) and together[1].stride() == (1, 8)


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("shape", [(200, 512, (128, 128)), (160, 384, (32, 64))], ids=str)
def test_few_rows_are_multiplied_by_blocks_in_tiles(
    shape: tuple[int, int, tuple[int, int]], split: int, silu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    interpreter = pytest.importorskip("tests.kernels.gluon_interpreter", exc_type=ImportError)
    tiles = pytest.importorskip("kernels.triton.linear_tiles", exc_type=ImportError)
    if DEVICE.type != "cpu":
        pytest.skip("the interpreter runs on the CPU")
    monkeypatch.setattr(tiles, "_tiles", interpreter.Interpreted(tiles._tiles, seed=0))
    n, k, block = shape
    weight = blocks(n, k, seed=1, block=block, values=torch.float16)
    x = uneven(random_tensor(5, k, seed=2, dtype=torch.float32))
    x, scales = linear.quantise(x, values=torch.float16, group=block[1], pdl=False)
    bias = random_tensor(n, seed=3, dtype=torch.float32)
    plan = linear_plans.GemmPlan("tiles", 8, 64, 64, warps=4, stages=2, split=split)
    options = {"block": block, "plan": plan, "bias": bias, "silu_mul": silu, "dtype": torch.float32}
    found = linear.linear_fp8(x, weight.values, weight.scales, x_scale=scales, **options)
    whole = dequantised(weight)
    expected = reference.linear(x.float() * scales.repeat_interleave(block[1], dim=1)[:, :k], whole, bias)
    close(found, reference.silu_mul(expected) if silu else expected)


def test_no_blocks_are_written_past_the_last_token() -> None:
    weight = blocks(96, 128, seed=1, block=(32, 64), values=torch.float32)
    x, out = random_tensor(70, 128, seed=2, dtype=torch.float32), torch.full((80, 96), POISON, device=DEVICE)
    plan = linear_plans.GemmPlan("dot", 16, 32, 32, warps=4)
    options = {"block": weight.block, "plan": plan, "out": out[:70], "pdl": False}
    linear.linear_fp8(x, weight.values, weight.scales, **options)
    close(out[:70], x @ dequantised(weight).T)
    assert out[70:].eq(POISON).all()


def test_inputs_that_are_already_quantised_are_multiplied_by_blocks() -> None:
    weight = blocks(96, 192, seed=1, block=(64, 64), values=torch.float32)
    x = uneven(random_tensor(5, 192, seed=2, dtype=torch.float32))
    quantised: Activation = Fp8Activation(
        *linear.quantise(x, values=torch.float32, group=64, pdl=False), x.dtype
    )
    found = CudaOps(pdl=False).linear(quantised, weight, None)
    close(found, x @ dequantised(weight).T)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": linear_plans.GemmPlan("gemv", 1, 8, 64, warps=4)}, "'gemv'; .* need 'dot' or 'tiles'"),
        ({"plan": linear_plans.GemmPlan("dot", 16, 32, 128, warps=4)}, "block_k 128; .* block of 64 columns"),
        (
            {"plan": linear_plans.GemmPlan("dot", 16, 32, 64, 4, split=2)},
            "block_k 64; K = 192 is not a multiple of 128",
        ),
        ({"block": (64, 48)}, r"block is \(64, 48\); expected .* a power of two of at least 32 columns"),
        ({"block": (64, 128)}, r"weight_scale is .* \(2, 3\); expected float32 \(2, 2\)"),
        ({"x_scale": torch.ones(1, 2)}, r"x_scale is \(1, 2\) with strides \(2, 1\); expected \(1, 3\)"),
        ({"x_scale": torch.ones(1, 3)}, r"with strides \(3, 1\); expected \(1, 3\) with strides \(1, 4\)"),
    ],
    ids=["plan's form", "plan's step", "plan's split", "block", "weight's scales", "groups", "strides"],
)
def test_unsupported_blocks_and_scales_are_refused(changes: dict, message: str) -> None:
    weight = blocks(96, 192, seed=1, block=(64, 64), values=torch.float32)
    x = random_tensor(1, 192, seed=2, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        linear.linear_fp8(x, weight.values, weight.scales, **{"block": weight.block, "pdl": False, **changes})


@pytest.mark.parametrize("form", ["dot", "tiles"])
def test_a_plan_for_fewer_rows_is_refused_unless_it_computes_several_tiles(
    form: Literal["dot", "tiles"],
) -> None:
    """With split-K, several tiles of `dot` would share their partial sums, and give wrong results."""
    weight = blocks(96, 128, seed=1, block=(32, 64), values=torch.float32)
    x = random_tensor(17, 128, seed=2, dtype=torch.float32)
    plan = linear_plans.GemmPlan(form, 16, 64, 64, warps=4, split=2 if form == "dot" else 1)
    with pytest.raises(ValueError, match=r"plan has rows 16 and split \d, but x has 17 rows"):
        linear.linear_fp8(x, weight.values, weight.scales, block=weight.block, plan=plan, pdl=False)


def test_dense_blocks_need_a_multiple_of_64_inputs() -> None:
    weight = blocks(64, 96, seed=1, block=(64, 32), values=torch.float32)
    x = random_tensor(1, 96, seed=2, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"weight has 96 inputs; .* a multiple of 64"):
        linear.linear_fp8(x, weight.values, weight.scales, block=weight.block, pdl=False)


LAYERS = [
    # Fields: experts, top_k, hidden, width, and rows and columns of the blocks of gate_up and of down.
    (5, 2, 160, 96, (32, 128), (128, 32)),
    (8, 3, 128, 64, (64, 128), (128, 64)),
]


def layer(shape: tuple, dtype: torch.dtype, values: torch.dtype) -> tuple[Experts, Experts]:
    """Return a mixture of experts with block scales, and the same for the reference."""
    count, top_k, hidden, width, up_block, down_block = shape
    gate_up = blocks(count, 2 * width, hidden, seed=6, block=up_block, values=values)
    down = blocks(count, hidden, width, seed=7, block=down_block, values=values)
    router = random_tensor(count, hidden, seed=8, dtype=dtype) * hidden**-0.5
    here = Experts(router, gate_up, down, top_k, normalised=True)
    return here, Experts(router, matrix(gate_up, values), matrix(down, values), top_k, normalised=True)


def check_experts(tokens: int, shape: tuple, dtype: torch.dtype, values: torch.dtype, pdl: bool) -> None:
    ops = CudaOps(pdl=pdl)
    experts, whole = layer(shape, dtype, values)
    x = random_tensor(tokens, shape[2], seed=9, dtype=dtype)
    norm = uneven(random_tensor(1, shape[2], seed=5, dtype=dtype)).squeeze(0)
    found = ops.norm_experts(Residual(x), norm, EPS, experts)
    expected = reference.norm_experts(Residual(x), norm, EPS, whole)
    # In 16 bits, the last bit of a normalised value may decide between two experts.
    same = (found.chosen == expected.chosen).all(dim=1)
    assert same.all() if dtype == torch.float32 else same.float().mean() > 0.9
    added = ops.experts_add(found, experts, Residual(x.clone()), None).values
    close(added[same], reference.experts_add(expected, whole, Residual(x.clone()), None).values[same])


@pytest.fixture
def three_multiprocessors(monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type != "cuda":
        monkeypatch.setattr("kernels.triton.experts.multiprocessors_of", lambda device: 3)


@pytest.mark.usefixtures("three_multiprocessors")
@pytest.mark.parametrize("tokens", [1, 2, 5, 17, 33, 150])
@pytest.mark.parametrize("shape", LAYERS, ids=str)
def test_tokens_get_the_sum_of_experts_with_blocks(tokens: int, shape: tuple) -> None:
    check_experts(tokens, shape, torch.float32, torch.float32, pdl=False)


@pytest.mark.usefixtures("three_multiprocessors")
@pytest.mark.parametrize("form", ["dot", "grouped"])
@pytest.mark.parametrize("gemm", ["up", "down"])
def test_an_experts_plan_whose_steps_are_wider_than_a_block_is_refused(
    form: Literal["dot", "grouped"], gemm: str
) -> None:
    experts, _ = layer((8, 3, 256, 64, (64, 128), (128, 32)), torch.float32, torch.float32)
    plans = LayerPlans(ExpertsPlan(form, 16, 64, 128, warps=4), ExpertsPlan(form, 16, 64, 32, warps=4))
    group = {"up": 128, "down": 32}[gemm]
    plans = replace(plans, **{gemm: replace(getattr(plans, gemm), block_k=2 * group)})
    x = random_tensor(5, 256, seed=9, dtype=torch.float32)
    options = {"workspace": linear.allocate_workspace(DEVICE), "pdl": False}
    with pytest.raises(ValueError, match=f"block_k {2 * group}; .* block of {group} columns need"):
        activation = moe.activate(x, x[0], EPS, experts, plans=plans, **options)
        moe.weighted_sum(activation, experts, **options)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("hopper", [False, True])
def test_a_plan_for_blocks_fits_its_shape(group: int, hopper: bool) -> None:
    for rows in (1, 2, 9, 33, 64, 65, 128, 129, 300, 8192):
        for n in (64, 1000, 4096, 28672):
            for k in (192, 1024, 4096, 14336):
                plan = linear_plans.choose(rows, n, k, E4M3, block=(128, group), hopper=hopper)
                if plan is None:
                    assert hopper and group == 128 and rows > 64 and n % 128 == 0 and k % 512 == 0
                    continue
                assert plan.form == "dot" or (hopper and plan.form == "tiles" and rows <= plan.rows <= 128)
                assert plan.split == 1 or (rows <= plan.rows and linear_plans.fits_workspace(plan, n))
                assert k // plan.split % plan.block_k == 0 and group % plan.block_k == 0
                assert plan.rows * plan.block_n <= 64 * 32 * plan.warps
                assert linear_plans.tile_bytes(plan, 1) <= linear_plans.HOPPER_SHARED
    for tokens in (1, 2, 32, 33, 300, 8192):
        plans = experts_plans.choose(tokens, 8, 128, 2048, 768, E4M3, group=group)
        for one in (plans.up, plans.down):
            assert (one.form == "gemv") == (tokens <= 2) and one.form != "stream"
            assert one.block_k % group == 0 if one.form == "gemv" else group % one.block_k == 0
            assert one.rows * one.block_n <= 128 * 32 * one.warps


def test_kernels_for_blocks_use_the_tensor_cores_and_spill_no_registers() -> None:
    done = compiled("tests.kernels.blocks_compiled")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    gemms = {"_dot", "_tiles", "_up_dot", "_down_dot", "_grouped"}
    assert set(found) > gemms
    for name in gemms:
        for kernel in found[name]:
            # A few registers may be spilled outside the loop.
            assert kernel["wgmma"] and kernel["stack"] <= 16, (name, kernel)
            assert kernel["shared"] <= linear_plans.HOPPER_SHARED, (name, kernel)


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────

LARGE = [(6144, 4096, (128, 128)), (4096, 1536, (128, 64)), (2048, 768, (64, 128)), (512, 2880, (128, 128))]
MIXTURES = [(128, 8, 2048, 768, (128, 128), (128, 128)), (16, 4, 1024, 192, (64, 128), (128, 64))]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16, 33, 64, 65, 130, 300, 2048])
@pytest.mark.parametrize("shape", LARGE, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("hopper", [False, pytest.param(True, marks=on_hopper)])
def test_blocks_are_accurate_in_16_bits(rows: int, shape: tuple, dtype: torch.dtype, hopper: bool) -> None:
    check_linears(rows, shape, dtype, E4M3, pdl=True, hopper=hopper)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 33, 300, 4096])
@pytest.mark.parametrize("shape", MIXTURES, ids=str)
def test_experts_with_blocks_are_accurate_in_16_bits(tokens: int, shape: tuple) -> None:
    check_experts(tokens, shape, torch.bfloat16, E4M3, pdl=True)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 64, 300])
@pytest.mark.parametrize("hopper", [False, pytest.param(True, marks=on_hopper)])
def test_pdl_and_graphs_change_no_bit_of_products_with_blocks(rows: int, hopper: bool) -> None:
    check_bits(_chain(rows, 132 if hopper else 0))


def _chain(rows: int, hopper: int) -> Callable[[bool], list[torch.Tensor]]:
    weight = blocks(2048, 2048, seed=1, block=(128, 128), values=E4M3)
    experts, _ = layer(MIXTURES[0], torch.bfloat16, E4M3)
    x = random_tensor(rows, 2048, seed=2, dtype=torch.bfloat16)
    norm = random_tensor(2048, seed=5, dtype=torch.bfloat16)
    backends = {pdl: CudaOps(pdl=pdl, hopper_multiprocessors=hopper) for pdl in (False, True)}

    def run(pdl: bool) -> list[torch.Tensor]:
        ops = backends[pdl]
        first = ops.norm_linear(Residual(x), norm, EPS, weight, None)
        second = ops.linear(first, weight, None)
        activated = ops.norm_experts(Residual(second), norm, EPS, experts)
        return [first, second, ops.experts_sum(activated, experts)]

    return run
