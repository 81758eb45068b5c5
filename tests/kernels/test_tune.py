"""Tests that the search chooses the fastest correct plan. Times are simulated, because they can be measured
only on a GPU."""

from __future__ import annotations

import math

import pytest
import torch

from kernels.triton import linear_plans
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import PlanEntry, Product, Table, problem
from kernels.tune import search
from kernels.tune.candidates import BUCKETS, candidates

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
LIBRARY_US = 20.0


@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("rows", BUCKETS)
@pytest.mark.parametrize("hopper", [True, False])
def test_every_candidate_can_be_run(dtype: torch.dtype, rows: int, hopper: bool) -> None:
    for n, k in [*SHAPES.values(), (128256, 4096), (3072, 2048)]:
        product = Product(dtype, n, k)
        plans = candidates(product, rows, hopper)
        assert len(plans) == len(set(plans))
        assert not [wrong for plan in plans if (wrong := problem(plan, rows, product))]
        assert plans or rows >= 128


@pytest.mark.parametrize("dtype", [BF16, FP8])
def test_tiles_whose_weights_load_early_are_tried_beside_those_of_the_next_linear(
    dtype: torch.dtype,
) -> None:
    for shape in SHAPES.values():
        for rows in (8, 16, 32, 64):
            tiles = [plan for plan in candidates(Product(dtype, *shape), rows, True) if plan.form == "tiles"]
            assert len(tiles) >= 2
            for plan in tiles:
                stage = (plan.block_n + plan.rows) * plan.block_k * dtype.itemsize
                alone = -(-shape[0] // plan.block_n) * plan.split <= 132
                assert (1 if alone else 2) * (plan.stages * stage + 1024) <= 228 << 10
    for rows, hopper in ((128, True), (8, False)):
        others = candidates(Product(dtype, *SHAPES["o"]), rows, hopper)
        assert others and not [plan for plan in others if plan.form == "tiles"]


@pytest.mark.parametrize(
    ("n", "k", "rows", "block_n", "block_k", "warps", "stages", "split"),
    [
        (8192, 2048, 8, 64, 256, 4, 6, 1),
        (8192, 7168, 8, 64, 128, 4, 12, 1),
        (14336, 8192, 8, 64, 256, 4, 3, 1),
        (2560, 8192, 64, 64, 64, 4, 7, 4),
        (8192, 2048, 64, 64, 128, 4, 6, 1),
        (14336, 8192, 64, 128, 128, 4, 4, 1),
    ],
)
def test_tiles_that_won_in_shards_of_70b_are_candidates(
    n: int, k: int, rows: int, block_n: int, block_k: int, warps: int, stages: int, split: int
) -> None:
    plan = GemmPlan("tiles", rows, block_n, block_k, warps, stages, split)
    assert plan in candidates(Product(BF16, n, k), rows, True)


class FakeChain:
    """Linears with simulated times in microseconds. A plan takes the time given in `us`, or 30 µs if `us` has
    no entry. Without a plan, the library takes LIBRARY_US. Plans in `wrong` compute wrong results, and plans
    in `broken` fail to launch."""

    rows = 16

    def __init__(
        self, us: dict[tuple[str, GemmPlan], float], wrong: set[GemmPlan], broken: set[GemmPlan]
    ) -> None:
        self.us, self.wrong, self.broken = us, wrong, broken
        self.names = {Product(BF16, n, k): name for name, (n, k) in SHAPES.items()}
        self.products = list(self.names)

    def microseconds(self, table: Table, without: Product | None = None) -> float:
        total = 5.0
        for product, name in self.names.items():
            plan = table.choose(16, product.n, product.k, product.dtype)
            if plan in self.broken:
                raise RuntimeError("out of shared memory")
            if product != without:
                total += LIBRARY_US if plan is None else self.us.get((name, plan), 30.0)
        return total

    def error(self, table: Table, rows: int) -> float:
        plans = {table.choose(16, product.n, product.k, product.dtype) for product in self.products}
        return math.nan if plans & self.wrong else 3e-3


def searched(
    us: dict[tuple[str, GemmPlan], float],
    known: Table | None = None,
    wrong: set[GemmPlan] = frozenset(),
    **plans: set[GemmPlan],
) -> dict[str, PlanEntry]:
    chain = FakeChain(us, wrong, plans.get("broken", set()))
    found = search.search(chain, known or Table(), lambda line: None, False)
    return {chain.names[one.product]: one.entry for one in found}


def plans_of(name: str) -> list[GemmPlan]:
    """Return the candidate plans for a linear, without the rule-based plans of all linears."""
    rules = {linear_plans.choose(16, n, k, BF16) for n, k in SHAPES.values()}
    return [plan for plan in candidates(Product(BF16, *SHAPES[name]), 16, False) if plan not in rules]


def test_the_fastest_plan_wins_with_its_own_and_the_librarys_time() -> None:
    slow, fast, *_ = plans_of("qkv")
    found = searched({("qkv", slow): 15.0, ("qkv", fast): 12.0})
    assert found["qkv"].plan == fast
    assert found["qkv"].us == pytest.approx(12.0)
    assert found["qkv"].library_us == pytest.approx(LIBRARY_US)
    assert found["down"].plan is None


def test_a_fast_plan_that_is_wrong_or_does_not_launch_loses() -> None:
    wrong, broken, right, *_ = plans_of("o")
    us = {("o", wrong): 1.0, ("o", broken): 2.0, ("o", right): 9.0}
    assert searched(us, wrong={wrong}, broken={broken})["o"].plan == right


def test_the_rule_based_plan_stays_if_the_difference_is_noise() -> None:
    n, k = SHAPES["down"]
    rule, other = linear_plans.choose(16, n, k, BF16), plans_of("down")[0]
    assert rule is not None
    assert searched({("down", rule): 10.05, ("down", other): 10.0})["down"].plan == rule
    assert searched({("down", rule): 11.0, ("down", other): 10.0})["down"].plan == other


def test_existing_table_entries_are_kept_and_not_measured_again() -> None:
    kept, faster, *_ = plans_of("qkv")
    known = Table().with_entry(Product(BF16, *SHAPES["qkv"]), 16, PlanEntry(kept, 14.0, 20.0))
    found = searched({("qkv", kept): 14.0, ("qkv", faster): 3.0}, known)
    assert set(found) == {"o", "gate_up", "down"}


def test_a_chain_of_one_linear_is_timed_as_a_whole() -> None:
    chain = FakeChain({}, set(), set())
    chain.products = chain.products[-1:]
    chain.names = {product: chain.names[product] for product in chain.products}
    [found] = search.search(chain, Table(), lambda line: None, False)
    assert found.entry.us == pytest.approx(5.0 + LIBRARY_US)
