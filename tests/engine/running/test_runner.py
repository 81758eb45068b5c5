"""Tests of the runner with a real decoder. Its results are compared with full passes over whole sequences."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from engine.device_tables import Padding, SlotTables, StepBatch
from engine.forward import ForwardInput
from engine.generate import LocalEngine
from engine.messages import BLOCK_TOKENS, SamplingParams
from engine.parallel import single
from engine.plan import Chunk, SlotSetup, StepPlan, StepTokens
from engine.runner import ModelRunner
from kernels import AttentionInput, ChunkSpan, sampling
from tests.engine.running.thread_ranks import ThreadRank, on_ranks
from tests.engine.running.tiny_model import VOCAB, quiet, spec_of

TIE = 1e-4


def padded(engine: LocalEngine) -> LocalEngine:
    """Make the engine pad passes with prompts to 4, 80 or 96 tokens and to 5 or 8 result rows."""
    padding = Padding([4, 80, 96], [5, 8])
    engine.runner.steps.tables = SlotTables(8, 4, VOCAB, engine.runner.device, padding)
    return engine


def full_logits(runner: ModelRunner, tokens: list[int]) -> torch.Tensor:
    """Return the logits [tokens, vocabulary] of a single pass over a whole sequence, with a separate
    KV pool."""
    count, device = len(tokens), runner.device
    blocks = -(-count // BLOCK_TOKENS)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    positions = torch.arange(count, device=device)
    with torch.inference_mode():
        hidden = runner.decoder.forward(
            ForwardInput(
                token_ids=torch.tensor(tokens, device=device),
                positions=positions,
                kv_slots=positions,
                attention=AttentionInput(
                    block_table=torch.arange(blocks, device=device).unsqueeze(0),
                    slots=none,
                    lens=none,
                    columns=0,
                    chunks=[ChunkSpan(0, count, 0, 0)],
                ),
            ),
            runner.decoder.allocate_kv(blocks),
        )
        return runner.decoder.logits(hidden)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(2, VOCAB, (length,), generator=generator).tolist()


def check_greedy(runner: ModelRunner, prompt: list[int], tokens: list[int]) -> None:
    logits = full_logits(runner, prompt + tokens)
    for index, token in enumerate(tokens, start=len(prompt) - 1):
        assert logits[index, token] >= logits[index].max() - TIE


def check_sampled(
    runner: ModelRunner, prompt: list[int], tokens: list[int], params: SamplingParams, sample: int
) -> None:
    """Check that each token has the highest score (logit / temperature + noise) according to the logits of a
    full pass."""
    count, first = len(tokens), len(prompt)
    logits = full_logits(runner, prompt + tokens)[first - 1 : first - 1 + count]
    base = torch.full((count,), sampling.noise_base(params.seed, sample))
    keys = sampling.noise_keys(base, torch.arange(first, first + count))
    scores = logits / params.temperature + sampling.gumbel_noise(
        keys, sampling.token_hashes(0, VOCAB, runner.device)
    )
    chosen = scores.gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1)
    assert (chosen >= scores.amax(dim=1) - TIE / params.temperature).all()


LENGTHS = [1, 2, 63, 64, 65, 95, 97, 130, 200]


def test_greedy_tokens_are_those_of_a_full_pass(engine: LocalEngine) -> None:
    """Runs more prompts than there are slots. Prompt lengths are just below, at and above block and chunk
    boundaries."""
    prompts = [prompt_of(length) for length in LENGTHS]
    answers = engine.generate(prompts, SamplingParams(max_tokens=20))
    for prompt, [answer] in zip(prompts, answers, strict=True):
        assert len(answer.token_ids) == 20
        check_greedy(engine.runner, prompt, answer.token_ids)
    engine.scheduler.check()


def test_samples_of_one_prompt_share_blocks_and_then_diverge(engine: LocalEngine) -> None:
    """With n > 1, samples diverge after copy-on-write. The copies must contain the original keys and
    values."""
    params = SamplingParams(max_tokens=40, temperature=0.9, seed=77)
    for length in (5, 64, 100):
        [samples] = engine.generate([prompt_of(length, seed=1)], params, n=4)
        assert len({tuple(sample.token_ids) for sample in samples}) == 4
        for index, sample in enumerate(samples):
            check_sampled(engine.runner, prompt_of(length, seed=1), sample.token_ids, params, index)


def test_padding_of_passes_with_prompts_is_not_sampled(folder: Path) -> None:
    """Passes are padded as on a GPU: token and result counts are raised to sizes for which kernels are
    already loaded."""
    engine = padded(LocalEngine(spec_of(folder)))
    prompts = [prompt_of(length, seed=8) for length in (64, 3, 130, 97)]
    drawn = SamplingParams(max_tokens=8, temperature=0.9, seed=7)
    for answers in (engine.generate(prompts, drawn), engine.generate(prompts, drawn, n=2)):
        for prompt, samples in zip(prompts, answers, strict=True):
            for index, sample in enumerate(samples):
                assert len(sample.token_ids) == 8
                check_sampled(engine.runner, prompt, sample.token_ids, drawn, index)
    engine.close()


def test_a_sampled_output_does_not_depend_on_the_batch_or_on_overlap(
    engine: LocalEngine, folder: Path
) -> None:
    params = SamplingParams(max_tokens=30, temperature=1.0, top_p=0.9, seed=5, repetition_penalty=1.2)
    prompt = prompt_of(70, seed=2)
    [[alone]] = engine.generate([prompt], params)
    crowd = [prompt, *[prompt_of(length, seed=3) for length in (3, 90, 64)]]
    mixed = [
        params,
        SamplingParams(max_tokens=25),
        SamplingParams(max_tokens=9, temperature=1.0, logprobs=2),
        params,
    ]
    again = engine.generate(crowd, mixed)[0][0]
    assert again.token_ids == alone.token_ids
    plain = LocalEngine(spec_of(folder, overlap=False, max_num_batched_tokens=32))
    [[stepwise]] = plain.generate([prompt], params)
    plain.close()
    assert stepwise.token_ids == alone.token_ids


@pytest.mark.parametrize("pads", [False, True])
def test_prompt_logprobs_are_the_log_softmax_of_a_full_pass(folder: Path, pads: bool) -> None:
    """Requests prompt logprobs over several chunks, together with logprobs of sampled tokens."""
    plain = LocalEngine(spec_of(folder))
    engine = padded(plain) if pads else plain
    prompt = prompt_of(200, seed=4)
    params = SamplingParams(max_tokens=3, prompt_logprobs=4, logprobs=2)
    [[answer]] = engine.generate([prompt], params)
    expected = full_logits(engine.runner, prompt + answer.token_ids).log_softmax(dim=1)
    assert answer.prompt_logprobs is not None and answer.prompt_logprobs[0] is None
    entries = [entry for entry in answer.prompt_logprobs[1:] if entry is not None] + answer.logprobs
    assert len(entries) == 199 + 3
    for row, (token, entry) in enumerate(zip((prompt + answer.token_ids)[1:], entries, strict=True)):
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(expected[row, token].item(), abs=1e-4)
        best = expected[row].topk(len(entry.top)).values.tolist()
        assert [logprob for _, logprob in entry.top] == pytest.approx(best, abs=1e-4)
        for candidate, logprob in entry.top:
            assert logprob == pytest.approx(expected[row, candidate].item(), abs=1e-4)
        assert len(entry.top) == (4 if row < 199 else 2)
    engine.close()


def test_stop_tokens_are_suppressed_until_min_tokens(engine: LocalEngine) -> None:
    prompt = prompt_of(10, seed=5)
    [[free]] = engine.generate([prompt], SamplingParams(max_tokens=12))
    stop = (free.token_ids[2],)
    assert stop[0] not in free.token_ids[:2], "the stop token occurs too early: choose another prompt"
    [[early]] = engine.generate([prompt], SamplingParams(max_tokens=12, stop_token_ids=stop))
    assert (
        early.finish_reason == "stop"
        and early.token_ids == free.token_ids[: early.token_ids.index(stop[0]) + 1]
    )
    [[late]] = engine.generate([prompt], SamplingParams(max_tokens=12, stop_token_ids=stop, min_tokens=6))
    assert stop[0] not in late.token_ids[:6]
    assert late.token_ids[:2] == free.token_ids[:2]


def test_a_stop_token_is_allowed_right_after_min_tokens(engine: LocalEngine) -> None:
    params = SamplingParams(max_tokens=12, min_tokens=4, stop_token_ids=(9,), logit_bias={9: 100.0})
    [[sample]] = engine.generate([prompt_of(10, seed=6)], params)
    assert sample.finish_reason == "stop" and len(sample.token_ids) == 5 and sample.token_ids[4] == 9


def test_a_block_is_copied_in_every_layer(folder: Path) -> None:
    runner = ModelRunner(spec_of(folder), single(), quiet)
    with torch.inference_mode():
        for pool in runner.steps.kv:
            pool.keys.normal_()
            pool.values.normal_()
    before = [(pool.keys.clone(), pool.values.clone()) for pool in runner.steps.kv]
    setup = SlotSetup(0, SamplingParams(max_tokens=1), 0, 1, [])
    plan = StepPlan(1, [setup], [(0, 0, 9)], [(2, 5), (7, 6)], [], [Chunk(0, 0, [4], [0])])
    runner.launch(plan).wait()
    for pool, (keys, values) in zip(runner.steps.kv, before, strict=True):
        for source, destination in plan.copies:
            assert torch.equal(pool.keys[destination], keys[source])
            assert torch.equal(pool.values[destination], values[source])
    runner.close()


@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_sample_the_same_tokens_as_one_rank(folder: Path, size: int) -> None:
    """With 4 ranks the 2 KV heads are replicated, and the vocabulary of 101 tokens is padded."""
    params = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, temperature=1.0, seed=1, logprobs=3),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, frequency_penalty=0.5, seed=2),
    ]
    prompts = [prompt_of(length, seed=9) for length in (70, 3, 20)]
    setups = [SlotSetup(i, p, 0, len(t), t) for i, (p, t) in enumerate(zip(params, prompts, strict=True))]
    blocks = [(row, index, 3 * row + index) for row in range(3) for index in range(3)]
    chunks = [Chunk(i, 0, tokens, [i], 2, None) for i, tokens in enumerate(prompts)]
    plans = [StepPlan(1, setups, blocks, [], [], chunks)]
    plans += [StepPlan(step, [], [], [], [0, 1, 2], []) for step in range(2, 10)]
    # This prompt requests no prompt logprobs. It runs in two steps together with decodes, so the last layer
    # computes only the rows that need logits.
    late = prompt_of(70, seed=10)
    setup, table = SlotSetup(3, params[1], 0, len(late), late), [(3, index, 9 + index) for index in range(2)]
    plans.append(StepPlan(10, [setup], table, [], [2, 0, 1], [Chunk(3, 0, late[:40], [])]))
    plans.append(StepPlan(11, [], [], [], [1, 2], [Chunk(3, 40, late[40:], [3])]))
    plans.append(StepPlan(12, [], [], [], [3, 0], []))

    def work(rank: ThreadRank | None) -> list[StepTokens]:
        spec = spec_of(folder, tensor_parallel_size=rank.size if rank else 1)
        runner = ModelRunner(spec, rank or single(), quiet)
        launched = [runner.launch(plan) for plan in plans]
        tokens = [step.wait() for step in launched]
        runner.close()
        return tokens

    alone = work(None)
    for mine in on_ranks(size, work):
        assert [step.token_ids for step in mine] == [step.token_ids for step in alone]
        for step, reference in zip(mine, alone, strict=True):
            assert step.logprobs is not None and reference.logprobs is not None
            pairs = [each for each in zip(step.logprobs, reference.logprobs, strict=True) if each[1]]
            assert pairs
            for found, expected in pairs:
                assert found is not None and expected is not None
                assert found.logprob == pytest.approx(expected.logprob, abs=1e-4)
        assert [len(entries) for entries in mine[0].prompt_logprobs.values()] == [69, 2, 19]


def test_steps_run_asynchronously_in_order_and_gaps_are_measured(folder: Path) -> None:
    runner = ModelRunner(spec_of(folder), single(), quiet)
    setup = SlotSetup(0, SamplingParams(max_tokens=9), 0, 60, [])
    begin = StepPlan(1, [setup], [(0, 0, 0), (0, 1, 1)], [], [], [Chunk(0, 0, prompt_of(60), [0])])
    gate = threading.Event()
    assert runner._stream is not None
    runner._stream.submit(gate.wait)
    launched = [runner.launch(begin), *[runner.launch(StepPlan(n, [], [], [], [0], [])) for n in range(2, 9)]]
    assert not any(step.ready() for step in launched)
    threading.Event().wait(0.6)
    gate.set()
    tokens = [step.wait().token_ids[0] for step in launched]
    check_greedy(runner, prompt_of(60), tokens)
    assert all(step.ready() for step in launched)
    assert launched[0].host_gap_us == 0.0
    # A host gap does not include the wait for the previous step. Other processes may delay some of the steps,
    # so check the shortest gap.
    gaps = [step.host_gap_us for step in launched[1:]]
    assert 0.0 <= min(gaps) < 500_000
    threading.Event().wait(0.03)
    late = runner.launch(StepPlan(9, [], [], [], [0], []))
    late.wait()
    assert late.host_gap_us > 25_000
    runner.close()


def test_preparation_on_the_host_while_the_device_is_idle_counts_as_a_gap(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = ModelRunner(spec_of(folder), single(), quiet)
    setup = SlotSetup(0, SamplingParams(max_tokens=9), 0, 5, [])
    runner.launch(StepPlan(1, [setup], [(0, 0, 0)], [], [], [Chunk(0, 0, prompt_of(5), [0])])).wait()
    prepare = runner.steps.tables.step_batch

    def slowly(plan: StepPlan) -> StepBatch:
        threading.Event().wait(0.03)
        return prepare(plan)

    monkeypatch.setattr(runner.steps.tables, "step_batch", slowly)
    step = runner.launch(StepPlan(2, [], [], [], [0], []))
    step.wait()
    assert step.host_gap_us > 25_000
    runner.close()


def test_after_a_failed_step_every_later_step_fails(folder: Path) -> None:
    runner = ModelRunner(spec_of(folder), single(), quiet)
    setup = SlotSetup(0, SamplingParams(max_tokens=9), 0, 1, [])
    good = StepPlan(2, [setup], [(0, 0, 0)], [], [], [Chunk(0, 0, [5], [0])])
    bad = StepPlan(1, [setup], [(0, 0, 10_000)], [], [], [Chunk(0, 0, [5], [0])])
    steps = [runner.launch(bad), runner.launch(good)]
    with pytest.raises(IndexError):
        steps[0].wait()
    with pytest.raises(RuntimeError, match="an earlier step failed"):
        steps[1].wait()
    runner.close()


def test_only_allowed_tokens_are_sampled(engine: LocalEngine) -> None:
    allowed = {3, 17, 64, 100}
    bits = sum(1 << token for token in allowed).to_bytes(13, "little")
    free = SamplingParams(max_tokens=12)
    for params in (
        SamplingParams(max_tokens=30, allowed_tokens=bits),
        SamplingParams(max_tokens=30, allowed_tokens=bits, temperature=2.0, seed=3),
    ):
        answers = engine.generate([prompt_of(70), prompt_of(9)], [params, free], n=2)
        assert all(set(sample.token_ids) <= allowed for sample in answers[0])
        # The sequences in the other slots are not restricted.
        check_greedy(engine.runner, prompt_of(9), answers[1][0].token_ids)


@pytest.mark.parametrize("overlap", [True, False])
def test_a_bad_word_is_banned_in_steps_launched_before_tokens_are_read(folder: Path, overlap: bool) -> None:
    """Every sequence of three consecutive tokens that occurs in an answer is banned in all later answers. A
    later answer may contain the beginning of a banned sequence, but never a complete one."""
    engine = LocalEngine(spec_of(folder, overlap=overlap))
    prompt, seed = prompt_of(70, seed=4), 0
    words: set[tuple[int, ...]] = set()
    for _ in range(6):
        params = SamplingParams(
            max_tokens=30, temperature=0.2, seed=seed, bad_words=tuple(sorted(words)), frequency_penalty=-0.5
        )
        [samples] = engine.generate([prompt], params, n=3)
        for sample in samples:
            runs = {tuple(sample.token_ids[at : at + 3]) for at in range(28)}
            assert not runs & words
        words |= {tuple(samples[0].token_ids[at : at + 3]) for at in range(28)}
    first = {word[0] for word in words}
    assert any(token in first for sample in samples for token in sample.token_ids)
    engine.close()


def test_a_bad_word_may_begin_in_the_prompt_but_may_not_occur_in_the_output(engine: LocalEngine) -> None:
    prompt = prompt_of(10, seed=6)
    [[free]] = engine.generate([prompt], SamplingParams(max_tokens=6))
    words = ((prompt[-1], free.token_ids[0]),)
    [[same]] = engine.generate([prompt], SamplingParams(max_tokens=6, bad_words=words))
    assert same.token_ids == free.token_ids
    words = ((free.token_ids[1], free.token_ids[2]),)
    [[changed]] = engine.generate([prompt], SamplingParams(max_tokens=6, bad_words=words))
    assert changed.token_ids[:2] == free.token_ids[:2] and changed.token_ids[2] != free.token_ids[2]
