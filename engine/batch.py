"""The device tables of one rank, and what a step reads of them: a `StepPlan` in, a `StepBatch` out.

A running sequence owns one row. What the device advances by itself (lengths, last tokens, penalty counts)
lives there; lengths have a mirror on the host that follows from the plans alone, so that shapes are known
without asking the device. Equal plans in equal order give equal tables: nothing here depends on time or rank.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.forward import ForwardInput
from engine.messages import BLOCK_TOKENS, RowSetup, SamplingParams, StepPlan
from kernels import AttentionInput, ChunkSpan, sampling

GREEDY, PLAIN, FULL = 0, 1, 2
"""What a row's sampling needs: the largest logit; noise at a temperature; changes of the distribution."""

TEMPERATURE, NOISE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE = range(7)
"""Columns of `RowTables.floats`: 1 / temperature (greedy: 1), noise factor (greedy: 0, else 1), and so on."""


Rows = torch.Tensor | slice
"""Some rows, as indices [rows] int64, or `slice(None)`: all of them, for which nothing need be copied."""


@dataclass(slots=True)
class PromptSlice:
    """Prompt tokens whose log probabilities are wanted."""

    row: int
    first: int
    """Index of the first of its logit rows."""
    targets: torch.Tensor
    """[count] int64: the tokens that follow."""
    top: int


@dataclass(slots=True)
class Group:
    """Sampling rows of one kind."""

    index: Rows
    """Into the step's sampling rows."""
    rows: torch.Tensor
    """[rows] int64: rows of the tables."""


@dataclass(slots=True)
class FullGroup(Group):
    """Rows whose distribution is changed before a token is drawn. All indices are into the group."""

    penalised: Rows | None = None
    slots: torch.Tensor | None = None
    """[penalised] int64 into the penalty counts."""
    bias: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None
    """Row, token id, value of each biased token."""
    suppressed: tuple[torch.Tensor, torch.Tensor] | None = None
    """Row, token id of each stop token that `min_tokens` forbids now."""
    top_k: Rows | None = None
    largest_k: int = 0
    top_p: Rows | None = None
    min_p: Rows | None = None


@dataclass(slots=True)
class Partition:
    """The sampling rows of a step by what they need, and those that want log probabilities."""

    greedy: Group | None = None
    plain: Group | None = None
    full: FullGroup | None = None
    slotted: tuple[torch.Tensor, torch.Tensor] | None = None
    """Index into the sampling rows, and slot, of the rows with penalty counts: to be counted afterwards."""
    logprob_index: torch.Tensor | None = None
    logprob_rows: list[tuple[int, int]] = field(default_factory=list)
    """(index into the sampling rows, k) for each of `logprob_index`."""

    @property
    def all_greedy(self) -> bool:
        """Whether every row takes its best token and nothing else is wanted."""
        return self.plain is None and self.full is None and self.logprob_index is None


@dataclass(slots=True)
class StepBatch:
    """One step, ready for the device."""

    forward: ForwardInput | None
    """None where a graph ran it."""
    rows: torch.Tensor
    """[sampling rows] int64: rows of the tables, in the plan's order."""
    logit_rows: torch.Tensor | None
    """[sampling rows] int64: which logit row each samples from; None: the same, one for each."""
    positions: torch.Tensor
    """[sampling rows] int64: where the sampled tokens will stand in their sequences."""
    sampled_logits: int
    """The first logit rows, for sampling; those after them belong to `prompts`."""
    partition: Partition
    prompts: list[PromptSlice]


