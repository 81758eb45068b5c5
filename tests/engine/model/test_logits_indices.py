"""Tests passes that compute the last layer only for the tokens that need logits. The results and the contents
of the cache must equal those of a full pass."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine.device_tables import Padding, SlotTables, chunk_results
from engine.families import read_config
from engine.forward import ForwardInput
from engine.messages import SamplingParams
from engine.model.decoder import Decoder
from engine.model.loader import load_dummy
from engine.parallel import single
from engine.plan import Chunk, SlotSetup, StepPlan
from kernels import KvPool, reference
from tests.engine.tiny import TINY

CPU = torch.device("cpu")
WINDOW = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
FAMILIES = {
    "llama": {},
    # The second of the two layers has a sliding window.
    "window": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"} | WINDOW,
}


def plan(step: int, decodes: list[int], chunks: list[tuple[int, int, int, bool]]) -> StepPlan:
    """Return a plan. Each chunk is given as a tuple: slot, start, number of tokens, and whether the chunk is
    the last of its prompt. Slot s has blocks 3s, 3s + 1 and 3s + 2."""
    rows = {row for row, start, _, _ in chunks if not start}
    return StepPlan(
        step,
        [SlotSetup(row, SamplingParams(max_tokens=9), 0, 1, []) for row in rows],
        [(row, index, 3 * row + index) for row in rows for index in range(3)],
        [],
        decodes,
        [
            Chunk(
                row, start, [(7 * at + row) % 150 for at in range(start, start + count)], [row] * needs_logits
            )
            for row, start, count, needs_logits in chunks
        ],
    )


def passes(
    decoder: Decoder,
    kv: list[KvPool],
    padding: Padding | None,
    decodes: list[int],
    chunks: list[tuple[int, int, int, bool]],
) -> ForwardInput:
    """Run a pass with two prompts. Return the input of a second pass, which has the given decodes and
    chunks."""
    tables = SlotTables(5, 3, decoder.config.vocab_size, CPU, padding)
    before = plan(1, [], [(0, 0, 70, True), (1, 0, 127, True)])
    tables.apply(before)
    first = tables.step_batch(before)
    decoder.forward(first.forward, kv)
    tables.advance(first.sampling, torch.tensor([5, 6]))
    now = plan(2, decodes, chunks)
    tables.apply(now)
    return tables.step_batch(now).forward


@pytest.mark.parametrize("padding", [None, Padding([100, 128, 250], [2, 4, 5])], ids=["as it is", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("decodes", "chunks"),
    [
        ([], [(2, 0, 1, True)]),
        ([], [(2, 0, 100, False), (3, 0, 130, True)]),
        ([1, 0], [(2, 0, 64, True), (3, 0, 65, False), (4, 0, 1, True)]),
        ([1], [(0, 70, 90, True)]),
    ],
    ids=["one token", "prompts", "decodes and prompts", "the rest of a prompt"],
)
def test_restricting_the_last_layer_gives_the_same_rows_as_the_whole_pass(
    family: str,
    decodes: list[int],
    chunks: list[tuple[int, int, int, bool]],
    padding: Padding | None,
    tmp_path: Path,
) -> None:
    """If the pass is padded, the padding must not be written to the KV cache."""
    (tmp_path / "config.json").write_text(json.dumps(TINY | FAMILIES[family]))
    decoder = Decoder(read_config(tmp_path), single(), reference, torch.float32, CPU)  # type: ignore[arg-type]
    load_dummy(decoder, seed=4)
    kv, copied = decoder.allocate_kv(15), decoder.allocate_kv(15)
    forward, whole = (
        passes(decoder, kv, padding, decodes, chunks),
        passes(decoder, copied, None, decodes, chunks),
    )
    assert forward.logits_attention is not None
    whole.logits_attention = None
    found, expected = decoder.forward(forward, kv), decoder.forward(whole, copied)
    count, tokens = len(decodes) + len(chunks), len(whole.token_ids)
    if padding is None:
        assert (len(found), len(forward.token_ids)) == (count, tokens)
    else:
        assert len(found) == next(size for size in padding.results if size >= count)
        assert len(forward.token_ids) == next(size for size in padding.tokens if size >= tokens)
    torch.testing.assert_close(found[:count], expected[[*range(len(decodes)), *chunk_results(whole)]])
    for pool, other in zip(kv, copied, strict=True):
        torch.testing.assert_close(pool.keys, other.keys)
        torch.testing.assert_close(pool.values, other.values)
