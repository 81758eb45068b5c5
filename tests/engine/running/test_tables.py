"""Tests of `SlotTables` against a model of dicts and lists, with random plans."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import sampling_tables
from engine.device_tables import SlotTables, StepBatch
from engine.messages import BLOCK_TOKENS, SamplingParams
from engine.plan import Chunk, SlotSetup, StepPlan
from engine.sampling_tables import SamplingMetadata
from engine.transfer import upload
from kernels import ChunkSpan
from kernels.draws import Variant
from tests.engine.scheduling.simulated_runner import sampling_slots
from tests.examples import examples

CPU = torch.device("cpu")
ROWS, BLOCKS, VOCAB = 5, 4, 50

PARAMS = [
    SamplingParams(max_tokens=9),
    SamplingParams(max_tokens=9, temperature=0.7, seed=3),
    SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=9, frequency_penalty=0.5),
    SamplingParams(max_tokens=9, temperature=0.5, repetition_penalty=1.2, logprobs=0),
    SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(7,)),
    SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(7,), ignore_eos=True),
    SamplingParams(max_tokens=9, temperature=2.0, logit_bias={4: 1.0}),
    SamplingParams(max_tokens=9, temperature=2.0, allowed_tokens=b"\x0e", bad_words=((5, 7, 1), (2,))),
]
PENALISED = (3, 4)
EDITED = (3, 4, 7, 8)


@dataclass
class ModelRow:
    """The state of a slot in the simple model of dicts and lists."""

    which: int
    prompt: list[int]
    tokens: list[int]
    computed: int = 0
    sampled: bool = False
    table: list[int] = field(default_factory=list)

    @property
    def variant(self) -> Variant:
        if self.which == 2:
            return Variant.FULL
        return Variant.PLAIN if PARAMS[self.which].temperature else Variant.GREEDY

    @property
    def edited(self) -> bool:
        waiting = self.which == 5 and len(self.tokens) - len(self.prompt) < 2
        return self.which in EDITED or waiting


def slots_of(row: ModelRow, positions: range) -> list[int]:
    return [row.table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in positions]


def check_metadata(
    metadata: SamplingMetadata, rows: list[ModelRow], numbers: list[int], count_row_of: dict[int, int]
) -> None:
    assert metadata.variant == max((row.variant for row in rows), default=Variant.GREEDY)
    edited = [i for i, row in enumerate(rows) if row.edited]
    penalised = [i for i, row in enumerate(rows) if row.which in PENALISED]
    if metadata.processors is None:
        assert not edited
    else:
        assert metadata.processors.index.tolist() == edited
        assert [i for i in metadata.processors.index_of.tolist() if i >= 0] == list(range(len(edited)))
        assert [metadata.processors.index_of[i].item() for i in edited] == list(range(len(edited)))
        slots = [count_row_of[numbers[i]] if i in penalised else -1 for i in edited]
        assert (metadata.processors.count_rows is None) == (not penalised)
        assert metadata.processors.count_rows is None or metadata.processors.count_rows.tolist() == slots
        assert (metadata.processors.bias is not None) == any(rows[i].which == 7 for i in edited)
        assert (metadata.processors.banned is not None) == any(rows[i].which == 5 for i in edited)
    wanting = [(i, PARAMS[row.which].logprobs) for i, row in enumerate(rows)]
    assert metadata.logprob_rows == [(i, k) for i, k in wanting if k is not None]


def check_counts(tables: SlotTables, rows: dict[int, ModelRow]) -> None:
    penalised = {number: row for number, row in rows.items() if row.which in PENALISED}
    for number, row in penalised.items():
        expected = torch.zeros(VOCAB, dtype=torch.int32)
        expected[row.prompt] = 1
        for token in row.tokens[len(row.prompt) :]:
            expected[token] += 2
        sampling = tables.sampling
        assert sampling.counts is not None
        assert torch.equal(sampling.counts[sampling._count_row_of[number]], expected)


@given(data=st.data())
@examples(60)
def test_random_plans_give_the_tables_of_a_naive_model(data: st.DataObject) -> None:
    tables = SlotTables(ROWS, BLOCKS, VOCAB, CPU)
    rows: dict[int, ModelRow] = {}
    next_block = 1
    for step in range(data.draw(st.integers(1, 12), label="steps")):
        plan = StepPlan(step, [], [], [], [], [])
        # In each step, any sequence may end, any slot may be skipped, and a slot whose prompt is still being
        # computed gets a chunk.
        for number in [n for n, row in rows.items() if data.draw(st.integers(0, 9)) == 0]:
            del rows[number]
        decoding = [n for n, row in rows.items() if row.sampled]
        plan.decodes.extend(n for n in decoding if data.draw(st.booleans()))
        for number in [n for n in range(ROWS) if n not in rows and data.draw(st.booleans())]:
            which = data.draw(st.integers(0, len(PARAMS) - 1))
            prompt = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=150))
            output = data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=3))
            rows[number] = ModelRow(which, prompt, prompt + output)
            history = prompt + output if which in PENALISED else []
            plan.setups.append(SlotSetup(number, PARAMS[which], number, len(prompt), history))
        for number, row in rows.items():
            if number in decoding:
                continue
            end = data.draw(st.integers(row.computed + 1, len(row.tokens)))
            last = end == len(row.tokens)
            wanted = data.draw(st.sampled_from([None, 0, 3]))
            following = row.tokens[end] if not last else None
            tokens = row.tokens[row.computed : end]
            samples = [number] if last else []
            plan.chunks.append(Chunk(number, row.computed, tokens, samples, wanted, following))
        logits_attention = {chunk.slot: chunk.start + len(chunk.token_ids) for chunk in plan.chunks}
        logits_attention |= {number: rows[number].computed + 1 for number in plan.decodes}
        for number, end in logits_attention.items():
            while len(rows[number].table) * BLOCK_TOKENS < end:
                plan.blocks.append((number, len(rows[number].table), next_block))
                rows[number].table.append(next_block)
                next_block += 1
        tables.apply(plan)
        check_counts(tables, rows)
        batch = tables.step_batch(plan)
        check_batch(batch, plan, rows)
        numbers = sampling_slots(plan)
        slots = tables.sampling._count_row_of
        check_metadata(batch.sampling.metadata, [rows[n] for n in numbers], numbers, slots)
        samples = sampling_slots(plan)
        tokens = data.draw(st.lists(st.integers(0, VOCAB - 1), min_size=len(samples), max_size=len(samples)))
        tables.advance(batch.sampling, torch.tensor(tokens, dtype=torch.int64))
        for number, end in logits_attention.items():
            rows[number].computed = end
        for number, token in zip(samples, tokens, strict=True):
            rows[number].tokens.append(token)
            rows[number].sampled = True
        check_counts(tables, rows)
        assert [tables.last_tokens[n].item() for n in samples] == tokens
        assert [tables.lengths[n].item() for n in samples] == [rows[n].computed for n in samples]


def check_batch(batch: StepBatch, plan: StepPlan, rows: dict[int, ModelRow]) -> None:
    forward, decodes = batch.forward, [rows[n] for n in plan.decodes]
    tokens = [row.tokens[-1] for row in decodes]
    positions = [row.computed for row in decodes]
    slots = [slots_of(row, range(row.computed, row.computed + 1))[0] for row in decodes]
    attention = forward.attention
    assert attention.slots.tolist() == plan.decodes
    assert attention.lens.tolist() == [p + 1 for p in positions]
    for n, row in zip(plan.decodes, decodes, strict=True):
        used = row.computed // BLOCK_TOKENS + 1
        assert used <= attention.columns
        assert attention.block_table[n, :used].tolist() == row.table[:used]
    queries, lens, table_rows = list(range(len(decodes))), [p + 1 for p in positions], list(plan.decodes)
    scored = any(chunk.prompt_logprobs is not None for chunk in plan.chunks)
    logits_indices, sampled_positions = list(range(len(decodes))), [p + 1 for p in positions]
    logit_rows = list(range(len(decodes)))
    prompt_index: list[int] = []
    for chunk, span in zip(plan.chunks, attention.chunks, strict=True):
        end = chunk.start + len(chunk.token_ids)
        assert span == ChunkSpan(len(tokens), end - chunk.start, chunk.start, chunk.slot)
        used = -(-end // BLOCK_TOKENS)
        assert attention.block_table[chunk.slot, :used].tolist() == rows[chunk.slot].table[:used]
        if chunk.sample_slots:
            logits_indices.append(len(tokens) + span.count - 1 if scored else len(queries))
            logit_rows.append(len(logits_indices) - 1 if scored else len(queries))
            sampled_positions.append(end)
        queries.append(len(tokens) + span.count - 1)
        lens.append(end)
        table_rows.append(chunk.slot)
        if chunk.prompt_logprobs is not None:
            wanted = span.count - (chunk.next_token is None)
            prompt_index.extend(range(len(tokens), len(tokens) + wanted))
        tokens += chunk.token_ids
        positions += range(chunk.start, end)
        slots += slots_of(rows[chunk.slot], range(chunk.start, end))
    assert forward.token_ids.tolist() == tokens
    assert forward.positions.tolist() == positions
    assert forward.kv_slots.tolist() == slots
    if scored or not plan.chunks:
        assert forward.logits_attention is None
    if scored:
        assert batch.logits_indices is not None
        assert batch.logits_indices.tolist() == logits_indices + prompt_index
        assert batch.sampled_logits == len(logits_indices)
    elif plan.chunks:
        assert batch.logits_indices is None
        logits_attention = forward.logits_attention
        assert (
            logits_attention is not None
            and logits_attention.queries is not None
            and not logits_attention.chunks
        )
        assert (
            logits_attention.queries.tolist(),
            logits_attention.slots.tolist(),
            logits_attention.lens.tolist(),
        ) == (queries, table_rows, lens)
        assert logits_attention.columns >= -(-max(lens) // BLOCK_TOKENS)
        assert batch.sampled_logits == (len(queries) if sampling_slots(plan) else 0)
    else:
        assert batch.logits_indices is None and batch.sampled_logits == len(decodes)
    assert batch.sampling.slots.tolist() == sampling_slots(plan)
    assert batch.sampling.positions.tolist() == sampled_positions
    shared = batch.sampling.logit_rows
    assert (list(range(len(logit_rows))) if shared is None else shared.tolist()) == logit_rows
    targets = [target for prompt in batch.prompts for target in prompt.targets.tolist()]
    follow = {
        c.slot: [*c.token_ids[1:], *([] if c.next_token is None else [c.next_token])] for c in plan.chunks
    }
    assert targets == [t for c in plan.chunks if c.prompt_logprobs is not None for t in follow[c.slot]]


def plan_of(setups: list[SlotSetup], step: int = 1) -> StepPlan:
    return StepPlan(step, setups, [], [], [], [])


def test_penalty_counts_exist_only_while_a_slot_needs_them() -> None:
    tables = SlotTables(8, 2, VOCAB, CPU)
    plain, penalised = PARAMS[0], PARAMS[3]
    tables.apply(plan_of([SlotSetup(0, plain, 0, 1, [])]))
    assert tables.sampling.counts is None
    tables.apply(plan_of([SlotSetup(n, penalised, 0, 1, [n]) for n in range(3)]))
    assert tables.sampling.counts is not None and tables.sampling.counts.shape == (4, VOCAB)
    tables.apply(plan_of([SlotSetup(n, plain, 0, 1, []) for n in range(2)]))
    assert tables.sampling.counts is not None
    tables.apply(plan_of([SlotSetup(2, plain, 0, 1, [])]))
    assert tables.sampling.counts is None


@pytest.mark.parametrize("which", range(len(PARAMS)))
def test_a_shared_setup_gives_forks_the_same_tables_as_separate_setups(which: int) -> None:
    prompt, output = [3, 5, 3], [7, 5, 7]
    history = prompt + output if which in PENALISED else []
    pairs = [(4, 2), (1, 9), (6, 0), (0, 3)]
    (row, sample), *forks = pairs
    other = SlotSetup(2, PARAMS[3], 0, 1, [8])
    together, apart = SlotTables(8, 2, VOCAB, CPU), SlotTables(8, 2, VOCAB, CPU)
    for tables in (together, apart):
        # Give all slots penalty counts and a length, as earlier sequences would have left them.
        tables.apply(plan_of([SlotSetup(n, PARAMS[4], 0, 1, [n]) for n in range(8)]))
        tables._lengths_host[:] = 5
    recent = output if PARAMS[which].bad_words else []
    together.apply(plan_of([other, SlotSetup(row, PARAMS[which], sample, 3, history, forks, recent)]))
    each = [
        SlotSetup(row, PARAMS[which], sample, 3, list(history), recent=list(recent)) for row, sample in pairs
    ]
    apart.apply(plan_of([other, *each]))
    rows = [row for row, _ in pairs]
    lengths = np.full(8, 6)
    for step in range(2):
        for name in ("noise_base", "floats", "top_k"):
            assert torch.equal(getattr(together.sampling, name), getattr(apart.sampling, name))
        assert np.array_equal(together._lengths_host, apart._lengths_host)
        assert together.sampling._count_row_of == apart.sampling._count_row_of
        assert torch.equal(together.sampling._recent, apart.sampling._recent)
        assert together.sampling.counts is not None and apart.sampling.counts is not None
        for slot in together.sampling._count_row_of.values():
            assert torch.equal(together.sampling.counts[slot], apart.sampling.counts[slot])
        # From this step on, the forks diverge.
        for tables in (together, apart):
            tables.sampling.note(tables.sampling.metadata(rows, lengths), torch.tensor([1, 2, step, 4]))


def test_a_setup_is_uploaded_once_for_all_of_its_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All forks share one upload of history, bias, stop tokens, allowed tokens and bad words. When a new
    sequence is set up in one fork's slot, the other forks stay unchanged."""
    sent: list[list[float]] = []

    def noted(array: np.ndarray, device: torch.device) -> torch.Tensor:
        sent.append(array.ravel().tolist())
        return upload(array, device)

    monkeypatch.setattr(sampling_tables, "upload", noted)
    lists = {"logit_bias": {4: 1.5, 9: -2.0}, "min_tokens": 2, "stop_token_ids": (7, 8)}
    lists |= {"allowed_tokens": bytes([0, 3]), "bad_words": ((6, 5), (4,))}
    params = SamplingParams(max_tokens=9, frequency_penalty=0.5, **lists)
    tables, lengths = SlotTables(8, 2, VOCAB, CPU).sampling, np.full(8, 3)
    tables.set_up([SlotSetup(4, params, 0, 3, [3, 5, 3], [(1, 1), (6, 2)])])
    allowed, prefixes = [0, 3, 0, 0, 0, 0, 0], [*[-1] * 30, 6, *[-1] * 31]
    once = [[4, 9], [1.5, -2.0], [7, 8], [3, 5, 3], allowed, prefixes, [5, 4]]
    assert sorted(map(sent.count, once)) == [1] * 7
    # The four other uploads are two for the scalars of all slots, one for the bad words, and one for the
    # recent tokens of the slots with bad words.
    assert len(sent) == len(once) + 4
    tables.set_up([SlotSetup(1, PARAMS[0], 0, 3, [])])
    processors = tables.metadata([4, 1, 6], lengths).processors
    assert processors is not None and processors.bias is not None and processors.banned is not None
    assert [part.tolist() for part in processors.bias] == [[0, 0, 1, 1], [4, 9, 4, 9], [1.5, -2.0, 1.5, -2.0]]
    assert [part.tolist() for part in processors.banned] == [[0, 0, 1, 1], [7, 8, 7, 8]]
    assert processors.index.tolist() == [0, 2]
    bad_words, excluded = processors.bad_words, processors.excluded
    assert excluded is not None and bad_words is not None and processors.remembered is not None
    assert [row.logical_not().nonzero().flatten().tolist() for row in excluded] == [[8, 9]] * 2
    assert bad_words.targets.tolist() == [5, 4, VOCAB + 5, VOCAB + 4]
    assert [part.tolist() for part in processors.remembered] == [[0, 2], [4, 6]]