class RowTables:
    """The rows of one rank.

    max_rows: sequences at once. max_blocks_per_row: blocks of the longest sequence. vocab_size: of the whole
    model, not of the rank's shard. Memory: 8 bytes × rows × blocks, and, while a row has penalties (until the
    row's next setup), 4 bytes × vocabulary for each such row, rounded up to a power of two.
    """

    def __init__(self, max_rows: int, max_blocks_per_row: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.padding_row = max_rows
        """A row that nobody owns, for batches that are padded: it has no tokens and stays so."""
        every = max_rows + 1
        self.vocab_size = vocab_size
        self.device = device
        self._blocks_host = np.zeros((every, max_blocks_per_row), dtype=np.int64)
        on_host = torch.from_numpy(self._blocks_host)
        self._shared = device.type == "cpu"
        self.block_table = on_host if self._shared else on_host.to(device)
        """[rows, blocks] int64. Entries past a sequence's end are old or 0: valid blocks, never read."""
        self.lengths = torch.zeros(every, dtype=torch.int64, device=device)
        """[rows] int64: tokens in the cache, which is the position of the next one. Advanced by `advance`."""
        self.last_tokens = torch.zeros(every, dtype=torch.int64, device=device)
        """[rows] int64: sampled last, fed next."""
        self.noise_base = torch.zeros(every, dtype=torch.int64, device=device)
        self.floats = torch.zeros((every, 7), dtype=torch.float32, device=device)
        self.top_k = torch.zeros(every, dtype=torch.int64, device=device)
        self.counts: torch.Tensor | None = None
        """[slots, vocabulary] int32: 2 × (times in the output) + (1 if in the prompt); None if not needed."""
        self._slot_of_row: dict[int, int] = {}
        self._lengths_host = np.zeros(max_rows, dtype=np.int64)
        self._kind = np.zeros(max_rows, dtype=np.int8)
        self._suppress_until = np.zeros(max_rows, dtype=np.int64)
        """Position from which on stop tokens may be chosen; 0 where they always may."""
        self._logprobs = np.full(max_rows, -1, dtype=np.int64)
        self._params: dict[int, SamplingParams] = {}
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stops: dict[int, torch.Tensor] = {}
        self._epoch = 0
        self._iota = torch.arange(max_rows, dtype=torch.int64, device=device)
        self._rows_cache: tuple[list[int], torch.Tensor] = ([], self._upload(np.zeros(0, dtype=np.int64)))
        self._partition_cache: tuple[int, list[int], Partition] | None = None

    # ── the plan's changes ───────────────────────────────────────────────────────────────────────

    def apply(self, plan: StepPlan) -> None:
        """Stage the plan's setups and new block table entries. Copies of blocks are the runner's."""
        if plan.setups:
            self._set_up({setup.row: setup for setup in plan.setups})
        if plan.blocks:
            # A dict, since the order of equal indices in a device write is undefined: the last entry counts.
            entries = {(row, index): block for row, index, block in plan.blocks}
            rows, indices = np.array(list(entries), dtype=np.int64).T
            blocks = np.fromiter(entries.values(), dtype=np.int64, count=len(entries))
            self._blocks_host[rows, indices] = blocks
            if not self._shared:
                staged = self._upload(np.stack((rows, indices, blocks)))
                self.block_table[staged[0], staged[1]] = staged[2]

    def _set_up(self, setups: dict[int, RowSetup]) -> None:
        self._epoch += 1
        floats = np.empty((len(setups), self.floats.shape[1]), dtype=np.float32)
        integers = np.empty((3, len(setups)), dtype=np.int64)
        for i, (row, setup) in enumerate(setups.items()):
            params = setup.sampling
            greedy = params.temperature < sampling.GREEDY_BELOW
            top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
            floats[i] = (
                1.0 if greedy else 1.0 / params.temperature,
                0.0 if greedy else 1.0,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            integers[:, i] = (row, sampling.noise_base(params.seed, setup.sample), max(top_k, 1))
            self._params[row] = params
            self._lengths_host[row] = 0
            self._logprobs[row] = -1 if params.logprobs is None else params.logprobs
            self._set_up_lists(row, setup)
            narrowed = not greedy and (top_k > 0 or params.top_p < 1 or params.min_p > 0)
            changed = narrowed or row in self._bias or _penalised(params)
            self._kind[row] = FULL if changed else GREEDY if greedy else PLAIN
        self._set_up_counts(setups)
        staged, rates = self._upload(integers), self._upload(floats)
        self.noise_base[staged[0]] = staged[1]
        self.top_k[staged[0]] = staged[2]
        self.floats[staged[0]] = rates

    def _set_up_lists(self, row: int, setup: RowSetup) -> None:
        """The row's token lists. Ids outside the vocabulary cannot be chosen anyway: they are left out."""
        params = setup.sampling
        self._bias.pop(row, None)
        self._stops.pop(row, None)
        bias = {token: x for token, x in (params.logit_bias or {}).items() if 0 <= token < self.vocab_size}
        if bias:
            self._bias[row] = (
                self._upload(np.fromiter(bias, dtype=np.int64, count=len(bias))),
                self._upload(np.fromiter(bias.values(), dtype=np.float32, count=len(bias))),
            )
        stops = sorted({token for token in params.stop_token_ids if 0 <= token < self.vocab_size})
        self._suppress_until[row] = 0
        if params.min_tokens > 0 and stops and not params.ignore_eos:
            self._stops[row] = self._upload(np.array(stops, dtype=np.int64))
            self._suppress_until[row] = setup.prompt_tokens + params.min_tokens

    def _set_up_counts(self, setups: dict[int, RowSetup]) -> None:
        for row in setups:
            self._slot_of_row.pop(row, None)
        wanting = [row for row, setup in setups.items() if _penalised(setup.sampling)]
        if not wanting and not self._slot_of_row:
            self.counts = None
        for row in wanting:
            slot = self._take_slot(row)
            assert self.counts is not None
            history = self._upload(np.array(setups[row].history, dtype=np.int64))
            prompt, output = history.split(_split(len(history), setups[row].prompt_tokens))
            counts = self.counts[slot].zero_()
            counts[prompt] = 1
            counts.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))

    def _take_slot(self, row: int) -> int:
        used = set(self._slot_of_row.values())
        slot = next(slot for slot in range(self.max_rows) if slot not in used)
        self._slot_of_row[row] = slot
        held = 0 if self.counts is None else self.counts.shape[0]
        if slot >= held:
            grown = min(max(2 * held, slot + 1), self.max_rows)
            counts = torch.empty((grown, self.vocab_size), dtype=torch.int32, device=self.device)
            if self.counts is not None:
                counts[:held] = self.counts
            self.counts = counts
        return slot

    # ── a step's input ───────────────────────────────────────────────────────────────────────────

    def step_batch(self, plan: StepPlan) -> StepBatch:
        """The pass and the sampling that `plan` asks for, after `apply(plan)`; the host's lengths advance."""
        decodes = len(plan.decodes)
        self._lengths_host[plan.decodes] += 1
        for chunk in plan.chunks:
            self._lengths_host[chunk.sample_rows] = chunk.start + len(chunk.token_ids)
        rows = self._rows(plan.decodes)
        token_ids = self.last_tokens[rows]
        positions = self.lengths[rows]
        lengths = positions + 1
        most = -(-int(self._lengths_host[plan.decodes].max()) // BLOCK_TOKENS) if decodes else 0
        blocks = self.block_table[rows, positions // BLOCK_TOKENS]
        slots = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        forward = ForwardInput(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            attention=AttentionInput(self.block_table, rows, lengths, most, chunks=[]),
            logit_index=self._iota[:decodes],
        )
        sampling_rows, sampled = plan.decodes, decodes
        logit_rows: torch.Tensor | None = None
        prompts: list[PromptSlice] = []
        next_positions = lengths
        if plan.chunks:
            sampling_rows, logit_rows, prompts, sampled = self._add_chunks(forward, plan)
            next_positions = forward.positions[forward.logit_index[:sampled]] + 1
            if logit_rows is not None:
                next_positions = next_positions[logit_rows]
            rows = self._rows(sampling_rows)
        partition = self._partition(sampling_rows)
        return StepBatch(forward, rows, logit_rows, next_positions, sampled, partition, prompts)

    def decode_batch(self, plan: StepPlan, rows: torch.Tensor, positions: torch.Tensor) -> StepBatch:
        """As `step_batch`, of a plan without chunks whose pass a graph ran: `rows` and `positions` (where the
        sampled tokens will stand) are on the device already."""
        self._lengths_host[plan.decodes] += 1
        return StepBatch(None, rows, None, positions, len(plan.decodes), self._partition(plan.decodes), [])

    def _add_chunks(
        self, forward: ForwardInput, plan: StepPlan
    ) -> tuple[list[int], torch.Tensor | None, list[PromptSlice], int]:
        """Append the plan's chunks to the pass, in one transfer.

        Returns the sampling rows, the logit row of each (None: one each), the wanted prompt log probabilities
        and the number of logit rows for sampling.
        """
        decodes = len(plan.decodes)
        sampling_rows, logit_rows = list(plan.decodes), list(range(decodes))
        logit_index = list(range(decodes))
        prompt_index: list[int] = []
        first, columns = decodes, []
        for chunk in plan.chunks:
            count = len(chunk.token_ids)
            positions = np.arange(chunk.start, chunk.start + count, dtype=np.int64)
            blocks = self._blocks_host[chunk.row, positions // BLOCK_TOKENS]
            targets = np.append(np.array(chunk.token_ids[1:], dtype=np.int64), chunk.next_token or 0)
            tokens = np.array(chunk.token_ids, dtype=np.int64)
            columns.append(
                np.stack((tokens, positions, blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS, targets))
            )
            if chunk.sample_rows:
                sampling_rows.extend(chunk.sample_rows)
                logit_rows.extend([len(logit_index)] * len(chunk.sample_rows))
                logit_index.append(first + count - 1)
            forward.attention.chunks.append(ChunkSpan(first, count, chunk.start, chunk.row))
            first += count
        staged = self._upload(np.concatenate(columns, axis=1))
        sampled = len(logit_index)
        prompts: list[PromptSlice] = []
        for chunk, span in zip(plan.chunks, forward.attention.chunks, strict=True):
            if chunk.prompt_logprobs is None:
                continue
            wanted = span.count if chunk.next_token is not None else span.count - 1
            begin = span.first - decodes
            following = staged[3, begin : begin + wanted]
            prompts.append(
                PromptSlice(chunk.row, sampled + len(prompt_index), following, chunk.prompt_logprobs)
            )
            prompt_index.extend(range(span.first, span.first + wanted))
        forward.token_ids = torch.cat((forward.token_ids, staged[0]))
        forward.positions = torch.cat((forward.positions, staged[1]))
        forward.slots = torch.cat((forward.slots, staged[2]))
        forward.logit_index = self._upload(np.array(logit_index + prompt_index, dtype=np.int64))
        if len(logit_rows) == sampled:
            return sampling_rows, None, prompts, sampled
        shared = self._upload(np.array(logit_rows, dtype=np.int64))
        return sampling_rows, shared, prompts, sampled

    def advance(self, batch: StepBatch, token_ids: torch.Tensor) -> None:
        """The sample step's writes: `token_ids` [sampling rows] int64 become the rows' next input."""
        self.lengths[batch.rows] = batch.positions
        self.last_tokens[batch.rows] = token_ids
        if batch.partition.slotted is not None and self.counts is not None:
            index, slots = batch.partition.slotted
            # No slot is there twice, so this needs no atomic addition.
            self.counts[slots, token_ids[index]] += 2

    # ── who needs what ───────────────────────────────────────────────────────────────────────────

    def _partition(self, rows: list[int]) -> Partition:
        """Group the sampling rows by kind; kept while the same rows decode."""
        cached = self._partition_cache
        if cached is not None and cached[0] == self._epoch and cached[1] == rows:
            return cached[2]
        array = np.array(rows, dtype=np.int64)
        kinds = self._kind[array]
        # A row's length after the step is the position of the token that the step samples.
        suppressing = self._lengths_host[array] < self._suppress_until[array]
        kinds = np.where(suppressing, FULL, kinds)
        partition = Partition()
        for kind in (GREEDY, PLAIN, FULL):
            index = np.flatnonzero(kinds == kind)
            if len(index) == 0:
                continue
            group = array[index]
            where, on_device = self._index(kinds == kind), self._upload(group)
            if kind == GREEDY:
                partition.greedy = Group(where, on_device)
            elif kind == PLAIN:
                partition.plain = Group(where, on_device)
            else:
                partition.full = self._full_group(where, on_device, group.tolist(), suppressing[index])
        slotted = [(i, self._slot_of_row[row]) for i, row in enumerate(rows) if row in self._slot_of_row]
        if slotted:
            pairs = self._upload(np.array(slotted, dtype=np.int64).T.copy())
            partition.slotted = (pairs[0], pairs[1])
        wanting = np.flatnonzero(self._logprobs[array] >= 0)
        if len(wanting):
            partition.logprob_index = self._upload(wanting)
            tops = self._logprobs[array[wanting]]
            partition.logprob_rows = list(zip(wanting.tolist(), tops.tolist(), strict=True))
        if not suppressing.any():
            self._partition_cache = (self._epoch, list(rows), partition)
        return partition

    def _full_group(
        self, where: Rows, on_device: torch.Tensor, rows: list[int], suppressing: np.ndarray
    ) -> FullGroup:
        group = FullGroup(where, on_device)
        params = [self._params[row] for row in rows]
        slots = [self._slot_of_row[row] for row in rows if row in self._slot_of_row]
        if slots:
            group.penalised = self._index([row in self._slot_of_row for row in rows])
            group.slots = self._upload(np.array(slots, dtype=np.int64))
        biased = [(i, *self._bias[row]) for i, row in enumerate(rows) if row in self._bias]
        if biased:
            where_biased = torch.cat([torch.full_like(ids, i) for i, ids, _ in biased])
            ids, values = torch.cat([ids for _, ids, _ in biased]), torch.cat([x for _, _, x in biased])
            group.bias = (where_biased, ids, values)
        stopped = [(i, self._stops[row]) for i, row in enumerate(rows) if suppressing[i]]
        if stopped:
            where_stopped = torch.cat([torch.full_like(ids, i) for i, ids in stopped])
            group.suppressed = (where_stopped, torch.cat([ids for _, ids in stopped]))
        # Greedy rows pass through with neither: whatever is kept, the largest logit is.
        drawn = [p.temperature >= sampling.GREEDY_BELOW for p in params]
        top_k = [
            p.top_k if d and 0 < p.top_k < self.vocab_size else 0 for d, p in zip(drawn, params, strict=True)
        ]
        top_p = [d and p.top_p < 1 for d, p in zip(drawn, params, strict=True)]
        min_p = [d and p.min_p > 0 for d, p in zip(drawn, params, strict=True)]
        group.largest_k = max(top_k)
        group.top_k = self._index([k > 0 for k in top_k]) if any(top_k) else None
        group.top_p = self._index(top_p) if any(top_p) else None
        group.min_p = self._index(min_p) if any(min_p) else None
        return group

    # ── transfers ────────────────────────────────────────────────────────────────────────────────

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self._shared else tensor.pin_memory().to(self.device, non_blocking=True)

    def _index(self, chosen: list[bool] | np.ndarray) -> Rows:
        return slice(None) if all(chosen) else self._upload(np.flatnonzero(chosen))

    def _rows(self, rows: list[int]) -> torch.Tensor:
        """`rows` on the device; the transfer is saved while the same rows decode."""
        if self._rows_cache[0] != rows:
            self._rows_cache = (list(rows), self._upload(np.array(rows, dtype=np.int64)))
        return self._rows_cache[1]


def _penalised(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.frequency_penalty != 0.0 or params.presence_penalty != 0.0
    )


def _split(total: int, prompt_tokens: int) -> list[int]:
    prompt = min(total, prompt_tokens)
    return [prompt, total - prompt]
