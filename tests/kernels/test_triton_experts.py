"""Tests of the GEMMs of mixture-of-experts layers against their reference implementation.

The interpreter verifies indexing and masking in float32 and float16: which expert's weights are multiplied by
which token, sizes that are not multiples of a tile, experts chosen by no token or by every token, the sort,
and each token's sum. Only the tests marked `gpu` verify the numerics of bfloat16 and e4m3, and that results
with and without PDL and in graphs are bitwise equal.

Tolerances: the error against float64, for the whole result and for each row, is at most the sum of twice the
reference's error, one rounding error of the result, and the error of float32 sums (see `test_triton_linear`).
FP8 results are compared with the GEMM of quantised values, with a tolerance that is 4e-3 higher, because
tensor cores sum in about 14 bits.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from kernels import ChoiceCount, Experts, Fp8Weight, Residual, Weight, reference
from kernels.triton import linear_table
from kernels.triton.experts_plans import ExpertsPlan, ExpertsShape, LayerPlans, choose
from tests.kernels.closeness import error, worst_error
from tests.kernels.test_compiling import compiled
from tests.kernels.test_triton_linear import check_bits

experts = pytest.importorskip("kernels.triton.experts", exc_type=ImportError)
few = pytest.importorskip("kernels.triton.experts_few", exc_type=ImportError)
many = pytest.importorskip("kernels.triton.experts_many", exc_type=ImportError)
routes = pytest.importorskip("kernels.triton.experts_route", exc_type=ImportError)
linear = pytest.importorskip("kernels.triton.linear", exc_type=ImportError)
CudaOps = pytest.importorskip("kernels.cuda", exc_type=ImportError).CudaOps

EPS = 1e-5
POISON = 77.0
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
on_gpu = pytest.mark.skipif(DEVICE.type != "cuda", reason="needs an NVIDIA GPU")
E4M3 = torch.float8_e4m3fn

GEMV = ExpertsPlan("gemv", 1, 16, 32, warps=4)
DOT = ExpertsPlan("dot", 16, 32, 32, warps=4, stages=2)
GROUPED = ExpertsPlan("grouped", 16, 32, 32, warps=4, stages=2)


def _random(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=generator, device=DEVICE).to(dtype)


def choices(kind: str, tokens: int, count: int, top_k: int) -> torch.Tensor:
    """Return chosen experts `[tokens, top_k]` int32. `kind` is "random", "same" (the same experts for every
    token) or "odd" (only experts with odd ids)."""
    generator = torch.Generator().manual_seed(7)
    if kind == "same":
        chosen = torch.randperm(count, generator=generator)[:top_k].expand(tokens, -1)
    elif kind == "odd":
        odd = torch.arange(1, count, 2)
        ranks = torch.rand(tokens, len(odd), generator=generator).argsort(dim=1)[:, :top_k]
        chosen = odd[ranks]
    else:
        chosen = torch.rand(tokens, count, generator=generator).argsort(dim=1)[:, :top_k]
    return chosen.int().contiguous().to(DEVICE)


def quantised(weight: torch.Tensor, values: torch.dtype) -> Fp8Weight:
    """Quantise the experts' matrices. In the interpreter, `values` is not e4m3, so values are scaled but not
    rounded."""
    rounded, scales = reference.quantise_fp8(weight)
    return Fp8Weight(rounded if values == E4M3 else (weight.float() / scales).to(values), scales.squeeze(-1))


def routed(chosen: torch.Tensor, count: int) -> routes.Routed:
    """Return the choices with their places and counts, as `route_many` returns them."""
    tokens = len(chosen)
    block = routes.block_tokens(tokens, count)
    blocks = -(-tokens // block)
    taken = torch.zeros(blocks * block, max(16, 1 << (count - 1).bit_length()), dtype=torch.int32)
    taken[:tokens].scatter_(1, chosen.cpu().long(), 1)
    taken = taken.view(blocks, block, -1)
    places = (taken.cumsum(1) - taken).flatten(0, 1)[:tokens].gather(1, chosen.cpu().long())
    counts = taken.sum(1)
    empty = torch.empty(0, device=DEVICE)
    return routes.Routed(empty, None, chosen, empty, places.int().to(DEVICE), counts.int().to(DEVICE))


class Case:
    """The experts' matrices, tokens that are already normalised, and the experts that the tokens choose."""

    def __init__(
        self,
        tokens: int,
        count: int,
        top_k: int,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        kind: str = "random",
        values: torch.dtype | None = None,
    ) -> None:
        self.dtype = dtype
        self.x = _random(tokens, hidden, seed=1, dtype=dtype)
        self.chosen = choices(kind, tokens, count, top_k)
        self.weights = torch.rand(tokens, top_k, generator=torch.Generator().manual_seed(2)).to(DEVICE)
        self.residual = _random(tokens, hidden, seed=3, dtype=dtype)
        self.live = torch.arange(tokens, device=DEVICE) % 3 - 1
        """One number per token, [tokens] int64. Negative numbers mark padding, which is not counted."""
        gate_up = _random(count, 2 * width, hidden, seed=4, dtype=dtype) * hidden**-0.5
        down = _random(count, hidden, width, seed=5, dtype=dtype) * width**-0.5
        self.values = values
        self.gate_up: Weight = gate_up if values is None else quantised(gate_up, values)
        self.down: Weight = down if values is None else quantised(down, values)
        self.workspace = linear.allocate_workspace(DEVICE)

    @property
    def slack(self) -> float:
        """Allowed error in addition to twice the reference's error."""
        sums = 4 * max(self.x.shape[1], 64) ** 0.5 * 2**-24
        return torch.finfo(self.dtype).eps / 2 + sums + (4e-3 if self.values is not None else 0)

    def quantise(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return x in the dtype that the GEMMs read, with its scales if the experts are quantised."""
        return (x, None) if self.values is None else linear.quantise(x, values=self.values, pdl=False)

    def dequantised(self, x: torch.Tensor) -> torch.Tensor:
        values, scales = self.quantise(x.contiguous())
        return values.double() if scales is None else values.double() * scales.double()

    def products(self, x: torch.Tensor, weight: Weight) -> torch.Tensor:
        """Return the exact products of `x [tokens × top_k, in]` float64 with the matrices of the chosen
        experts."""
        chosen = self.chosen.flatten()
        values, scales = _parts(weight)
        result = x.new_empty(len(x), values.shape[1])
        for expert in chosen.unique().tolist():
            matrix = values[expert].double()
            if scales is not None:
                matrix = matrix * scales[expert].double().unsqueeze(1)
            rows = chosen == expert
            result[rows] = x[rows] @ matrix.T
        return result

    def check_up(self, found: torch.Tensor) -> None:
        """Check `silu(gate) × up`, in the order of the choices."""
        x = self.dequantised(self.x).repeat_interleave(self.chosen.shape[1], dim=0)
        products = self.products(x, self.gate_up)
        gate, up = products.chunk(2, dim=1)
        self._check(found, reference.silu_mul(products.to(self.dtype)), F.silu(gate) * up)

    def check_down(self, found: torch.Tensor, activations: torch.Tensor) -> None:
        """Check the weighted sum with the residual. `activations` are in the order of the choices."""
        products = self.products(self.dequantised(activations), self.down)
        tokens, top_k = self.chosen.shape
        factors = self.weights.unsqueeze(-1)

        def summed(results: torch.Tensor) -> torch.Tensor:
            return (results.view(tokens, top_k, -1) * factors.to(results.dtype)).sum(dim=1)

        exact = summed(products) + self.residual.double()
        rounded = summed(products.to(self.dtype).float()).to(self.dtype) + self.residual
        self._check(found, rounded, exact)

    def _check(self, found: torch.Tensor, by_torch: torch.Tensor, exact: torch.Tensor) -> None:
        assert found.shape == exact.shape and found.dtype == self.dtype and found.isfinite().all()
        assert error(found, exact) <= 2 * error(by_torch, exact) + self.slack
        assert worst_error(found, exact) <= 2 * worst_error(by_torch, exact) + 2 * self.slack

    def check_few(self, up: ExpertsPlan, down: ExpertsPlan, pdl: bool = False) -> None:
        weight, scale = _parts(self.gate_up)
        options = {"dtype": self.dtype, "pdl": pdl}
        x, x_scale = self.quantise(self.x)
        activations = few.up(x, x_scale, self.chosen, weight, scale, up, **options)
        self.check_up(activations)
        weight, scale = _parts(self.down)
        x, x_scale = (activations, None) if down.quantises else self.quantise(activations)
        out = self.residual.clone()
        inputs = (x, x_scale, self.chosen, self.weights, weight, scale, down)
        found = few.down(*inputs, workspace=self.workspace, residual=out, out=out, **options)
        assert found is out
        self.check_down(found, activations)
        assert self.workspace.arrived.eq(0).all()
        alone = few.down(*inputs, workspace=self.workspace, **options)
        whole = alone.float() + self.residual.float()
        assert error(whole, found.double()) <= 2 * torch.finfo(self.dtype).eps

    def check_many(self, up: ExpertsPlan, down: ExpertsPlan, programs: int, pdl: bool = False) -> None:
        weight, scale = _parts(self.gate_up)
        options = {"dtype": self.dtype, "pdl": pdl}
        x, x_scale = self.quantise(self.x)
        rows = (up.rows, down.rows)
        by_expert = many.sort(routed(self.chosen, len(weight)), len(weight), rows, pdl=pdl)
        top_k = self.chosen.shape[1]
        found = many.up(x, x_scale, by_expert, top_k, weight, scale, up, programs, **options)
        activations = torch.empty_like(found)
        activations[by_expert.order.long()] = found
        self.check_up(activations)
        weight, scale = _parts(self.down)
        x, x_scale = self.quantise(found)
        results = many.down(x, x_scale, by_expert, weight, scale, down, programs, **options)
        out = self.residual.clone()
        assert many.combine(results, self.weights, residual=out, out=out, pdl=pdl) is out
        self.check_down(out, activations)
        alone = many.combine(results, self.weights, pdl=pdl)
        whole = alone.float() + self.residual.float()
        assert error(whole, out.double()) <= 2 * torch.finfo(self.dtype).eps

    def check_some(self, plans: LayerPlans, here: range, pdl: bool = False) -> torch.Tensor:
        """Run a rank that has only the experts in `here`, and return its partial sum. Check that the results
        of its experts equal those on a rank with all experts. Set the results of all other experts to NaN, so
        that the sum shows if they are read."""
        weight, scale = _parts(self.gate_up)
        down, down_scale = _parts(self.down)
        some = slice(here.start, here.stop)
        x, x_scale = self.quantise(self.x)
        options = {"dtype": self.dtype, "pdl": pdl}
        top_k, elsewhere = self.chosen.shape[1], ~_inside(self.chosen, here)
        scales = (None, None) if scale is None else (scale[some], down_scale[some])
        if plans.grouped:
            count, rows = len(weight), (plans.up.rows, plans.down.rows)
            choices = routed(self.chosen, count)
            all_groups = many.sort(choices, count, rows, pdl=pdl)
            share = {"first": here.start, "held": len(here), "pdl": pdl}
            by_expert = many.sort(choices, count, rows, **share)
            elsewhere = elsewhere.flatten()[by_expert.order.long()]
            programs = experts.multiprocessors_of(DEVICE) if DEVICE.type == "cuda" else 3

            def up(weight: torch.Tensor, scale: torch.Tensor | None, first: int | None) -> torch.Tensor:
                groups = all_groups if first is None else by_expert
                return many.up(x, x_scale, groups, top_k, weight, scale, plans.up, programs, **options)
        else:
            elsewhere = elsewhere.flatten()

            def up(weight: torch.Tensor, scale: torch.Tensor | None, first: int | None) -> torch.Tensor:
                return few.up(x, x_scale, self.chosen, weight, scale, plans.up, first=first, **options)

        found = up(weight[some], scales[0], here.start)
        assert torch.equal(found[~elsewhere], up(weight, scale, None)[~elsewhere])
        if torch.are_deterministic_algorithms_enabled():  # undefined memory is NaN
            assert found[elsewhere].isnan().all()
        found[elsewhere] = torch.nan
        if plans.grouped:
            x, x_scale = self.quantise(found)
            inputs = (x, x_scale, by_expert, down[some], scales[1], plans.down, programs)
            results = many.down(*inputs, **options)
            results[~_inside(self.chosen, here).flatten()] = torch.nan
            computed = many.ComputedChoices(self.chosen, here.start, len(here))
            return many.combine(results, self.weights, computed=computed, pdl=pdl)
        x, x_scale = (found, None) if plans.down.quantises else self.quantise(found)
        inputs = (x, x_scale, self.chosen, self.weights, down[some], scales[1], plans.down)
        return few.down(*inputs, workspace=self.workspace, first=here.start, **options)

    def check_ranks(self, plans: LayerPlans, pdl: bool = False) -> None:
        """Check that the partial sums of three ranks, each with some of the experts, add up to the sum over
        all experts."""
        count = len(_parts(self.gate_up)[0])
        ranks = [range(1), range(1, count - 1), range(count - 1, count)]
        parts = [self.check_some(plans, here, pdl) for here in ranks]
        for here, part in zip(ranks, parts, strict=True):
            assert not part[~_inside(self.chosen, here).any(dim=1)].any()
        whole = self.check_some(plans, range(count), pdl)
        total = sum(part.float() for part in parts)
        assert error(total, whole.double()) <= 4 * torch.finfo(self.dtype).eps


def _inside(chosen: torch.Tensor, here: range) -> torch.Tensor:
    return (chosen >= here.start) & (chosen < here.stop)


def _parts(weight: Weight) -> tuple[torch.Tensor, torch.Tensor | None]:
    return (weight.values, weight.scales) if isinstance(weight, Fp8Weight) else (weight, None)


# ── on any machine ───────────────────────────────────────────────────────────────────────────────────

FEW = [
    # Fields: tokens, experts, top_k, hidden, width, kind of choices. Sizes are not multiples of a tile.
    (1, 7, 3, 72, 40, "random"),
    (3, 5, 2, 40, 24, "random"),
    (2, 9, 4, 64, 32, "odd"),
    (4, 3, 2, 48, 40, "same"),
]
LATE = [(13, 4, 3, 48, 40, "random"), (16, 5, 1, 40, 24, "same"), (9, 40, 2, 40, 24, "odd")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", FEW, ids=str)
def test_few_tokens_get_the_sum_of_their_experts_by_gemv(case: tuple, dtype: torch.dtype) -> None:
    *shape, kind = case
    Case(*shape, dtype, kind).check_few(GEMV, GEMV)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", FEW + LATE, ids=str)
def test_few_tokens_get_the_sum_of_their_experts_by_dot(case: tuple, dtype: torch.dtype) -> None:
    *shape, kind = case
    Case(*shape, dtype, kind).check_few(DOT, DOT)


@pytest.mark.parametrize("rows", [8, 16])
def test_tiles_may_have_more_or_fewer_rows_than_an_expert_has_tokens(rows: int) -> None:
    *shape, kind = FEW[3]
    plan = replace(DOT, rows=rows)
    Case(*shape, torch.float32, kind).check_few(plan, plan)
    *shape, kind = LATE[0]
    up, down = replace(GROUPED, rows=rows), replace(GROUPED, rows=24 - rows)
    Case(*shape, torch.float32, kind).check_many(up, down, programs=2)


@pytest.mark.parametrize("plan", [GEMV, DOT], ids=lambda plan: plan.form)
@pytest.mark.parametrize("case", [FEW[0], FEW[3]], ids=str)
def test_few_tokens_get_the_sum_of_quantised_experts(case: tuple, plan: ExpertsPlan) -> None:
    *shape, kind = case
    Case(*shape, torch.float16, kind, torch.float16).check_few(plan, plan)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(
    "case", [FEW[0], LATE[0], (37, 5, 2, 40, 24, "same"), (20, 9, 2, 64, 32, "odd")], ids=str
)
def test_many_tokens_get_the_sum_of_their_experts(case: tuple, dtype: torch.dtype) -> None:
    *shape, kind = case
    Case(*shape, dtype, kind).check_many(GROUPED, GROUPED, programs=3)


@pytest.mark.parametrize("case", [FEW[0], (19, 3, 2, 48, 40, "same")], ids=str)
def test_many_tokens_get_the_sum_of_quantised_experts(case: tuple) -> None:
    *shape, kind = case
    Case(*shape, torch.float16, kind, torch.float16).check_many(GROUPED, GROUPED, programs=2)


@pytest.fixture
def undefined_memory_is_nan() -> Iterator[None]:
    """Make `torch.empty` return NaN, so that kernels that read undefined results return NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("undefined_memory_is_nan")
@pytest.mark.parametrize("values", [None, torch.float16], ids=str)
@pytest.mark.parametrize("plan", [GEMV, DOT, GROUPED], ids=lambda plan: plan.form)
@pytest.mark.parametrize("case", [FEW[0], FEW[2], LATE[2]], ids=str)
def test_ranks_with_some_experts_add_up_to_all(
    case: tuple, plan: ExpertsPlan, values: torch.dtype | None
) -> None:
    *shape, kind = case
    Case(*shape, torch.float32 if values is None else torch.float16, kind, values).check_ranks(
        LayerPlans(plan, plan)
    )


@pytest.mark.parametrize("kind", ["random", "same", "odd"])
@pytest.mark.parametrize(
    ("tokens", "count", "top_k"), [(1, 4, 2), (70, 4, 2), (50, 500, 3), (600, 512, 2)], ids=str
)
def test_choices_are_sorted_by_expert_then_by_token(tokens: int, count: int, top_k: int, kind: str) -> None:
    """With 600 tokens and 512 experts, there are more blocks than a program adds up at a time. The groups
    cover all experts, or only some of them."""
    chosen = choices(kind, tokens, count, top_k)
    counts = chosen.flatten().bincount(minlength=count).tolist()
    end_positions = list(itertools.accumulate(counts))
    for first, held in ((0, count), (count // 3, count // 2)):
        share = {"first": first, "held": held, "pdl": False}
        found = many.sort(routed(chosen, count), count, (16, 4), **share)
        assert torch.equal(found.order.long(), chosen.flatten().argsort(stable=True))
        assert set(found.groups) == {16, 4}
        for rows, groups in found.groups.items():
            expected = [
                [expert - first, begin, end_positions[expert]]
                for expert in range(first, first + held)
                for begin in range(end_positions[expert] - counts[expert], end_positions[expert], rows)
            ]
            assert groups[0, 0] == len(expected)
            assert groups[1 : len(expected) + 1, :3].tolist() == expected


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    case = Case(4, 3, 2, 48, 40, torch.float32, "same")
    for plan in (GEMV, DOT):
        activations = few.up(case.x, None, case.chosen, case.gate_up, None, plan, pdl=False)
        bad = activations.clone()
        bad[2:4] = torch.nan  # rows of the second token's choices
        inputs = (None, case.chosen, case.weights, case.down, None, plan)
        expected = few.down(activations, *inputs, workspace=case.workspace, pdl=False)
        found = few.down(bad, *inputs, workspace=case.workspace, pdl=False)
        assert found[1].isnan().all()
        for row in (0, 2, 3):
            assert torch.equal(found[row], expected[row])


@pytest.mark.parametrize("here", [range(6), range(2, 5)], ids=str)
@pytest.mark.parametrize("tokens", [1, 4, 18, 40])
def test_the_operations_choose_kernels_by_the_number_of_tokens(tokens: int, here: range) -> None:
    """Compare both operations with the reference, through every path of `experts`, with all experts and with
    some of the experts."""
    made = Case(tokens, 6, 2, 64, 32, torch.float32)
    router = _random(6, 64, seed=6, dtype=torch.float32)
    some = slice(here.start, here.stop)
    layer = Experts(router, made.gate_up[some], made.down[some], 2, normalised=True, first=here.start)
    gain = _random(64, seed=8, dtype=torch.float32)
    ops = CudaOps(pdl=False)
    for residual in (made.residual, None):
        results, totals = [], []
        for each in (ops, reference):
            count = ChoiceCount(torch.zeros(6, dtype=torch.int64, device=DEVICE), made.live)
            activation = each.norm_experts(Residual(made.x), gain, EPS, layer, count)
            totals.append(count.totals)
            if residual is None:
                results.append(each.experts_sum(activation, layer))
                out = torch.full_like(made.x, POISON)
                assert each.experts_sum(activation, layer, out) is out
                assert torch.equal(out, results[-1])
            else:
                added = each.experts_add(activation, layer, Residual(residual.clone()), None)
                results.append(added.values)
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
        assert torch.equal(*totals)


def test_no_tokens_have_no_results() -> None:
    made = Case(0, 6, 2, 64, 32, torch.float32)
    layer = Experts(torch.zeros(6, 64, device=DEVICE), made.gate_up, made.down, 2, normalised=True)
    for tokens in (1, 70):
        plans = choose(tokens, 2, 6, 64, 32, torch.float32)
        options = {"workspace": made.workspace, "pdl": False}
        gain = torch.ones(64, device=DEVICE)
        activation = experts.activate(made.x, gain, EPS, layer, plans=plans, **options)
        assert experts.weighted_sum(activation, layer, residual=made.x, **options).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, E4M3], ids=str)
@pytest.mark.parametrize("shape", [(8, 128, 2048, 768), (2, 8, 4096, 14336), (8, 64, 2048, 96)], ids=str)
def test_a_plan_fits_its_shape_and_the_shared_memory(shape: tuple, dtype: torch.dtype) -> None:
    top_k, count, hidden, width = shape
    for shared in (99 << 10, 227 << 10):
        for tokens in (1, 2, 3, 16, 17, 32, 33, 128, 300, 1024, 8192):
            plans = choose(tokens, top_k, count, hidden, width, dtype, shared)
            assert plans.grouped == (plans.down.form == "grouped") == (tokens > 32)
            for plan, k in ((plans.up, hidden), (plans.down, width)):
                if plan.form == "gemv":
                    assert tokens <= 2 and plan.block_k <= 2 * k
                    continue
                assert plan.form == "grouped" or plan.rows >= tokens
                assert k % plan.block_k == 0 and plan.block_k >= 32
                tile = (plan.block_n + plan.rows) * plan.block_k * dtype.itemsize
                assert plan.programs * plan.stages * tile <= shared


def test_arguments_that_do_not_match_are_reported() -> None:
    case = Case(2, 5, 2, 48, 40, torch.float32)
    with pytest.raises(ValueError, match=r"x is \(2, 47\)"):
        few.up(case.x[:, 1:], None, case.chosen, case.gate_up, None, GEMV, pdl=False)
    with pytest.raises(ValueError, match=r"chosen is .*int64; needs int32"):
        few.up(case.x, None, case.chosen.long(), case.gate_up, None, GEMV, pdl=False)
    with pytest.raises(ValueError, match=r"weight_scale is \(5,\); needs \(5, 80\)"):
        few.up(case.x, None, case.chosen, case.gate_up, torch.ones(5), GEMV, pdl=False)
    by_expert = many.sort(routed(case.chosen, 6), 6, (16, 16), pdl=False)
    with pytest.raises(ValueError, match="assigns 4 rows to 6 experts; expected 4 rows and 5 experts"):
        many.up(case.x, None, by_expert, 2, case.gate_up, None, GROUPED, 2, pdl=False)
    with pytest.raises(ValueError, match=r"residual is \(1, 48\); expected \(2, 48\)"):
        many.combine(case.x.repeat(2, 1), case.weights, residual=case.x[:1], pdl=False)


def test_the_compiled_kernels_wait_before_they_read_results() -> None:
    done = compiled("tests.kernels.experts_compiled")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wait, start = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    few = ("_up_gemv", "_up_dot", "_up_stream", "_down_gemv", "_down_dot", "_down_stream")
    names = (*few, "_grouped", "_combine")
    assert set(found) == {*names, *(f"{name} of some experts" for name in names)}
    for name in (name for name in found if name.startswith("_up")):
        # `down` reads the choices before it waits for `up`, so `down` may start only after `up` has waited
        # for the kernel before `up`.
        assert found[name][0][:2] == [wait, start]
    for name in (name for name in found if name.startswith("_down")):
        (events,) = found[name]
        before = events[: events.index(wait)]
        assert before[0] == start and set(before[1:]) == {"ld.global"}
        # Before they wait, the other kernels load the choices, the routing weights and a tile of the matrix.
        assert name.startswith("_down_dot") or len(before) > 3
        assert not name.startswith("_down_stream") or len(before) > 24
    waiting = [name for name in found if name.startswith(("_grouped", "_combine"))]
    assert all(events[:2] == [start, wait] for name in waiting for events in found[name])
    computing = [name for name in found if "_dot" in name or name.startswith("_grouped")]
    on_tensor_cores = [events for name in computing for events in found[name]]
    assert all("wgmma.mma_async" in events for events in on_tensor_cores)
    streams = [events for name in found if "_stream" in name for events in found[name]]
    assert all("mma.sync" in events for events in streams)


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────────

QWEN = (128, 8, 2048, 768)
STREAM = ExpertsPlan("stream", 1, 16, 128, 4, stages=2), ExpertsPlan("stream", 1, 16, 128, 8)
OTHERS = [(8, 2, 4096, 1024), (60, 6, 2048, 352), (16, 4, 1024, 96)]
"""Number of experts, top_k, hidden and width, for Qwen3-30B-A3B (`QWEN`) and for other models on several
ranks."""
LAYERS = [(shape, torch.bfloat16, values) for shape in (QWEN, *OTHERS) for values in (None, E4M3)]
LAYERS += [(QWEN, torch.float16, None), (QWEN, torch.float16, E4M3)]
"""Shape, dtype of the model and dtype of the quantised weights (None: not quantised), for each test layer."""


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype", "values"), LAYERS, ids=str)
def test_few_tokens_are_accurate_in_16_bits_and_fp8(
    shape: tuple, dtype: torch.dtype, values: torch.dtype | None
) -> None:
    count, top_k, hidden, width = shape
    for kind, every in (("random", (1, 2, 5, 16, 17, 32)), ("same", (16, 31)), ("odd", (8,))):
        for tokens in every:
            case = Case(tokens, *shape, dtype, kind, values)
            plans = choose(tokens, top_k, count, hidden, width, values or dtype)
            gemv = choose(1, top_k, count, hidden, width, values or dtype)
            case.check_few(plans.up, plans.down, pdl=True)
            if tokens <= 5:
                case.check_few(gemv.up, gemv.down, pdl=True)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [QWEN, (8, 2, 4096, 1024), (16, 4, 1024, 384)], ids=str)
