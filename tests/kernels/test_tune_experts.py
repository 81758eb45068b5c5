"""Tests of the search for the plans of the experts' GEMMs. Times can be measured only on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels import ExpertActivation
from kernels.triton.experts_plans import ExpertsShape, LayerPlans, problem
from kernels.triton.linear_plans import HOPPER_SHARED

tune = pytest.importorskip("kernels.tune.experts", exc_type=ImportError)
BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
QWEN = ExpertsShape(FP8, 128, 8, 2048, 768, 128)


@pytest.mark.parametrize("dtype", [BF16, FP8], ids=str)
@pytest.mark.parametrize("sizes", [(128, 8, 2048, 768), (8, 2, 4096, 14336), (64, 8, 2048, 1024)], ids=str)
def test_every_candidate_can_be_run(sizes: tuple, dtype: torch.dtype) -> None:
    experts, _, hidden, width = sizes
    shape = ExpertsShape(dtype, *sizes, experts)
    for tokens in tune.TOKENS:
        found = tune.families(shape, tokens, HOPPER_SHARED)
        assert [family.start.grouped for family in found] == [False] * (tokens <= 64) + [True] * (tokens > 16)
        for family in found:
            assert len(family.changes()) >= 8
            for plans in family.changes():
                assert (plans.up.form == "grouped") == (plans.down.form == "grouped")
                for plan, k in ((plans.up, hidden), (plans.down, width)):
                    if plan not in (family.start.up, family.start.down):
                        assert problem(plan, tokens, shape, k, HOPPER_SHARED) is None


@pytest.mark.parametrize("held", [6, 3])
@pytest.mark.parametrize("tokens", [1, 4, 40])
def test_the_error_of_plans_is_that_of_the_layer(
    tokens: int, held: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compute a layer in the interpreter, once with the correct routing weights and once with wrong ones.
    With this seed, the first tokens choose experts that the rank holds, so no result is zero."""
    torch.manual_seed(0)
    shape = ExpertsShape(torch.float32, 6, 2, 64, 32, held)
    chain = tune.ExpertsChain(shape, tokens, torch.float32, torch.device("cpu"), pdl=False)
    plans = tune.rules(shape, tokens, HOPPER_SHARED)
    assert chain.error(plans) < 1e-5
    weighted_sum = tune.experts.weighted_sum

    def wrong(activation: ExpertActivation, *arguments: Any, **options: Any) -> torch.Tensor:
        return weighted_sum(replace(activation, weights=1.1 * activation.weights), *arguments, **options)

    monkeypatch.setattr(tune.experts, "weighted_sum", wrong)
    assert chain.error(plans) > tune.MAX_ERROR


class Chain:
    """A layer whose times depend only on its plans. Wide tiles of `up` and narrow tiles of `down` are fast.
    One pair of plans gives wrong results."""

    shape = QWEN
    tokens = 8

    def __init__(self) -> None:
        self.wrong: LayerPlans | None = None

    def microseconds(self, plans: LayerPlans) -> float:
        if plans.up.stages == 5:
            raise RuntimeError("out of resources")
        return 100.0 - plans.up.block_k / 16 + plans.down.block_k / 16 + plans.up.block_n / 64

    def error(self, plans: LayerPlans) -> float:
        return 1.0 if plans == self.wrong else 1e-3


def test_the_fastest_plans_that_are_right_win() -> None:
    chain, lines = Chain(), []
    entry = tune.search(chain, HOPPER_SHARED, lines.append)
    tiles = (entry.plans.up.block_k, entry.plans.up.block_n, entry.plans.down.block_k)
    assert tiles == (512, 64, 128) and entry.us == 77.0
    assert entry.rules_us == chain.microseconds(tune.rules(QWEN, 8, HOPPER_SHARED))
    assert lines[0].endswith(f"rules {entry.rules_us:.1f} us, best 77.0 us")
    chain.wrong = entry.plans
    assert tune.search(chain, HOPPER_SHARED, lines.append).plans != entry.plans


def test_the_rules_stay_if_the_difference_is_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    chain, times = Chain(), itertools.count()
    monkeypatch.setattr(chain, "microseconds", lambda plans: 50.0 - 1e-4 * next(times))
    assert tune.search(chain, HOPPER_SHARED, lambda line: None).plans == tune.rules(QWEN, 8, HOPPER_SHARED)