def test_forks_sample_from_one_row_of_logits() -> None:
    tables = SlotTables(4, 2, VOCAB, CPU)
    setups = [SlotSetup(n, PARAMS[1], n, 3, []) for n in range(4)]
    chunks = [Chunk(0, 0, [1, 2, 3], [0, 2, 3]), Chunk(1, 0, [5], [1])]
    plan = StepPlan(1, setups, [(0, 0, 1), (1, 0, 2)], [], [], chunks)
    tables.apply(plan)
    batch = tables.step_batch(plan)
    assert batch.logits_indices is None
    assert batch.forward.logits_attention is not None and batch.forward.logits_attention.queries is not None
    assert batch.forward.logits_attention.queries.tolist() == [2, 3]
    assert batch.sampling.logit_rows is not None and batch.sampling.logit_rows.tolist() == [0, 0, 0, 1]
    assert batch.sampling.slots.tolist() == [0, 2, 3, 1]
    assert batch.sampling.positions.tolist() == [3, 3, 3, 1]


def test_sampling_metadata_is_cached_while_slots_and_parameters_stay_the_same() -> None:
    """The metadata changes only with the set of slots, with new setups, and when stop tokens become
    allowed."""
    tables = SlotTables(4, 2, VOCAB, CPU)
    tables.apply(plan_of([SlotSetup(n, PARAMS[p], n, 3, []) for n, p in enumerate((0, 1, 2, 5))]))
    lengths = np.array([9, 9, 9, 3])
    first = tables.sampling.metadata([0, 1, 3], lengths)
    assert tables.sampling.metadata([0, 1, 3], lengths + 1) is first
    assert first.processors is not None and first.processors.index.tolist() == [2]
    free = tables.sampling.metadata([0, 1, 3], lengths + 2)
    assert free.processors is None and free.variant == Variant.PLAIN
    assert tables.sampling.metadata([0, 1, 3], lengths + 9) is free
    assert tables.sampling.metadata([0, 1, 2], lengths).variant == Variant.FULL
    tables.apply(plan_of([SlotSetup(1, PARAMS[0], 1, 3, [])]))
    assert tables.sampling.metadata([0, 1], lengths).variant == Variant.GREEDY