def test_few_tokens_are_accurate_by_stream(shape: tuple, dtype: torch.dtype) -> None:
    top_k = shape[1]
    for tokens, kind in ((1, "random"), (2, "same"), (5, "odd")):
        case = Case(tokens, *shape, dtype, kind, E4M3)
        for block_n, block_k, warps, ahead in ((16, 64, 4, 2), (16, 128, 8, 1), (32, 256, 4, 4)):
            up = ExpertsPlan("stream", 1, block_n, block_k, warps, ahead)
            down = ExpertsPlan("stream", 1, block_n, min(block_k, 128), top_k)
            case.check_few(up, down, pdl=True)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "dtype", "values"), LAYERS, ids=str)
def test_many_tokens_are_accurate_in_16_bits_and_fp8(
    shape: tuple, dtype: torch.dtype, values: torch.dtype | None
) -> None:
    count, top_k, hidden, width = shape
    for kind, every in (("random", (33, 300, 600, 1024)), ("same", (130,)), ("odd", (513,))):
        for tokens in every:
            plans = choose(tokens, top_k, count, hidden, width, values or dtype)
            case = Case(tokens, *shape, dtype, kind, values)
            case.check_many(plans.up, plans.down, experts.multiprocessors_of(DEVICE), pdl=True)


def shipped() -> list[tuple[ExpertsShape, int, LayerPlans]]:
    """Return the shape, the maximum number of tokens and the plans of each entry of the shipped tables."""
    tables = [linear_table.read_table(path) for path in sorted(linear_table.FOLDER.glob("*.json"))]
    return [
        (shape, most, entry.plans)
        for table in tables
        for shape, entries in table.experts.items()
        for most, entry in entries.items()
    ]


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "most", "plans"), shipped(), ids=str)
def test_shipped_plans_are_accurate(shape: ExpertsShape, most: int, plans: LayerPlans) -> None:
    sizes = (shape.experts, shape.top_k, shape.hidden, shape.intermediate)
    values = shape.dtype if shape.dtype == E4M3 else None
    dtype = torch.bfloat16 if values is not None else shape.dtype
    for tokens in {most, most // 2 + 1}:
        case = Case(tokens, *sizes, dtype, values=values)
        if plans.grouped:
            case.check_many(plans.up, plans.down, experts.multiprocessors_of(DEVICE), pdl=True)
        else:
            case.check_few(plans.up, plans.down, pdl=True)


@on_gpu
@pytest.mark.gpu
@pytest.mark.usefixtures("undefined_memory_is_nan")
@pytest.mark.parametrize("values", [None, E4M3], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 8, 32, 200])
def test_ranks_with_some_experts_add_up_to_all_in_16_bits_and_fp8(
    tokens: int, values: torch.dtype | None
) -> None:
    count, top_k, hidden, width = QWEN
    plans = choose(tokens, top_k, count, hidden, width, values or torch.bfloat16)
    case = Case(tokens, *QWEN, torch.bfloat16, values=values)
    case.check_ranks(plans, pdl=True)
    stream = LayerPlans(*STREAM)
    if values is not None and tokens <= 2:
        case.check_ranks(stream, pdl=True)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("values", [None, E4M3], ids=str)
