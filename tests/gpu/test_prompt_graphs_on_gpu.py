"""Short passes of prompts, captured: the logits of the pass that is launched kernel by kernel."""

from __future__ import annotations

import pytest
import torch

from engine.messages import BLOCK_TOKENS, Chunk, RowSetup, SamplingParams, StepPlan
from tests.demo_model.asking import engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("counts", [[1], [16], [100, 37], [512], [129, 128, 127, 640]], ids=str)
def test_a_captured_pass_of_prompts_gives_the_logits_of_a_launched_one(
    counts: list[int], kv_dtype: str
) -> None:
    """Within 3% of the logits' size: padding changes which product kernels run, and so the order of sums."""
    made = engine("cuda", "bfloat16", kv_dtype=kv_dtype)
    runner = made.runner
    graphs = runner.prompt_graphs
    assert graphs is not None
    blocks, chunks, setups, taken = [], [], [], 0
    for row, count in enumerate(counts):
        used = -(-count // BLOCK_TOKENS)
        blocks += [(row, index, taken + index) for index in range(used)]
        taken += used
        setups.append(RowSetup(row, SamplingParams(max_tokens=1), 0, count, []))
        chunks.append(Chunk(row, 0, [(7 * place + row) % 900 + 3 for place in range(count)], [row]))
    plan = StepPlan(0, setups, blocks, [], [], chunks)
    assert graphs.fits(plan)
    with torch.inference_mode():
        runner.tables.apply(plan)
        captured = graphs.forward(plan).float().clone()
        cache = [tensor.clone() for pool in runner.kv for tensor in pool.tensors()]
        batch = runner.tables.step_batch(plan)
        hidden = runner.decoder.forward(batch.forward, runner.kv)
        launched = runner.decoder.logits(hidden.index_select(0, batch.forward.logit_index)).float()
    assert (captured - launched).norm() <= 0.03 * launched.norm()
    for before, tensor in zip(cache, [t for pool in runner.kv for t in pool.tensors()], strict=True):
        # Padding wrote nothing: what no prompt owns is still zero.
        assert not before[taken:].any()
        assert before.shape == tensor.shape
    made.close()
