"""Tests of the captured batch sizes, and of steps that use captured code. In these tests, the captured code
runs eagerly; tests/gpu covers actual replays."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.generate import LocalEngine
from engine.graphs import DecodeGraphs
from engine.messages import ReplicaSpec, SamplingParams
from engine.plan import Chunk, SlotSetup, StepPlan
from engine.prompt_graphs import MAX_FP8_KEYS, PromptGraphs
from engine.sizing import decode_capture_sizes
from kernels import AttentionInput, ChunkSpan
from kernels.draws import Variant
from tests.engine.tiny import TINY


@pytest.mark.parametrize("most", [1, 2, 3, 16, 17, 64, 100, 256, 1000, 1024])
def test_the_capture_sizes_reach_the_largest_batch_with_little_padding(most: int) -> None:
    sizes = decode_capture_sizes(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert len(sizes) <= 32
    assert {2**power for power in range(11) if 2**power <= most} <= set(sizes)
    for low, high in itertools.pairwise(sizes):
        # A batch that has one sequence more than a captured size is padded to the next captured size. The
        # padding is at most a quarter of the batch, or a few slots.
        assert high - (low + 1) <= max(8, (low + 1) / 4)


class EagerGraphs(DecodeGraphs):
    """Decode graphs that run the captured code eagerly at each replay."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.replayed: list[Variant] = []

    def forward(self) -> torch.Tensor:
        self._forward(len(self._current), self._decoder, self._kv)
        return self._logits[: len(self._current)]

    def sample(self, variant: Variant) -> torch.Tensor:
        self.replayed.append(variant)
        return self._sample(len(self._current), variant)


GREEDY = SamplingParams(max_tokens=12)
PLAIN = SamplingParams(max_tokens=12, temperature=1.0, seed=1, logprobs=2)
FULL = SamplingParams(max_tokens=12, temperature=1.3, top_p=0.8, seed=2)
PENALISED = SamplingParams(max_tokens=12, temperature=1.0, repetition_penalty=1.5, seed=3)
WAITING = SamplingParams(
    max_tokens=12, temperature=1.0, min_tokens=6, stop_token_ids=tuple(range(40)), seed=4
)


@pytest.fixture
def made(tmp_path: Path) -> Callable[[], LocalEngine]:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    spec = ReplicaSpec(
        replica="tiny-0",
        model_path=str(tmp_path),
        load_format="dummy",
        device="cpu",
        max_num_seqs=4,
        max_num_batched_tokens=512,
        max_model_len=256,
        kv_blocks=16,
        threads=1,
    )
    return lambda: LocalEngine(spec)


@pytest.mark.parametrize(
    ("params", "replayed"),
    [
        ([GREEDY, GREEDY, GREEDY], [Variant.GREEDY] * 11),
        ([GREEDY, PLAIN, GREEDY], [Variant.PLAIN] * 11),
        ([GREEDY, PLAIN, FULL], [Variant.FULL] * 11),
        ([GREEDY, PENALISED, FULL], []),
        ([PLAIN, WAITING], [Variant.PLAIN] * 6),
    ],
    ids=["greedy", "plain", "full", "penalised", "waiting"],
)
def test_a_step_replays_the_cheapest_sufficient_variant_and_samples_the_same_tokens(
    params: list[SamplingParams], replayed: list[Variant], made: Callable[[], LocalEngine]
) -> None:
    """Each sequence generates 12 tokens, the first of them in the step of its prompt. Prompts end before, at
    and after a block boundary. Slots that use logits processors are sampled outside the graphs."""
    prompts = [[(7 * place + i) % 90 + 3 for place in range(62 + 2 * i)] for i in range(len(params))]
    engine = made()
    runner = engine.runner
    graphs = EagerGraphs(runner.decoder, runner.steps.kv, runner.steps.tables, runner.steps.sampler, 4)
    runner.steps.graphs = graphs
    check_same_outputs(engine, made(), prompts, params)
    assert graphs.replayed == replayed


def check_same_outputs(
    engine: LocalEngine, reference: LocalEngine, prompts: list[list[int]], params: list[SamplingParams]
) -> None:
    """Check that two engines generate the same tokens and log probabilities, and close both."""
    expected, found = reference.generate(prompts, params), engine.generate(prompts, params)
    reference.close()
    engine.close()
    for [mine], [other] in zip(found, expected, strict=True):
        assert mine.token_ids == other.token_ids
        assert [entry.top for entry in mine.logprobs] == [entry.top for entry in other.logprobs]


