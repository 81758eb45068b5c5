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

from kernels import ChoiceCount, Experts, Residual, reference
from kernels.triton import linear_table
from kernels.triton.experts_plans import ExpertsPlan, ExpertsShape, LayerPlans, choose
from tests.kernels.experts_cases import (
    E4M3,
    Case,
    choices,
    experts,
    few,
    in_both_dtypes,
    many,
    random_tensor,
    routed,
)
from tests.kernels.linear_cases import DEVICE, EPS, POISON, CudaOps, on_gpu
from tests.kernels.test_compiling import compiled
from tests.kernels.test_triton_linear import check_bits

GEMV = ExpertsPlan("gemv", 1, 16, 32, warps=4)
DOT = ExpertsPlan("dot", 16, 32, 32, warps=4, stages=2)
GROUPED = ExpertsPlan("grouped", 16, 32, 32, warps=4, stages=2)
LARGE = ExpertsPlan("grouped", 64, 256, 32, warps=8, stages=2)
"""A plan with tiles so large that groups with few choices get smaller ones."""


# ── on any machine ───────────────────────────────────────────────────────────────────────────────────

FEW = [
    # Fields: tokens, experts, top_k, hidden, width, kind of choices. Sizes are not multiples of a tile.
    (1, 7, 3, 72, 40, "random"),
    (3, 5, 2, 40, 24, "random"),
    (2, 9, 4, 64, 32, "odd"),
    (4, 3, 2, 48, 40, "same"),
]
LATE = [(13, 4, 3, 48, 40, "random"), (16, 5, 1, 40, 24, "same"), (9, 40, 2, 40, 24, "odd")]
MANY = [FEW[0], LATE[0], (37, 5, 2, 40, 24, "same"), (20, 9, 2, 64, 32, "odd")]


@pytest.mark.parametrize(("case", "dtype"), in_both_dtypes(FEW), ids=str)
def test_few_tokens_get_the_sum_of_their_experts_by_gemv(case: tuple, dtype: torch.dtype) -> None:
    *shape, kind = case
    Case(*shape, dtype, kind).check_few(GEMV, GEMV)


@pytest.mark.parametrize(("case", "dtype"), in_both_dtypes(FEW + LATE), ids=str)
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


@pytest.mark.parametrize(("case", "dtype"), in_both_dtypes(MANY), ids=str)
def test_many_tokens_get_the_sum_of_their_experts(case: tuple, dtype: torch.dtype) -> None:
    *shape, kind = case
    Case(*shape, dtype, kind).check_many(GROUPED, GROUPED, programs=3)


@pytest.mark.parametrize(
    ("case", "values"),
    [((70, 3, 2, 48, 40, "same"), None), ((100, 3, 2, 40, 24, "random"), torch.float16)],
    ids=str,
)
def test_groups_of_any_size_get_the_sum_of_their_experts(case: tuple, values: torch.dtype | None) -> None:
    *shape, kind = case
    Case(*shape, torch.float16, kind, values).check_many(LARGE, LARGE, programs=3)


@pytest.mark.parametrize("case", [FEW[0], (19, 3, 2, 48, 40, "same")], ids=str)
def test_many_tokens_get_the_sum_of_quantised_experts(case: tuple) -> None:
    *shape, kind = case
    Case(*shape, torch.float16, kind, torch.float16).check_many(GROUPED, GROUPED, programs=2)


