"""Tests that the cost of an additional sample of a long prompt does not depend on the prompt's length."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.messages import BLOCK_TOKENS
from engine.scheduling.block_pool import BlockPool
from tests.engine.scheduling.host_times import measure

PROMPT = 64 * BLOCK_TOKENS + 10
PROMPT_BLOCKS = 65
SAMPLES = 40


@pytest.fixture
def pool_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the references that are added and dropped one by one."""
    calls: Counter[str] = Counter()
    for name in ("share", "release"):
        original = getattr(BlockPool, name)

        def counted(pool: BlockPool, block: int, name: str = name, original: object = original) -> None:
            calls[name] += 1
            original(pool, block)  # type: ignore[operator]

        monkeypatch.setattr(BlockPool, name, counted)
    return calls


def test_samples_share_their_prompts_blocks_in_plans_and_reference_counts(pool_calls: Counter[str]) -> None:
    _, costs = measure(prompt=PROMPT, samples=SAMPLES, slots=64)
    # The plans list the prompt's blocks once. For each sample, they add one entry for the shared blocks, one
    # for its copy of the last block, and one for each later block.
    assert max(cost.entries for cost in costs) <= PROMPT_BLOCKS + 3 * SAMPLES
    assert sum(cost.entries for cost in costs) <= PROMPT_BLOCKS + 6 * SAMPLES
    assert pool_calls["share"] <= SAMPLES
    assert pool_calls["release"] <= PROMPT_BLOCKS + 5 * SAMPLES


def test_samples_that_wait_for_slots_share_their_prompts_blocks_too(pool_calls: Counter[str]) -> None:
    _, costs = measure(prompt=PROMPT, samples=SAMPLES, slots=16)
    groups = 3
    assert max(cost.entries for cost in costs) <= PROMPT_BLOCKS + 3 * SAMPLES
    assert sum(cost.entries for cost in costs) <= groups * PROMPT_BLOCKS + 6 * SAMPLES
    assert pool_calls["share"] <= groups * PROMPT_BLOCKS + SAMPLES
