"""Tests that captured prompt passes give the same logits and the same cache as passes that launch their
kernels one by one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.generate import LocalEngine
from engine.messages import BLOCK_TOKENS, SamplingParams
from engine.plan import Chunk, SlotSetup, StepPlan
from engine.prompt_graphs import PromptGraphs
from engine.runner import ModelRunner
from tests.demo_model.asking import engine

pytestmark = pytest.mark.gpu

ALLOWED = 0.03
"""Allowed relative difference. Padding can change which GEMM kernels are used, and therefore the order of
summation."""

QUANTISED_APART = 2
"""Allowed difference with an FP8 cache, as a multiple of the difference between eager passes with and without
FP8. If passes differ by up to ALLOWED, keys and values may be rounded to different neighbouring e4m3 values,
which have the same error. Other errors (in order, positions or attention masks) do not depend on the dtype of
the cache. The tests without FP8 detect these errors with the tolerance ALLOWED."""


@pytest.fixture(params=["auto", "fp8"])
def made(request: pytest.FixtureRequest) -> Iterator[LocalEngine]:
    made = engine("cuda", "bfloat16", kv_cache_dtype=request.param)
    yield made
    made.close()


@pytest.fixture(scope="module")
def unquantised() -> Iterator[LocalEngine]:
    """An engine with the same model but an unquantised cache. It runs eager passes."""
    made = engine("cuda", "bfloat16")
    yield made
    made.close()


def _plan(sizes: list[tuple[int, int]], first_block: int = 0) -> tuple[StepPlan, int]:
    """Return a plan, and the number of the first block that the plan does not use. The plan has one chunk per
    slot, given as (cached tokens, new tokens), in blocks from `first_block` on."""
    blocks, chunks, setups = [], [], []
    for row, (start, count) in enumerate(sizes):
        used = -(-(start + count) // BLOCK_TOKENS)
        blocks += [(row, index, first_block + index) for index in range(used)]
        first_block += used
        setups.append(SlotSetup(row, SamplingParams(max_tokens=1), 0, start + count, []))
        chunks.append(Chunk(row, start, _tokens(row, start, count), [row]))
    return StepPlan(0, setups, blocks, [], [], chunks), first_block


def _tokens(row: int, start: int, count: int) -> list[int]:
    return [(7 * place + row) % 900 + 3 for place in range(start, start + count)]


def _launched(runner: ModelRunner, plan: StepPlan) -> torch.Tensor:
    batch = runner.steps.tables.step_batch(plan)
    hidden = runner.decoder.forward(batch.forward, runner.steps.kv)
    return runner.decoder.logits(hidden)[: len(plan.chunks)].float()  # the padding is after the chunks


def _captured(graphs: PromptGraphs, plan: StepPlan) -> torch.Tensor:
    graphs.stage(plan)
    return graphs.forward().clone()


def _prepared(runner: ModelRunner, sizes: list[tuple[int, int]]) -> tuple[StepPlan, int]:
    """Compute the cached tokens that a plan with these sizes expects, in the slots and blocks of that plan.
    Return the result of `_plan`."""
    plan, taken = _plan(sizes)
    runner.steps.tables.apply(plan)
    context = [Chunk(row, 0, _tokens(row, 0, start), [row]) for row, (start, _) in enumerate(sizes) if start]
    if context:
        _launched(runner, StepPlan(0, [], [], [], [], context))
    return plan, taken


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).norm() / expected.float().norm())


@pytest.mark.parametrize(
    "sizes",
    [
        [(0, 1)],
        [(0, 16)],
        [(0, 100), (0, 37)],
        [(0, 512)],
        [(0, 129), (0, 128), (0, 127), (0, 640)],
        [(128, 1), (64, 200), (0, 33), (1000, 65)],
    ],
    ids=str,
)
def test_a_captured_prompt_pass_gives_the_logits_of_an_eager_one(
    made: LocalEngine, unquantised: LocalEngine, sizes: list[tuple[int, int]]
) -> None:
    runner = made.runner
    graphs = runner.steps.prompt_graphs
    assert graphs is not None
    with torch.inference_mode():
        plan, taken = _prepared(runner, sizes)
        assert graphs.fits(plan)
        captured = _captured(graphs, plan).float()
        cache = [tensor.clone() for pool in runner.steps.kv for tensor in pool.tensors()]
        launched = _launched(runner, plan)
        allowed = ALLOWED
        if runner.decoder.kv_fp8:
            plain = _launched(unquantised.runner, _prepared(unquantised.runner, sizes)[0])
            allowed = max(ALLOWED, QUANTISED_APART * _apart(plain, launched))
    assert _apart(captured, launched) <= allowed
    for found, tensor in zip(cache, [t for pool in runner.steps.kv for t in pool.tensors()], strict=True):
        # Padding must not be written to the cache, so blocks that belong to no prompt must still be zero.
        assert not found[taken:].any()
        if found.dtype == torch.bfloat16:
            assert _apart(found[:taken], tensor[:taken]) <= ALLOWED


def test_a_replay_does_not_depend_on_the_previous_one(made: LocalEngine) -> None:
    """A captured size is replayed twice, with a replay of more prompts and more cached tokens in between. The
    logits of the first and the last replay must be bitwise equal."""
    graphs, tables = made.runner.steps.prompt_graphs, made.runner.steps.tables
    assert graphs is not None
    few, after = _plan([(0, 200)])
    many, _ = _plan([(0, 70), (0, 90), (0, 40), (0, 56)], after)
    with torch.inference_mode():
        tables.apply(few)
        expected = _captured(graphs, few)
        tables.apply(many)
        _captured(graphs, many)
        tables.apply(few)
        assert torch.equal(_captured(graphs, few), expected)
