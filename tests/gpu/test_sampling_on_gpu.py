"""Tests that sampling in CUDA graphs gives the same tokens as torch for the same logits, no matter how
requests are batched."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from engine.device_tables import SamplingBatch
from engine.generate import LocalEngine
from engine.messages import SamplingParams
from engine.parallel import single
from engine.plan import Chunk, SlotSetup, StepPlan
from engine.sampler import Sampler
from engine.sampling_tables import SamplingMetadata
from kernels import select_sampling
from kernels.draws import Variant
from tests.demo_model.asking import END, engine, questions

pytestmark = pytest.mark.gpu

ROWS = 150
KINDS = [
    SamplingParams(max_tokens=40),
    SamplingParams(max_tokens=40, temperature=0.8),
    SamplingParams(max_tokens=40, temperature=1.0, top_p=0.95),
    SamplingParams(max_tokens=40, temperature=1.2, top_k=20, top_p=0.9, min_p=0.02),
    SamplingParams(max_tokens=40, temperature=0.7, top_p=0.3, logprobs=2),
]
EDITED = [
    SamplingParams(max_tokens=40, temperature=0.9, repetition_penalty=1.3, presence_penalty=0.2),
    SamplingParams(max_tokens=40, logit_bias={5: 3.0, 9: -100.0}),
    SamplingParams(max_tokens=40, temperature=1.0, min_tokens=10, stop_token_ids=(END,), top_k=40),
    SamplingParams(max_tokens=40, temperature=1.0, allowed_tokens=b"\xff" * 100, bad_words=((300,), (5, 9))),
]


def _seeded(params: SamplingParams, seed: int) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**(fields | {"seed": seed}))


@pytest.fixture
def made() -> Iterator[LocalEngine]:
    made = engine("cuda", "bfloat16")
    yield made
    made.close()


def _plain_torch(made: LocalEngine) -> Sampler:
    size = made.runner.config.vocab_size
    return Sampler(single(), made.runner.device, select_sampling("reference"), vocab_size=size)


def test_a_slot_samples_the_same_token_in_any_batch_and_as_torch_does(made: LocalEngine) -> None:
    """The test samples in 150 slots with different variants. At most one slot may differ from torch, and only
    at a near-tie: two scores are within 1e-5 of each other, or a token's probability mass is within 2e-6 of
    the top-p boundary. No slot may differ between batches."""
    runner = made.runner
    graphs, tables = runner.steps.graphs, runner.steps.tables
    assert graphs is not None
    logits = torch.randn(256, runner.config.vocab_size, device=runner.device).mul_(3).to(torch.bfloat16)
    for variant, kinds in ((Variant.GREEDY, 1), (Variant.PLAIN, 2), (Variant.FULL, len(KINDS))):
        setups = [SlotSetup(row, _seeded(KINDS[row % kinds], row), 0, 1, []) for row in range(ROWS)]
        plan = StepPlan(1, setups, [], [], [], [Chunk(row, 0, [5], [row]) for row in range(ROWS)])
        runner.launch(plan).wait()
        drawn: dict[int, int] = {}
        with torch.inference_mode():
            for batch in (list(range(ROWS)), list(range(3, ROWS, 7)), [77], list(range(ROWS - 1, 100, -1))):
                tables.lengths[:ROWS] = torch.arange(ROWS, device=runner.device) % 50
                graphs.set_slots(batch)
                graphs.forward()[:] = logits[batch]
                positions = graphs.positions().clone()
                found = graphs.sample(variant).tolist()
                assert all(
                    drawn.setdefault(row, token) == token for row, token in zip(batch, found, strict=True)
                )
                assert tables.last_tokens[batch].tolist() == found
                assert torch.equal(tables.lengths[batch], positions)
            rows = torch.arange(ROWS, device=runner.device)
            draws = tables.sampling.draws(rows, rows % 50 + 1)
            expected = _plain_torch(made).draw(logits[:ROWS], variant, draws).tolist()
        assert sum(drawn[row] != token for row, token in enumerate(expected)) <= 1, variant


def test_batches_with_logits_processors_generate_the_tokens_of_torch(
    made: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both engines replay the same graphs of the forward pass, so their outputs differ only after a near-tie.
    At most one of 60 outputs may be affected."""
    prompts, _ = questions()
    prompts = (prompts * 60)[:60]
    kinds = KINDS + EDITED
    params = [_seeded(kinds[i % len(kinds)], i) for i in range(len(prompts))]
    found = made.generate(prompts, params, cache_salt="kernels")
    runner = made.runner
    graphs, reference = runner.steps.graphs, _plain_torch(made)
    assert graphs is not None
    variants: set[Variant] = set()

    def sample(variant: Variant) -> torch.Tensor:
        variants.add(variant)
        rows, positions = graphs.slots(), graphs.positions()
        draws = runner.steps.tables.sampling.draws(rows, positions)
        token_ids = reference.draw(graphs._logits[: len(rows)], variant, draws)
        runner.steps.tables.advance(
            SamplingBatch(rows, positions, None, SamplingMetadata(variant)), token_ids
        )
        return token_ids

    monkeypatch.setattr(graphs, "sample", sample)
    runner.steps.sampler = reference
    expected = made.generate(prompts, params, cache_salt="torch")
    made.scheduler.check()
    same = [mine.token_ids == other.token_ids for [mine], [other] in zip(found, expected, strict=True)]
    assert sum(same) >= len(prompts) - 1
    for index, ([mine], [other]) in enumerate(zip(found, expected, strict=True)):
        if same[index]:
            assert mine.logprobs == other.logprobs


def test_allowed_tokens_and_bad_words_hold_while_steps_overlap(made: LocalEngine) -> None:
    """Every sequence of three consecutive tokens in an answer is banned in all later answers. The other slots
    have no restrictions."""
    prompts, _ = questions()
    allowed, seed = b"\x00" * 20 + b"\xff" * 30, 7
    words: set[tuple[int, ...]] = set()
    expected = made.generate([prompts[1]], SamplingParams(max_tokens=30))[0][0].token_ids
    for _ in range(5):
        params = SamplingParams(
            max_tokens=30, temperature=0.3, seed=seed, bad_words=tuple(sorted(words)), frequency_penalty=-0.5
        )
        only = SamplingParams(max_tokens=30, temperature=1.0, allowed_tokens=allowed)
        free = SamplingParams(max_tokens=30)
        words_row, free_row, allowed_row = made.generate(
            [prompts[0], prompts[1], prompts[2]], [params, free, only]
        )
        tokens = words_row[0].token_ids
        runs = {tuple(tokens[at : at + 3]) for at in range(len(tokens) - 2)}
        assert not runs & words
        words |= runs
        assert all(160 <= token < 400 for token in allowed_row[0].token_ids)
        assert free_row[0].token_ids == expected
    assert len(words) > 28