@pytest.fixture
def undefined_memory_is_nan() -> Iterator[None]:
    """Make `torch.empty` return NaN, so that kernels that read undefined results return NaN."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error")
    yield
    torch.set_deterministic_debug_mode(before)


@pytest.mark.usefixtures("undefined_memory_is_nan")
@pytest.mark.parametrize("plan", [GEMV, DOT, GROUPED], ids=lambda plan: plan.form)
@pytest.mark.parametrize(
    ("case", "values"), [(FEW[0], torch.float16), (FEW[2], None), (LATE[2], None)], ids=str
)
def test_ranks_with_some_experts_add_up_to_all(
    case: tuple, plan: ExpertsPlan, values: torch.dtype | None
) -> None:
    *shape, kind = case
    Case(*shape, torch.float32 if values is None else torch.float16, kind, values).check_ranks(
        LayerPlans(plan, plan)
    )


@pytest.mark.parametrize(
    ("tokens", "count", "top_k", "kind"),
    [
        (1, 4, 2, "random"),
        *((70, 4, 2, kind) for kind in ("random", "same", "odd")),
        (50, 500, 3, "odd"),
        (200, 512, 2, "random"),
    ],
)
def test_choices_are_sorted_by_expert_then_by_token(tokens: int, count: int, top_k: int, kind: str) -> None:
    """With 200 tokens and 512 experts, there are more blocks than a program adds up at a time. The groups
    cover either all experts or some of them."""
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


@pytest.mark.parametrize(
    ("tokens", "here"),
    [*((tokens, range(6)) for tokens in (1, 4, 18, 40)), (4, range(2, 5)), (40, range(2, 5))],
    ids=str,
)
def test_the_operations_choose_kernels_by_the_number_of_tokens(tokens: int, here: range) -> None:
    """Compare both operations with the reference on every path through `experts`, with all experts and with
    some of them."""
    made = Case(tokens, 6, 2, 64, 32, torch.float32)
    router = random_tensor(6, 64, seed=6, dtype=torch.float32)
    some = slice(here.start, here.stop)
    layer = Experts(router, made.gate_up[some], made.down[some], 2, normalised=True, first=here.start)
    gain = random_tensor(64, seed=8, dtype=torch.float32)
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
    with pytest.raises(ValueError, match=r"chosen is .*int64; expected int32"):
        few.up(case.x, None, case.chosen.long(), case.gate_up, None, GEMV, pdl=False)
    with pytest.raises(ValueError, match=r"weight_scale is .* \(5,\); expected float32 \(5, 80\)"):
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
        # `down` reads the choices before it waits for `up`. `down` may therefore start only after `up` has
        # waited for the kernel that precedes `up`.
        assert found[name][0][:2] == [wait, start]
    for name in (name for name in found if name.startswith("_down")):
        (events,) = found[name]
        before = events[: events.index(wait)]
        assert before[0] == start and set(before[1:]) == {"ld.global"}
        # The other kernels load the choices, the routing weights and a tile of the matrix before they wait.
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
"""For each test layer: the shape, the dtype of the model, and the dtype of the quantised weights (None if
they are not quantised)."""


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
    """Run a chain of layers in which each layer's tokens choose other experts than in the previous layer, so
    that a kernel that starts too early reads stale data. The plans are those for `planned` tokens, unless
    `stream` selects other plans."""
    count, top_k, hidden, width = QWEN
    case = Case(tokens, *QWEN, torch.bfloat16, values=values)
    plans = choose(planned, top_k, count, hidden, width, values or torch.bfloat16)
    if stream:
        plans = LayerPlans(*STREAM)
    router = random_tensor(count, hidden, seed=6, dtype=torch.bfloat16)
    layer = Experts(router, case.gate_up, case.down, top_k, normalised=True)
    gain = random_tensor(hidden, seed=8, dtype=torch.bfloat16)

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
    """Programs finish in a different order in each run, but the order of every sum is fixed."""
    for tokens in (16, 700):
        case = Case(tokens, *QWEN, torch.bfloat16)
        plans = choose(tokens, 8, 128, 2048, 768, torch.bfloat16)
        router = random_tensor(128, 2048, seed=6, dtype=torch.bfloat16)
        layer = Experts(router, case.gate_up, case.down, 8, normalised=True)
        gain, results = torch.ones(2048, dtype=torch.bfloat16, device=DEVICE), []
        for _ in range(10):
            activation = experts.activate(case.x, gain, EPS, layer, workspace=case.workspace, plans=plans)
            results.append(experts.weighted_sum(activation, layer, workspace=case.workspace))
        assert all(torch.equal(result, results[0]) for result in results)