def test_8192_tokens_are_accurate(values: torch.dtype | None) -> None:
    count, top_k, hidden, width = QWEN
    plans = choose(8192, top_k, count, hidden, width, values or torch.bfloat16)
    for kind in ("random", "same"):
        case = Case(8192, *QWEN, torch.bfloat16, kind, values)
        case.check_many(plans.up, plans.down, experts.multiprocessors_of(DEVICE), pdl=True)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize(("tokens", "planned"), [(1, 1), (2, 2), (1, 3), (16, 16), (64, 64), (1000, 1000)])
@pytest.mark.parametrize(("values", "stream"), [(None, False), (E4M3, False), (E4M3, True)], ids=str)
def test_pdl_and_graphs_change_no_bit_of_the_experts(
    tokens: int, planned: int, values: torch.dtype | None, stream: bool
) -> None:
    """Run a chain of layers in which each layer's tokens choose different experts than in the previous layer,
    so a kernel that starts too early reads stale data. `planned` is the number of tokens for which plans are
    chosen, unless `stream` selects the plans."""
    count, top_k, hidden, width = QWEN
    case = Case(tokens, *QWEN, torch.bfloat16, values=values)
    plans = choose(planned, top_k, count, hidden, width, values or torch.bfloat16)
    if stream:
        plans = LayerPlans(*STREAM)
    router = _random(count, hidden, seed=6, dtype=torch.bfloat16)
    layer = Experts(router, case.gate_up, case.down, top_k, normalised=True)
    gain = _random(hidden, seed=8, dtype=torch.bfloat16)

    def run(pdl: bool) -> list[torch.Tensor]:
        results, x = [case.x], case.x
        for _ in range(4):
            options = {"workspace": case.workspace, "pdl": pdl}
            activation = experts.activate(x, gain, EPS, layer, plans=plans, **options)
            x = experts.weighted_sum(activation, layer, residual=x, **options)
            results += [activation.chosen, activation.weights, activation.values.values.view(torch.uint8), x]
        return results

    check_bits(run)
    assert case.workspace.arrived.eq(0).all()


@on_gpu
@pytest.mark.gpu
def test_the_result_of_a_token_does_not_depend_on_runs() -> None:
    """Programs finish in different orders, but the order of every sum is fixed."""
    for tokens in (16, 700):
        case = Case(tokens, *QWEN, torch.bfloat16)
        plans = choose(tokens, 8, 128, 2048, 768, torch.bfloat16)
        router = _random(128, 2048, seed=6, dtype=torch.bfloat16)
        layer = Experts(router, case.gate_up, case.down, 8, normalised=True)
        gain, results = torch.ones(2048, dtype=torch.bfloat16, device=DEVICE), []
        for _ in range(10):
            activation = experts.activate(case.x, gain, EPS, layer, workspace=case.workspace, plans=plans)
            results.append(experts.weighted_sum(activation, layer, workspace=case.workspace))
        assert all(torch.equal(result, results[0]) for result in results)
