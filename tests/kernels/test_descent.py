"""Tests of the descent over a layer's linears, with simulated times. Real times can be measured only on a
GPU."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import pytest
import torch

from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import Product, problem
from kernels.tune.candidates import candidates
from kernels.tune.descent import ENOUGH, Choice, descend, race, search
from kernels.tune.search import plan_text
from kernels.tune.shortlist import covering, read_tried, shortlist, starts
from tests.kernels.test_tune import BF16, FP8, SHAPES

A, B, C = (GemmPlan("dot", 16, 64, 128, 4, stages) for stages in (4, 5, 6))


class Timer:
    """A timer for which choices take `us(choice)` microseconds, and which records the choices that it
    measures."""

    def __init__(self, us: Callable[[Choice], float]) -> None:
        self.us, self.asked = us, list[list[Choice]]()

    def __call__(self, choices: Sequence[Choice]) -> list[float]:
        self.asked.append(list(choices))
        return [self.us(choice) for choice in choices]


def test_a_plan_that_is_slower_alone_is_chosen_if_it_makes_the_layer_faster() -> None:
    def us(choice: Choice) -> float:
        alone = {A: 50.0, B: 48.0, C: 52.0}[choice["gate_up"]] + {A: 20.0, B: 19.0}[choice["down"]]
        return alone - (9.0 if choice == {"gate_up": C, "down": B} else 0.0)

    options = {"down": [A, B], "gate_up": [A, B, C]}
    assert descend({"gate_up": A, "down": A}, options, Timer(us)) == {"gate_up": C, "down": B}


def test_a_descent_runs_rounds_until_one_gains_next_to_nothing() -> None:
    # The best plan of linear `a` is faster only if `b` has its best plan too.
    def us(choice: Choice) -> float:
        return 100.0 - (10.0 if choice["b"] == B else 0.0) - (10.0 if choice == {"a": B, "b": B} else 0.0)

    timer = Timer(us)
    assert descend({"a": A, "b": A}, {"a": [A, B], "b": [A, B]}, timer) == {"a": B, "b": B}
    # Each linear is tried twice, and two changes are confirmed. The descent then stops, because no plan has
    # changed since the last change was confirmed.
    assert [len(asked) for asked in timer.asked] == [2, 2, 2, 2, 2, 2]
    little = Timer(lambda choice: 100.0 - 0.12 * sum(plan == B for plan in choice.values()))
    descend({"a": A, "b": A}, {"a": [A, B, C], "b": [A, B, C]}, little)
    assert [len(asked) for asked in little.asked] == [3, 2, 3, 2]


def test_a_plan_that_was_faster_only_by_noise_is_not_kept() -> None:
    class Once(Timer):
        def __call__(self, choices: Sequence[Choice]) -> list[float]:
            times = super().__call__(choices)
            return [times[0], *(us * 0.97 for us in times[1:])] if len(self.asked) == 1 else times

    assert descend({"a": A}, {"a": [A, B]}, Once(lambda choice: 100.0)) == {"a": A}


def test_plans_that_do_not_run_are_skipped_and_may_be_a_starting_point() -> None:
    times = {A: math.inf, B: 90.0, C: 80.0}
    options = {"a": [A, B, C]}
    assert descend({"a": A}, options, Timer(lambda choice: times[choice["a"]])) == {"a": C}
    assert descend({"a": B}, {"a": [A, B]}, Timer(lambda choice: times[choice["a"]])) == {"a": B}
    assert search([{"a": A}, {"a": B}], {"a": [A]}, Timer(lambda choice: times[choice["a"]]))[0] == {"a": B}


def test_a_minimum_that_no_single_step_reaches_is_found_from_another_start() -> None:
    def us(choice: Choice) -> float:
        changed = sum(plan == B for plan in choice.values())
        return 100.0 + (5.0 * changed if changed < 4 else -6.0)

    names = ("o", "down", "qkv", "gate_up")
    options = {name: [A, B] for name in names}
    first, other = dict.fromkeys(names, A), dict.fromkeys(names, B)
    assert search([first], options, Timer(us)) == (first, 100.0, 100.0)
    assert search([first, other], options, Timer(us)) == (other, 94.0, 100.0)


@pytest.mark.parametrize(("gain", "stays"), [(0.8 * ENOUGH, True), (1.2 * ENOUGH, False)])
def test_the_current_choice_stays_if_nothing_is_clearly_faster(gain: float, stays: bool) -> None:
    timer = Timer(lambda choice: 100.0 * (1 - gain) if choice["a"] == B else 100.0)
    best, us, before = search([{"a": A}], {"a": [A, B]}, timer)
    assert (best == {"a": A}) == stays
    assert before == 100.0 and us == (100.0 if stays else 100.0 * (1 - gain))


def test_drifting_clocks_do_not_affect_the_choice_and_slow_runners_are_dropped() -> None:
    own, turns = [100.0, 99.5, 130.0, 99.35], list[int]()

    def replay(order: Sequence[int]) -> list[float]:
        began = len(turns)
        turns.extend(order)
        return [own[one] * (1 + 0.002 * (began + place)) for place, one in enumerate(order)]

    medians = race(replay, 4)
    assert sorted(range(4), key=medians.__getitem__) == [3, 1, 0, 2]
    assert turns.count(2) < turns.count(0) == turns.count(1) == turns.count(3)


# ── candidates ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("dtype", [BF16, FP8])
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
def test_a_shortlist_has_the_known_plans_and_other_plans_that_can_run(dtype: torch.dtype, rows: int) -> None:
    products = [Product(dtype, *shape) for shape in SHAPES.values()]
    known = {one: candidates(one, rows, True)[-1] for one in products}
    begun = starts(known, rows, True)
    assert begun[0] == known
    assert {plan.form for plan in begun[-1].values() if plan is not None} == {"tiles"}
    for one in products:
        plans = shortlist(one, rows, True, [choice[one] for choice in begun], {}, 10)
        assert len(plans) == len(set(plans)) and 8 <= len(plans) <= 10
        assert set(plans) >= {choice[one] for choice in begun}
        assert not [plan for plan in plans if plan is not None and problem(plan, rows, one)]
        # Plans for one row have separate forms. Plans for several rows have the form `tiles` or `dot`.
        assert {plan.form for plan in plans if plan is not None} > {"tiles"}


def test_the_first_tiles_are_those_that_won_in_a_layer() -> None:
    products = {name: Product(BF16, *shape) for name, shape in SHAPES.items()}
    assert starts(dict.fromkeys(products.values()), 8, True)[-1] == {
        products["qkv"]: GemmPlan("tiles", 8, 64, 128, 4, 6, 2),
        products["o"]: GemmPlan("tiles", 8, 64, 128, 4, 6, 4),
        products["gate_up"]: GemmPlan("tiles", 8, 128, 64, 8, 6, 1),
        products["down"]: GemmPlan("tiles", 8, 64, 128, 4, 6, 4),
    }


def test_tiles_are_offered_only_on_a_hopper_gpu() -> None:
    one = Product(BF16, *SHAPES["o"])
    begun = starts({one: None}, 8, False)
    plans = shortlist(one, 8, False, [choice[one] for choice in begun], {}, 10)
    assert len(plans) == 10 and "tiles" not in {plan.form for plan in plans if plan is not None}


def test_the_fastest_plans_of_an_earlier_search_are_preferred(tmp_path: Path) -> None:
    one = Product(BF16, *SHAPES["o"])
    fastest = [*candidates(one, 16, True)[:-9:-1], None]
    dropped = "wide 16 64 256 4 4 1"
    tried = {dropped: 1.0} | {plan_text(plan): 2.0 for plan in fastest}
    measurements = [{"shape": str(one), "rows": 16, "tried_layer_us": tried}]
    (tmp_path / "tune.json").write_text(json.dumps(measurements))
    read = read_tried(tmp_path / "tune.json")
    plans = shortlist(one, 16, True, [A], read, 6)
    assert plans[0] == A and [plan for plan in plans if plan in fastest] == fastest[: len(plans) - 3]
    assert dropped not in map(plan_text, plans)
    for text in ("{", "[1]", '[{"shape": "x", "rows": 1, "tried_layer_us": ["dot x"]}]'):
        (tmp_path / "tune.json").write_text(text)
        with pytest.raises(ValueError, match=r"tune\.json: not written by python -m engine\.tune --json"):
            read_tried(tmp_path / "tune.json")


def test_the_compiled_choices_combine_every_plan_with_every_state_of_a_shared_norm() -> None:
    o, down, qkv, gate_up = (Product(BF16, *SHAPES[name]) for name in ("o", "down", "qkv", "gate_up"))
    options = {one: shortlist(one, 8, True, [None], {}, 10) for one in (o, down, qkv, gate_up)}

    def kernels(choice: Choice) -> set[tuple[object, ...]]:
        left = {
            one: plan.block_n if plan is not None and plan.tiled else None for one, plan in choice.items()
        }
        return {
            (o, choice[o]),
            (down, choice[down]),
            (qkv, choice[qkv], left[down]),
            (gate_up, choice[gate_up], left[o]),
        }

    compiled = set[tuple[object, ...]]().union(*map(kernels, covering(options)))
    names = list(options)
    wanted = (kernels(dict(zip(names, plans, strict=True))) for plans in product(*options.values()))
    assert compiled.issuperset(set[tuple[object, ...]]().union(*wanted))