class EagerPromptGraphs(PromptGraphs):
    """Prompt graphs that run the captured code eagerly at each replay. Attention gets the staged chunks
    instead of the tiles that were computed from these chunks."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.sizes = [24, 100, 150, 192]
        self.replayed: list[int] = []
        self._spans: list[ChunkSpan] = []

    def stage(self, plan: StepPlan) -> None:
        first = 0
        self._spans = []
        for chunk in plan.chunks:
            self._spans.append(ChunkSpan(first, len(chunk.token_ids), chunk.start, chunk.slot))
            first += len(chunk.token_ids)
        super().stage(plan)

    def _replay(self, size: int) -> None:
        self.replayed.append(size)
        self._run(size, self._decoder, self._kv)

    def _attention(self, size: int) -> AttentionInput:
        captured = super()._attention(size)
        for window, tiles in (captured.tiles or {}).items():
            tokens = sum(count for first, count, position, row in tiles.tolist())
            assert tokens == sum(span.count for span in self._spans), window
        rest = size - sum(span.count for span in self._spans)
        chunks = [*self._spans, ChunkSpan(size - rest, rest, 0, 0)] if rest else self._spans
        return AttentionInput(captured.block_table, captured.slots, captured.lens, 0, chunks)


@pytest.mark.parametrize("prompts", [[24], [100], [10, 60, 3], [1], [150, 42], [193], [9, 9, 9, 9]])
def test_a_short_prompt_pass_is_padded_to_a_captured_size_and_gives_the_same_tokens(
    prompts: list[int], made: Callable[[], LocalEngine]
) -> None:
    tokens = [[(5 * place + 11 * i) % 90 + 3 for place in range(count)] for i, count in enumerate(prompts)]
    params = [(GREEDY, PLAIN, FULL, PENALISED)[i % 4] for i in range(len(prompts))]
    engine = made()
    runner = engine.runner
    graphs = EagerPromptGraphs(runner.decoder, runner.steps.kv, runner.steps.tables, 200)
    runner.steps.prompt_graphs = graphs
    check_same_outputs(engine, made(), tokens, params)
    fits = sum(prompts) <= 192
    assert graphs.replayed == ([next(size for size in graphs.sizes if size >= sum(prompts))] if fits else [])


def test_on_begin_is_called_after_preparation_and_before_the_cache_is_written(
    made: Callable[[], LocalEngine],
) -> None:
    """The engine calls `on_begin` after the preparation on the host, and before it clears and copies blocks
    on the device."""
    engine = made()
    steps, events = engine.runner.steps, list[str]()

    class Noting(EagerPromptGraphs):
        def stage(self, plan: StepPlan) -> None:
            super().stage(plan)
            events.append("staged")

    def begins() -> None:
        events.append("begun" if steps.kv[0].keys[9].all() else "cleared before")

    setup = SlotSetup(0, GREEDY, 0, 3, [])
    with torch.inference_mode():
        steps.kv[0].keys[9] = 1.0
        steps.prompt_graphs = Noting(steps.decoder, steps.kv, steps.tables, 200)
        chunk = Chunk(0, 0, [5, 6, 7], [0])
        steps.run(StepPlan(1, [setup], [(0, 0, 0)], [], [], [chunk], clears=[9]), begins)
    assert events == ["staged", "begun"]
    assert not steps.kv[0].keys[9].any()
    engine.close()


@pytest.fixture
def windowed(tmp_path: Path, made: Callable[[], LocalEngine]) -> Callable[[], LocalEngine]:
    """Configure a model with two layers, one of which has a sliding window, so that a pass has two lists of
    tiles."""
    family = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    windows = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(TINY | family | windows))
    return made


def test_a_captured_prompt_pass_reads_the_cache_and_has_tiles_for_each_window(
    windowed: Callable[[], LocalEngine],
) -> None:
    """The second request finds one block of 64 tokens in the cache, so only 60 of its 124 tokens are
    computed."""
    tokens = [(5 * place) % 90 + 3 for place in range(124)]
    reference, engine = windowed(), windowed()
    runner = engine.runner
    assert set(runner.config.sliding_windows) == {None, 40}
    graphs = EagerPromptGraphs(runner.decoder, runner.steps.kv, runner.steps.tables, 200)
    runner.steps.prompt_graphs = graphs
    [[expected]] = reference.generate([tokens], GREEDY)
    for _ in range(2):
        [[found]] = engine.generate([tokens], GREEDY)
        assert found.token_ids == expected.token_ids
    reference.close()
    engine.close()
    assert graphs.replayed == [150, 100]


def test_passes_with_a_long_fp8_context_or_too_many_prompts_are_not_captured(
    made: Callable[[], LocalEngine],
) -> None:
    engine = made()
    runner = engine.runner

    def fits(chunks: int, start: int, *, kv_fp8: bool) -> bool:
        runner.decoder.kv_fp8 = kv_fp8
        graphs = PromptGraphs(runner.decoder, runner.steps.kv, runner.steps.tables, 200)
        return graphs.fits(
            StepPlan(0, [], [], [], [], [Chunk(row, start, [5] * 16, [row]) for row in range(chunks)])
        )

    assert fits(1, 100_000, kv_fp8=False)
    assert fits(2, MAX_FP8_KEYS // 2 - 16, kv_fp8=True)
    assert not fits(2, MAX_FP8_KEYS // 2 - 15, kv_fp8=True)
    assert fits(4, 0, kv_fp8=False)
    assert not fits(5, 0, kv_fp8=False)
    engine.close()


def test_samples_of_one_prompt_share_its_logits(made: Callable[[], LocalEngine]) -> None:
    tokens = [[5, 6, 7, 8], [9, 10, 11]]
    reference, engine = made(), made()
    expected = reference.generate(tokens, PLAIN, n=2)
    runner = engine.runner
    graphs = EagerPromptGraphs(runner.decoder, runner.steps.kv, runner.steps.tables, 200)
    runner.steps.prompt_graphs = graphs
    found = engine.generate(tokens, PLAIN, n=2)
    reference.close()
    engine.close()
    assert [[s.token_ids for s in samples] for samples in found] == [
        [s.token_ids for s in samples] for samples in expected
    ]
    assert graphs.replayed
