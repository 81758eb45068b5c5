"""Tests, on a GPU, that a pass which computes the last layer only for the tokens that need logits gives the
same results as a full pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.device_tables import chunk_results
from engine.messages import BLOCK_TOKENS, SamplingParams
from engine.plan import Chunk, SlotSetup, StepPlan
from tests.demo_model.asking import engine

pytestmark = pytest.mark.gpu


def _chunk(row: int, start: int, count: int) -> Chunk:
    return Chunk(row, start, [(7 * at + row) % 900 + 3 for at in range(start, start + count)], [row])


@pytest.mark.parametrize(("kv_cache_dtype", "allowed"), [("auto", 0.03), ("fp8", 0.1)])
def test_restricting_the_last_layer_gives_the_same_rows_as_the_whole_pass(
    kv_cache_dtype: str, allowed: float
) -> None:
    """Slots 0 and 1 decode in the same pass as two chunks, one of which continues a prompt that is partly
    cached. The last layer's GEMMs have four rows instead of hundreds, so they use different kernels. The
    restriction must not change the keys and values."""
    made = engine("cuda", "bfloat16", kv_cache_dtype=kv_cache_dtype)
    runner = made.runner
    setups = [SlotSetup(row, SamplingParams(max_tokens=9), 0, 1, []) for row in range(4)]
    blocks = [(row, index, 8 * row + index) for row in range(4) for index in range(500 // BLOCK_TOKENS + 1)]
    before = StepPlan(1, setups, blocks, [], [], [_chunk(0, 0, 200), _chunk(1, 0, 77), _chunk(2, 0, 130)])
    now = StepPlan(2, [], [], [], [1, 0], [_chunk(2, 130, 300), _chunk(3, 0, 65)])
    with torch.inference_mode():
        runner.steps.tables.apply(before)
        first = runner.steps.tables.step_batch(before)
        runner.decoder.forward(first.forward, runner.steps.kv)
        runner.steps.tables.advance(first.sampling, torch.tensor([5, 6, 7], device=runner.device))
        batch = runner.steps.tables.step_batch(now)
        whole = replace(batch.forward, logits_attention=None)
        expected = runner.decoder.forward(whole, runner.steps.kv)[[0, 1, *chunk_results(whole)]].float()
        cache = [tensor.clone() for pool in runner.steps.kv for tensor in pool.tensors()]
        # the padding is after the chunks
        found = runner.decoder.forward(batch.forward, runner.steps.kv)[:4].float()
    for tensor, other in zip((t for pool in runner.steps.kv for t in pool.tensors()), cache, strict=True):
        assert torch.equal(tensor, other)
    assert found.shape == expected.shape == (4, runner.config.hidden_size)
    assert ((found - expected).norm(dim=1) <= allowed * expected.norm(dim=1)).all()
    made.close()