def test_top_k_is_stored_as_zero_if_it_is_off() -> None:
    """In the kernels, a top-k of zero means off. Values that cannot restrict anything, because they are at
    least the vocabulary size, are also stored as zero."""
    tables = SlotTables(4, 2, VOCAB, CPU)
    ks = [0, 7, VOCAB, -1]
    setups = [SlotSetup(n, SamplingParams(max_tokens=1, top_k=k), 0, 1, []) for n, k in enumerate(ks)]
    tables.apply(plan_of(setups))
    assert tables.sampling.top_k.tolist() == [0, 7, 0, 0]


@pytest.mark.parametrize("stops", [(7,), (7, 7, 999, -1)])
def test_the_last_of_duplicate_block_entries_wins_and_ids_outside_the_vocabulary_are_dropped(
    stops: tuple[int, ...],
) -> None:
    tables = SlotTables(1, 2, VOCAB, CPU)
    bias = {3: 1.0, VOCAB: 5.0, -1: 5.0}
    params = SamplingParams(max_tokens=1, logit_bias=bias, min_tokens=1, stop_token_ids=stops)
    plan = StepPlan(
        1, [SlotSetup(0, params, 0, 1, [])], [(0, 0, 5), (0, 0, 9)], [], [], [Chunk(0, 0, [1], [0])]
    )
    tables.apply(plan)
    processors = tables.step_batch(plan).sampling.metadata.processors
    assert tables.block_table[0, 0] == 9
    assert processors is not None and processors.bias is not None and processors.banned is not None
    assert processors.bias[1].tolist() == [3]
    assert processors.banned[1].tolist() == [7]
