"""Tests of the warm-up steps. Every model can run them with any token budget. They use as much memory as the
largest step, and cover every kind of step."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine.launched import StepResults, read_results
from engine.parallel import single
from engine.plan import StepPlan
from engine.runner import ModelRunner
from engine.sampler import LOGPROB_ROWS
from engine.warmup_steps import every_kind, largest_steps
from kernels.draws import Variant
from tests.engine.running.tiny_model import quiet, spec_of

BUDGETS = [(8, 256), (96, 256), (4096, 256), (8, 1), (8, 2), (8, 3), (96, 8), (96, 40)]


@pytest.fixture(params=BUDGETS, ids=str)
def runner(folder: Path, request: pytest.FixtureRequest) -> Iterator[ModelRunner]:
    max_num_batched_tokens, longest = request.param
    runner = ModelRunner(
        spec_of(folder, max_num_batched_tokens=max_num_batched_tokens, max_model_len=longest), single(), quiet
    )
    yield runner
    runner.close()


def sizes_of(runner: ModelRunner) -> tuple[int, int, int]:
    return runner.max_model_len, runner.spec.max_num_seqs, runner.spec.max_num_batched_tokens


def run(runner: ModelRunner, plans: list[StepPlan]) -> list[StepResults]:
    """Run each plan. Every sampled token must be valid, and no sequence may exceed its maximum length."""
    results = []
    with torch.inference_mode():
        for plan in plans:
            results.append(runner.steps.run(plan))
            tokens = read_results(plan, results[-1])
            assert all(token >= 0 for token in tokens.token_ids) and not tokens.non_finite
            assert runner.steps.tables.lengths.max() <= runner.max_model_len
    return results


def test_the_largest_steps_can_be_run_and_every_row_takes_part(runner: ModelRunner) -> None:
    plans = largest_steps(*sizes_of(runner))
    run(runner, plans)
    rows = runner.spec.max_num_seqs
    assert (runner.steps.tables.lengths[1:rows] > 0).all()
    sampled = [len(plan.decodes) + sum(len(chunk.sample_slots) for chunk in plan.chunks) for plan in plans]
    assert set(sampled) <= {0, rows}
    assert sampled.count(rows) == 2 + min(2, runner.max_model_len - 1)


def test_the_first_warm_up_step_takes_the_whole_budget_and_reads_the_longest_sequence(
    runner: ModelRunner,
) -> None:
    first = largest_steps(*sizes_of(runner))[0]
    longest = max(1, runner.max_model_len - 1)
    most = min(runner.spec.max_num_batched_tokens, runner.spec.max_num_seqs * longest)
    assert sum(len(chunk.token_ids) for chunk in first.chunks) == most
    assert first.chunks[0].start + len(first.chunks[0].token_ids) == longest


def test_one_warm_up_step_takes_the_budget_from_the_beginning_of_its_prompts(runner: ModelRunner) -> None:
    plans = largest_steps(*sizes_of(runner))
    tokens = [sum(len(chunk.token_ids) for chunk in plan.chunks if not chunk.start) for plan in plans]
    longest = max(1, runner.max_model_len - 1)
    assert max(tokens) == min(runner.spec.max_num_batched_tokens, runner.spec.max_num_seqs * longest)


def test_warm_up_scores_the_maximum_number_of_prompt_tokens_at_once(runner: ModelRunner) -> None:
    plans = largest_steps(*sizes_of(runner))
    scored = [len(result.prompts[0][0].targets) for result in run(runner, plans) if result.prompts]
    assert scored == [min(LOGPROB_ROWS, runner.spec.max_num_batched_tokens, max(1, runner.max_model_len - 1))]


def test_steps_of_every_kind_are_run_with_every_way_to_sample(runner: ModelRunner) -> None:
    plans = every_kind(*sizes_of(runner))
    results = run(runner, plans)
    if runner.max_model_len < 8:
        assert not plans
        return
    kinds = {
        (
            bool(plan.decodes),
            bool(plan.chunks),
            any(chunk.sample_slots for chunk in plan.chunks),
            any(len(chunk.sample_slots) > 1 for chunk in plan.chunks),
        )
        for plan in plans
    }
    alone, goes_on = (True, False, False, False), (True, True, False, False)
    assert kinds >= {alone, goes_on, (False, True, True, False), (True, True, True, True)}
    setups = [setup.sampling for plan in plans for setup in plan.setups]
    asked = {name for params in setups for name in params.__struct_fields__ if getattr(params, name)}
    narrowing = {"temperature", "top_k", "top_p"}
    changing = {"presence_penalty", "logit_bias", "min_tokens", "allowed_tokens", "bad_words"}
    assert asked >= narrowing | changing | {"logprobs"}
    assert any(result.sampled.logprobs is not None for result in results)
    assert any(result.prompts for result in results) and any(result.finite for result in results)
    assert any(plan.copies for plan in plans) and any(plan.clears for plan in plans)
    most = max(sum(len(chunk.token_ids) for chunk in plan.chunks) for plan in plans)
    assert most == min(
        runner.spec.max_num_batched_tokens, runner.spec.max_num_seqs * (runner.max_model_len - 1)
    )
    needed = {variant_of(runner, plan) for plan in plans}
    assert needed >= set(Variant)


@pytest.mark.parametrize(
    "sizes", [(1, 1), (1, 2), (2, 2), (3, 4), (8, 8), (8, 9), (64, 64), (64, 2048)], ids=str
)
def test_no_warm_up_step_exceeds_the_token_budget(sizes: tuple[int, int]) -> None:
    """A step above the budget would also exceed every captured size."""
    max_num_seqs, max_num_batched_tokens = sizes
    for plan in every_kind(256, *sizes) + largest_steps(256, *sizes):
        assert (
            len(plan.decodes) + sum(len(chunk.token_ids) for chunk in plan.chunks) <= max_num_batched_tokens
        )
        assert len(plan.decodes) + len(plan.chunks) <= max_num_seqs
        assert all(row < max_num_seqs for setup in plan.setups for row, _ in setup.members)


def variant_of(runner: ModelRunner, plan: StepPlan) -> Variant | None:
    """Return the sampling variant of the slots that a plan sets up, or None if the plan sets up no slot."""
    if not plan.setups:
        return None
    tables = runner.steps.tables
    with torch.inference_mode():
        tables.apply(StepPlan(0, plan.setups, [], [], [], []))
    rows = [setup.slot for setup in plan.setups]
    return tables.sampling.metadata(rows, tables.lengths.numpy()).variant
