"""Tests of the sampler: exact distributions, the order of operations, independence from the batch, several
ranks, and log probabilities. The tests also check that the kernels, which do not sort, sample the same tokens
as torch. Without a GPU, the kernels run in the interpreter."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.device_tables import SamplingBatch, SlotTables
from engine.messages import SamplingParams
from engine.parallel import Ranks, single
from engine.plan import BAD_TOKEN, LOWEST_LOGPROB, Chunk, SlotSetup, StepPlan
from engine.sampler import SampledStep, Sampler
from kernels import draws as seam
from kernels import sampling as reference
from kernels import select_sampling
from kernels.draws import SamplingOps, Variant
from tests.engine.running.test_sampling_ops import chi_square
from tests.engine.running.thread_ranks import ThreadRank, on_ranks
from tests.examples import examples

CPU = torch.device("cpu")


@dataclasses.dataclass(frozen=True)
class Case:
    """A slot to sample: its parameters, its sample index, and the tokens that precede the sampled
    position."""

    params: SamplingParams
    sample: int = 0
    prompt: tuple[int, ...] = (1,)
    output: tuple[int, ...] = ()


def staged(cases: Sequence[Case], vocab: int) -> tuple[SlotTables, SamplingBatch]:
    """Return the slot tables and the sampling batch for a step in which each slot has a one-token chunk at
    the end of its known tokens."""
    tables = SlotTables(len(cases), 4, vocab, CPU)
    plan = StepPlan(1, [], [], [], [], [])
    for row, case in enumerate(cases):
        history = [*case.prompt, *case.output]
        setup = SlotSetup(
            row, case.params, case.sample, len(case.prompt), history, recent=list(case.output[-31:])
        )
        plan.setups.append(setup)
        plan.chunks.append(Chunk(row, len(history) - 1, [0], [row]))
    tables.apply(plan)
    return tables, tables.step_batch(plan).sampling


def sample(
    cases: Sequence[Case], logits: torch.Tensor, ranks: Ranks | None = None, ops: SamplingOps = reference
) -> SampledStep:
    """Sample from `logits` [cases, vocabulary]. With several ranks, each rank gets its columns of the logits,
    and the last rank's columns are padded."""
    vocab = logits.shape[1]
    tables, batch = staged(cases, vocab)
    ranks = ranks or single()
    part = -(-vocab // ranks.size)
    first = min(part * ranks.rank, vocab)
    real = min(part, vocab - first)
    mine = torch.full((len(logits), part), math.nan, dtype=logits.dtype)
    mine[:, :real] = logits[:, first : first + real]
    sampler = Sampler(ranks, CPU, ops, vocab_size=vocab, first_vocab=first, vocab=part, vocab_real=real)
    return sampler.sample(mine, batch, tables)


class OneAtATime:
    """Sampling kernels for ranks that are threads. Only one rank runs at a time, because Triton's interpreter
    can run only one program at a time."""

    def __init__(self, ops: SamplingOps) -> None:
        self._ops, self._lock = ops, threading.Lock()

    def __getattr__(self, name: str) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            with self._lock:
                return getattr(self._ops, name)(*arguments)

        return call


def random_logits(rows: int, vocab: int, seed: int = 0, spread: float = 2.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


def oracle(case: Case, logits: torch.Tensor) -> torch.Tensor:
    """Return the probabilities [vocabulary] in float64, computed by transformers' logits processors in the
    documented order."""
    params, history = case.params, torch.tensor([[*case.prompt, *case.output]])
    scores = logits.unsqueeze(0).clone()
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(history, scores)
    for token in set(case.output):
        scores[0, token] -= params.frequency_penalty * case.output.count(token) + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        scores[0, token] += bias
    if len(case.output) < params.min_tokens and not params.ignore_eos:
        scores[0, list(params.stop_token_ids)] = -torch.inf
    if params.allowed_tokens:
        allowed = [
            t
            for t in range(len(scores[0]))
            if params.allowed_tokens[t // 8 : t // 8 + 1] and params.allowed_tokens[t // 8] >> t % 8 & 1
        ]
        scores = torch.full_like(scores, -torch.inf).index_copy_(1, torch.tensor(allowed), scores[:, allowed])
    for word in params.bad_words:
        if len(case.output) >= len(word) - 1 and case.output[len(case.output) - len(word) + 1 :] == word[:-1]:
            scores[0, word[-1]] = -torch.inf
    if params.temperature == 0:
        return torch.nn.functional.one_hot(scores[0].argmax(), logits.shape[0]).double()
    warpers = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(history, scores)[0].double().softmax(dim=0)


def bitmap(*token_ids: int) -> bytes:
    """Return the tokens as a bitmap for `SamplingParams.allowed_tokens`."""
    return sum(1 << token for token in set(token_ids)).to_bytes(max(token_ids) // 8 + 1, "little")


HISTORY = {"prompt": (3, 3, 9, 17), "output": (5, 9, 9, 20)}
CASES = {
    "temperature": Case(SamplingParams(max_tokens=9, temperature=0.7)),
    "hot": Case(SamplingParams(max_tokens=9, temperature=3.0)),
    "top_k": Case(SamplingParams(max_tokens=9, temperature=1.3, top_k=5)),
    "top_p": Case(SamplingParams(max_tokens=9, temperature=1.0, top_p=0.8)),
    "narrow top_p": Case(SamplingParams(max_tokens=9, temperature=2.0, top_p=0.3)),
    "min_p": Case(SamplingParams(max_tokens=9, temperature=1.5, min_p=0.1)),
    "all three": Case(SamplingParams(max_tokens=9, temperature=1.5, top_k=12, top_p=0.9, min_p=0.05)),
    "repetition": Case(SamplingParams(max_tokens=9, temperature=1.0, repetition_penalty=1.8), **HISTORY),
    "frequency": Case(
        SamplingParams(max_tokens=9, temperature=1.0, frequency_penalty=0.9, presence_penalty=-0.7), **HISTORY
    ),
    "bias": Case(SamplingParams(max_tokens=9, temperature=1.0, logit_bias={2: 3.0, 7: -100.0, 30: 1.5})),
    "min_tokens": Case(
        SamplingParams(max_tokens=9, temperature=1.0, min_tokens=5, stop_token_ids=(2, 4, 6)), **HISTORY
    ),
    "min_tokens reached": Case(
        SamplingParams(max_tokens=9, temperature=1.0, min_tokens=4, stop_token_ids=(2, 4, 6)), **HISTORY
    ),
    "allowed tokens": Case(
        SamplingParams(max_tokens=9, temperature=1.0, top_k=9, allowed_tokens=bitmap(2, 3, 9, 20, 31)),
        **HISTORY,
    ),
    "bad words": Case(
        SamplingParams(
            max_tokens=9,
            temperature=2.0,
            # The output ends with 5, 9, 9, 20; the prompt's tokens are ignored. Two bad words have the same
            # last token.
            bad_words=(
                (4,),
                (20, 6),
                (9, 20, 7),
                (9, 9, 7),
                (5, 9, 9, 20, 8),
                (17, 5, 9, 9, 20, 10),
                (9, 11),
            ),
        ),
        **HISTORY,
    ),
    "everything": Case(
        SamplingParams(
            max_tokens=9,
            temperature=1.2,
            top_k=20,
            top_p=0.95,
            min_p=0.02,
            repetition_penalty=1.3,
            frequency_penalty=0.2,
            presence_penalty=0.3,
            logit_bias={2: 2.0, 5: 4.0},
            min_tokens=6,
            stop_token_ids=(2, 31),
            allowed_tokens=bitmap(*range(1, 32, 2), 20),
            bad_words=((3,), (20, 5)),
        ),
        **HISTORY,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_token_frequencies_over_many_seeds_match_the_distribution_of_transformers(name: str) -> None:
    case, draws, vocab = CASES[name], 4_000, 32
    logits = random_logits(1, vocab, seed=11)
    expected = oracle(case, logits[0]).numpy() * draws
    # All slots of one chunk sample from one row of logits, each with its own seed.
    tables = SlotTables(draws, 1, vocab, CPU)
    history = [*case.prompt, *case.output]
    setups = [
        SlotSetup(row, _with(case.params, seed=row), 0, len(case.prompt), history, recent=list(case.output))
        for row in range(draws)
    ]
    plan = StepPlan(1, setups, [], [], [], [Chunk(0, len(history) - 1, [0], list(range(draws)))])
    tables.apply(plan)
    sampler = Sampler(single(), CPU, reference, vocab_size=vocab)
    tokens = sampler.sample(logits, tables.step_batch(plan).sampling, tables).token_ids
    observed = torch.bincount(tokens, minlength=vocab).numpy()
    assert (observed[expected == 0] == 0).all()
    assert abs(chi_square(observed, expected)) < 3.5


def _with(params: SamplingParams, **changes: object) -> SamplingParams:
    fields = {name: getattr(params, name) for name in params.__struct_fields__}
    return SamplingParams(**(fields | changes))


def some_params() -> st.SearchStrategy[SamplingParams]:
    def off_or(default: float, *values: float) -> st.SearchStrategy[float]:
        return st.sampled_from([default, default, *values])

    return st.builds(
        SamplingParams,
        max_tokens=st.just(9),
        temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 1.7]),
        top_k=st.sampled_from([0, 0, 1, 4, 1000]),
        top_p=off_or(1.0, 0.5, 0.95),
        min_p=off_or(0.0, 0.05),
        presence_penalty=off_or(0.0, 1.5),
        frequency_penalty=off_or(0.0, -0.5),
        repetition_penalty=off_or(1.0, 1.4),
        logit_bias=st.sampled_from([None, None, {3: 5.0, 40: -100.0}]),
        seed=st.integers(-(2**63), 2**64 - 1),
        min_tokens=st.sampled_from([0, 0, 4]),
        stop_token_ids=st.sampled_from([(), (7, 8)]),
        allowed_tokens=st.sampled_from([b"", b"", bitmap(*range(0, 51, 3)), bitmap(50, 4, 500)]),
        bad_words=st.sampled_from([(), (), ((9,), (1, 6)), ((3, 4, 5), (2, 9), (0,))]),
        logprobs=st.sampled_from([None, None, 0, 3]),
    )


def some_cases(most: int = 7) -> st.SearchStrategy[list[Case]]:
    tokens = st.lists(st.integers(0, 50), max_size=5).map(tuple)
    case = st.builds(Case, some_params(), st.integers(0, 3), tokens.map(lambda t: (1, *t)), tokens)
    return st.lists(case, min_size=1, max_size=most)


@given(cases=some_cases(), seed=st.integers(0, 1000))
@examples(60)
def test_a_sampled_token_does_not_depend_on_the_batch_and_is_allowed(cases: list[Case], seed: int) -> None:
    logits = random_logits(len(cases), 51, seed)
    together = sample(cases, logits.clone()).token_ids.tolist()
    for row, case in enumerate(cases):
        assert sample([case], logits[row : row + 1].clone()).token_ids.tolist() == together[row : row + 1]
        assert oracle(case, logits[row])[together[row]] > 0


@given(cases=some_cases(), seed=st.integers(0, 1000), size=st.sampled_from([2, 3, 4]))
@examples(40)
def test_ranks_with_a_vocabulary_shard_sample_the_same_tokens_as_one_rank(
    cases: list[Case], seed: int, size: int
) -> None:
    logits = random_logits(len(cases), 51, seed)
    alone = sample(cases, logits.clone())

    def work(rank: ThreadRank) -> SampledStep:
        return sample(cases, logits, rank)

    for mine in on_ranks(size, work):
        assert torch.equal(mine.token_ids, alone.token_ids)
        assert (mine.logprobs is None) == (alone.logprobs is None)
        if mine.logprobs is not None and alone.logprobs is not None:
            torch.testing.assert_close(mine.logprobs, alone.logprobs, atol=1e-5, rtol=1e-5)


def test_a_rank_without_a_token_of_the_vocabulary_samples_with_the_others() -> None:
    cases = [Case(SamplingParams(max_tokens=4, temperature=t, logprobs=2)) for t in (0.0, 1.0)]
    logits = random_logits(len(cases), 5)
    alone = sample(cases, logits.clone())
    # Without padding, the four ranks have 2, 2, 1 and 0 tokens of the vocabulary.
    for mine in on_ranks(4, lambda rank: sample(cases, logits, rank)):
        assert torch.equal(mine.token_ids, alone.token_ids)
        assert mine.logprobs is not None and alone.logprobs is not None
        torch.testing.assert_close(mine.logprobs, alone.logprobs, atol=1e-5, rtol=1e-5)


@given(cases=some_cases(), seed=st.integers(0, 1000), dtype=st.sampled_from([torch.float32, torch.float16]))
@examples(25)
def test_kernels_sample_the_same_tokens_as_torch_in_any_mixture(
    cases: list[Case], seed: int, dtype: torch.dtype
) -> None:
    """Mixes slots with penalties, biases and bans with slots that are only filtered, plain or greedy. The
    logits must not be modified."""
    logits = random_logits(len(cases), 51, seed).to(dtype)
    before = logits.clone()
    found = sample(cases, logits, ops=select_sampling("cuda"))
    expected = sample(cases, logits)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert torch.equal(logits, before)
    assert (found.logprobs is None) == (expected.logprobs is None)
    if found.logprobs is not None and expected.logprobs is not None:
        assert torch.equal(found.logprobs, expected.logprobs)


@given(cases=some_cases(4), seed=st.integers(0, 1000), size=st.sampled_from([2, 4]))
@examples(8)
def test_kernels_on_several_ranks_sample_the_same_tokens_as_torch_on_one(
    cases: list[Case], seed: int, size: int
) -> None:
    logits = random_logits(len(cases), 51, seed)
    expected = sample(cases, logits).token_ids
    kernels = OneAtATime(select_sampling("cuda"))
    for mine in on_ranks(size, lambda rank: sample(cases, logits, rank, kernels)):
        assert torch.equal(mine.token_ids, expected)


@pytest.mark.parametrize("backend", ["reference", "cuda"])
@pytest.mark.parametrize("variant", Variant)
def test_a_variant_also_serves_slots_of_cheaper_variants_and_skips_padding(
    variant: Variant, backend: str
) -> None:
    """A CUDA graph uses one sampling variant for the whole batch, even if a cheaper variant would suffice for
    some of the slots. These slots must get the same tokens with both variants."""
    params = [
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, temperature=0.8, seed=3),
        SamplingParams(max_tokens=9, temperature=1.2, top_p=0.7, top_k=9, seed=4),
    ]
    cases = [Case(params[i % (variant + 1)], sample=i) for i in range(5)]
    logits = random_logits(5, 300, seed=2)
    tables, batch = staged(cases, 300)
    assert batch.metadata.variant == variant
    sampler = Sampler(single(), CPU, select_sampling(backend), vocab_size=300)
    rows = torch.tensor([0, -1, 2, 3, -1])
    drawn = sampler.draw(logits, variant, tables.sampling.draws(rows, batch.positions))
    real = rows >= 0
    assert torch.equal(drawn[real], sample(cases, logits).token_ids[real])
    if variant > Variant.GREEDY:
        assert (drawn[~real] == BAD_TOKEN).all()


def test_the_engine_and_the_kernels_define_the_same_bad_token() -> None:
    # The constant is defined both in the engine and in the kernels, because the message structs must not
    # import torch.
    assert seam.BAD_TOKEN == BAD_TOKEN


def test_sampling_does_not_depend_on_how_a_large_vocabulary_is_split() -> None:
    params = [SamplingParams(max_tokens=1, temperature=0.1 + row / 8, seed=row) for row in range(16)]
    cases = [Case(p, prompt=(1,) * (row + 1)) for row, p in enumerate(params)]
    logits = random_logits(16, 32_003, seed=5)
    alone = sample(cases, logits).token_ids
    for size in (2, 8):
        for mine in on_ranks(size, lambda rank: sample(cases, logits, rank)):
            assert torch.equal(mine.token_ids, alone)


def test_the_noise_depends_on_seed_sample_and_position() -> None:
    params = SamplingParams(max_tokens=9, temperature=5.0, seed=4)
    cases = [
        Case(params),
        Case(params),
        Case(params, sample=1),
        Case(params, prompt=(1, 1)),
        Case(_with(params, seed=5)),
    ]
    logits = random_logits(1, 5000).expand(len(cases), -1).clone()
    tokens = sample(cases, logits).token_ids.tolist()
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) == 4


def test_greedy_sampling_takes_the_lowest_id_among_equal_logits_on_any_number_of_ranks() -> None:
    logits = torch.zeros(2, 10)
    logits[0, [3, 8]] = 1.0
    cases = [Case(SamplingParams(max_tokens=1))] * 2
    for size in (1, 2, 4):
        for mine in on_ranks(size, lambda rank: sample(cases, logits, rank)):
            assert mine.token_ids.tolist() == [3, 0]


@pytest.mark.parametrize("size", [1, 2])
def test_non_finite_logits_affect_only_their_own_slot(size: int) -> None:
    everything_banned = SamplingParams(max_tokens=1, min_tokens=1, stop_token_ids=tuple(range(12)))
    kinds = [
        SamplingParams(max_tokens=1, logprobs=1),
        SamplingParams(max_tokens=1, temperature=1.0),
        SamplingParams(max_tokens=1, temperature=1.0, top_p=0.5, top_k=3, min_p=0.1),
        SamplingParams(max_tokens=1, temperature=1.0, frequency_penalty=1.0),
    ]
    logits = random_logits(13, 12)
    cases = [Case(kind) for kind in kinds for _ in range(3)] + [Case(everything_banned)]
    good = sample(cases, logits.clone()).token_ids
    for row in range(0, 12, 3):
        logits[row, 10] = math.nan
        logits[row + 1] = -math.inf
    for mine in on_ranks(size, lambda rank: sample(cases, logits.clone(), rank)):
        expected = [BAD_TOKEN if row % 3 < 2 else good[row].item() for row in range(12)] + [BAD_TOKEN]
        assert mine.token_ids.tolist() == expected
        assert mine.logprobs is not None and mine.logprobs.isfinite().all()
        assert mine.logprobs[0, 0] == LOWEST_LOGPROB


def test_a_slot_without_a_sampled_token_feeds_a_valid_token() -> None:
    """The next step is launched before the host reads BAD_TOKEN, so the step needs a valid input token."""
    case = Case(SamplingParams(max_tokens=1))
    tables, batch = staged([case], 8)
    Sampler(single(), CPU, reference, vocab_size=8).sample(torch.full((1, 8), math.nan), batch, tables)
    assert tables.last_tokens[0] == 0


def test_log_probabilities_do_not_depend_on_sampling_parameters() -> None:
    logits = random_logits(3, 40, seed=8)
    heavy = SamplingParams(
        max_tokens=1, temperature=0.5, top_k=2, logit_bias={3: 9.0}, repetition_penalty=2.0, logprobs=5
    )
    plain = SamplingParams(max_tokens=1, temperature=2.0, logprobs=0)
    cases = [Case(heavy), Case(SamplingParams(max_tokens=1)), Case(plain)]
    sampled = sample(cases, logits.clone())
    assert sampled.logprobs is not None
    expected = logits[[0, 2]].double().log_softmax(dim=1)
    chosen = expected.gather(1, sampled.token_ids[[0, 2]].unsqueeze(1)).squeeze(1)
    best = expected.topk(5, dim=1)
    torch.testing.assert_close(sampled.logprobs[:, 0], chosen, atol=1e-5, rtol=0)
    torch.testing.assert_close(sampled.logprobs[:, 1:6], best.values, atol=1e-5, rtol=0)
    assert np.array_equal(sampled.logprobs[:, 6:].long().numpy(), best.indices.numpy())


def test_more_alternatives_than_tokens_return_the_whole_vocabulary() -> None:
    logits = random_logits(2, 7)
    cases = [Case(SamplingParams(max_tokens=1, logprobs=20))] * 2
    for size in (1, 4):
        for mine in on_ranks(size, lambda rank: sample(cases, logits, rank)):
            assert mine.logprobs is not None and mine.logprobs.shape == (2, 15)
            assert mine.logprobs[:, 1:8].exp().sum(dim=1).tolist() == pytest.approx([1.0, 1.0])
