"""One rank's device tables, which turn a `StepPlan` into a step's device input (`StepBatch`).

Each running sequence owns one slot of the tables. The tables hold the values that the device itself updates:
sequence lengths, last tokens and penalty counts. The host also derives the sequence lengths from the plans,
so it knows all tensor shapes without reading from the device. The tables depend only on the plans and their
order, not on time or rank, so equal plans produce equal tables on all ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.forward import ForwardInput
from engine.messages import BLOCK_TOKENS
from engine.plan import Chunk, StepPlan
from engine.sampling_tables import SamplingMetadata, SamplingTables
from engine.sizing import size_for
from engine.transfer import upload
from kernels import AttentionInput, ChunkSpan


@dataclass(slots=True)
class PromptSlice:
    """A range of prompt tokens whose log probabilities are requested."""

    slot: int
    first: int
    """Index of the slice's first logit row."""
    targets: torch.Tensor
    """The prompt token that follows each token in the slice: [count] int64."""
    top: int


@dataclass(slots=True)
class SamplingBatch:
    """The sequence slots that sample a token in a step, in plan order."""

    slots: torch.Tensor
    """The sampling slots, in plan order: [sampling slots] int64."""
    positions: torch.Tensor
    """Position of each sampled token in its sequence: [sampling slots] int64."""
    logit_rows: torch.Tensor | None
    """The logit row that each slot samples from: [sampling slots] int64. None means that slot i samples from
    row i."""
    metadata: SamplingMetadata


@dataclass(slots=True)
class StepBatch:
    """A step's input on the device."""

    forward: ForwardInput
    sampling: SamplingBatch
    logits_indices: torch.Tensor | None
    """Rows of the forward pass's result for which logits are computed: [logit rows] int64. None selects the
    first rows."""
    sampled_logits: int
    """Number of logit rows used for sampling. The remaining rows belong to `prompts`."""
    prompts: list[PromptSlice]


@dataclass(frozen=True, slots=True)
class Padding:
    """Sizes to which forward passes with prompts are padded. The kernels for these sizes are loaded at
    startup (`engine.warmup`)."""

    tokens: list[int]
    """Padded token counts, in ascending order. The last one is a step's token budget."""
    results: list[int]
    """Padded row counts of a forward pass's result, in ascending order. The last one is the number of
    slots."""


class SlotTables:
    """One rank's device tables, with one slot per running sequence. `max_num_seqs` is the number of slots,
    and `max_blocks_per_slot` the number of KV blocks in the longest sequence. `vocab_size` is the size of the
    full vocabulary, not just of the rank's share. `padding` is None if forward passes are not padded. The
    tables use 8 bytes for each block of each slot, in addition to the memory of `SamplingTables`.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks_per_slot: int,
        vocab_size: int,
        device: torch.device,
        padding: Padding | None = None,
    ) -> None:
        self.device = device
        self._padding = padding
        self.sampling = SamplingTables(max_num_seqs, vocab_size, device)
        # `np.full` touches every page now, which avoids page faults in later steps.
        self._blocks_host = np.full((max_num_seqs, max_blocks_per_slot), 0, dtype=np.int64)
        on_host = torch.from_numpy(self._blocks_host)
        self._shared = device.type == "cpu"
        self.block_table = on_host if self._shared else on_host.to(device)
        """Each slot's block table: [slots, blocks] int64. Entries past the end of a sequence are stale or 0:
        valid block ids that are never read."""
        self.lengths = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """Each slot's number of cached tokens, which is the next position to compute: [slots] int64. Updated
        by `advance`."""
        self.last_tokens = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        """Each slot's last sampled token, which is its next input: [slots] int64."""
        self._lengths_host = np.zeros(max_num_seqs, dtype=np.int64)
        self._iota = torch.arange(max_num_seqs, dtype=torch.int64, device=device)
        self._slots_cache: tuple[list[int], torch.Tensor] = ([], self._upload(np.zeros(0, dtype=np.int64)))

    # ── applying a plan ──────────────────────────────────────────────────────────────────────────

    def apply(self, plan: StepPlan) -> None:
        """Apply the plan's setups and block table entries. `StepExecutor` copies and clears the blocks."""
        if plan.setups:
            self._lengths_host[[slot for setup in plan.setups for slot, _ in setup.members]] = 0
            self.sampling.set_up(plan.setups)
        if plan.blocks:
            # If a block table entry occurs several times in the plan, the last value must win. The device
            # writes duplicate indices in no defined order, so all duplicates are sent with the last value.
            changes = np.array(plan.blocks, dtype=np.int64).T.copy()
            slots, indices, blocks = changes
            self._blocks_host[slots, indices] = blocks
            if not self._shared:
                changes[2] = self._blocks_host[slots, indices]
                staged = self._upload(changes)
                self.block_table[staged[0], staged[1]] = staged[2]
        for source, count, slots in plan.shares:
            self._blocks_host[slots, :count] = self._blocks_host[source, :count]
            if not self._shared:
                targets = self._upload(np.array(slots, dtype=np.int64))
                self.block_table[targets, :count] = self.block_table[source, :count]

    # ── the input of a step ──────────────────────────────────────────────────────────────────────

    def step_batch(self, plan: StepPlan) -> StepBatch:
        """Return the step's input and advance the host's copy of the sequence lengths. Call `apply(plan)`
        first."""
        decodes = len(plan.decodes)
        self._lengths_host[plan.decodes] += 1
        for chunk in plan.chunks:
            self._lengths_host[chunk.sample_slots] = chunk.start + len(chunk.token_ids)
        slots = self._slots(plan.decodes)
        token_ids = self.last_tokens[slots]
        positions = self.lengths[slots]
        lengths = positions + 1
        columns = -(-int(self._lengths_host[plan.decodes].max()) // BLOCK_TOKENS) if decodes else 0
        blocks = self.block_table[slots, positions // BLOCK_TOKENS]
        forward = ForwardInput(
            token_ids=token_ids,
            positions=positions,
            kv_slots=blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS,
            attention=AttentionInput(self.block_table, slots, lengths, columns, chunks=[]),
        )
        if not plan.chunks:
            sampling = SamplingBatch(slots, lengths, None, self._metadata(plan.decodes))
            return StepBatch(forward, sampling, None, decodes, [])
        following = self._add_chunks(forward, plan)
        if all(chunk.prompt_logprobs is None for chunk in plan.chunks):
            forward.logits_attention = self._logits_attention(forward, plan)
        return self._with_results(forward, plan, following)

    def decode_batch(self, plan: StepPlan, slots: torch.Tensor, positions: torch.Tensor) -> SamplingBatch:
        """Return the sampling input for a decode-only plan whose forward pass was replayed from a CUDA graph.
        `slots` and the sampled tokens' `positions` are device tensors.
        """
        self._lengths_host[plan.decodes] += 1
        return SamplingBatch(slots, positions, None, self._metadata(plan.decodes))

    def prompt_batch(self, plan: StepPlan) -> SamplingBatch:
        """Return the sampling input for a plan without decodes, in which every prefill chunk completes its
        prompt."""
        slots, positions, logit_rows = [], [], []
        for index, chunk in enumerate(plan.chunks):
            slots.extend(chunk.sample_slots)
            positions.extend([chunk.start + len(chunk.token_ids)] * len(chunk.sample_slots))
            logit_rows.extend([index] * len(chunk.sample_slots))
        self._lengths_host[slots] = positions
        shared = self._upload(np.array(logit_rows, dtype=np.int64)) if len(slots) > len(plan.chunks) else None
        on_device = self._upload(np.array(positions, dtype=np.int64))
        return SamplingBatch(self._slots(slots), on_device, shared, self._metadata(slots))

    def chunk_inputs(self, chunk: Chunk) -> np.ndarray:
        """Return a prefill chunk's token ids, positions and KV slot indices: `[3, tokens]` int64, on the
        host."""
        positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.int64)
        blocks = self._blocks_host[chunk.slot, positions // BLOCK_TOKENS]
        kv_slots = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        return np.stack((np.array(chunk.token_ids, dtype=np.int64), positions, kv_slots))

    def _metadata(self, slots: list[int]) -> SamplingMetadata:
        # A slot's length after the step is the position of the token that the step samples.
        return self.sampling.metadata(slots, self._lengths_host)

    def _add_chunks(self, forward: ForwardInput, plan: StepPlan) -> torch.Tensor:
        """Append the plan's prefill chunks and the padding to the forward pass's input, in one transfer.

        Returns the prompt token that follows each appended token, or 0 if there is none: `[chunk and padding
        tokens]` int64.
        """
        first, columns = len(plan.decodes), []
        for chunk in plan.chunks:
            inputs = self.chunk_inputs(chunk)
            following = np.append(inputs[0, 1:], chunk.next_token or 0)
            columns.append(np.concatenate((inputs, following[np.newaxis])))
            count = len(chunk.token_ids)
            forward.attention.chunks.append(ChunkSpan(first, count, chunk.start, chunk.slot))
            first += count
        if self._padding is not None:
            padding = np.zeros((4, size_for(first, self._padding.tokens) - first), dtype=np.int64)
            padding[2] = -1
            columns.append(padding)
        staged = self._upload(np.concatenate(columns, axis=1))
        forward.token_ids = torch.cat((forward.token_ids, staged[0]))
        forward.positions = torch.cat((forward.positions, staged[1]))
        forward.kv_slots = torch.cat((forward.kv_slots, staged[2]))
        return staged[3]

    def _logits_attention(self, forward: ForwardInput, plan: StepPlan) -> AttentionInput:
        """Return the last layer's attention input, as described in `ForwardInput.logits_attention`: the
        decodes' tokens, each chunk's last token, and padding."""
        decodes = forward.attention
        last = [(span.slot, span.end, span.last) for span in decodes.chunks]
        longest = max(length for _, length, _ in last)
        count = len(plan.decodes) + len(last)
        padded = count if self._padding is None else size_for(count, self._padding.results)
        last += [(0, 0, 0)] * (padded - count)
        slots, lens, queries = self._upload(np.array(last, dtype=np.int64).T.copy())
        return AttentionInput(
            decodes.block_table,
            torch.cat((decodes.slots, slots)),
            torch.cat((decodes.lens, lens)),
            max(decodes.columns, -(-longest // BLOCK_TOKENS)),
            chunks=[],
            queries=torch.cat((self._iota[: len(plan.decodes)], queries)),
        )

    def _with_results(self, forward: ForwardInput, plan: StepPlan, following: torch.Tensor) -> StepBatch:
        """Return the batch for a step with prompts, including the result rows needed for sampling and prompt
        logprobs."""
        decodes, spans = len(plan.decodes), forward.attention.chunks
        slots, results = list(plan.decodes), list(range(decodes))
        positions: list[int] = []
        for chunk, span, result in zip(plan.chunks, spans, chunk_results(forward), strict=True):
            slots.extend(chunk.sample_slots)
            results.extend([result] * len(chunk.sample_slots))
            positions.extend([span.end] * len(chunk.sample_slots))
        indices, logit_rows, prompts = None, results, list[PromptSlice]()
        if forward.logits_attention is None:
            wanted = list(dict.fromkeys(results))
            logit_row_of = {result: row for row, result in enumerate(wanted)}
            logit_rows = [logit_row_of[result] for result in results]
            sampled = len(wanted)
            for chunk, span in zip(plan.chunks, spans, strict=True):
                if chunk.prompt_logprobs is None:
                    continue
                count = span.count if chunk.next_token is not None else span.count - 1
                targets = following[span.first - decodes : span.first - decodes + count]
                prompts.append(PromptSlice(chunk.slot, len(wanted), targets, chunk.prompt_logprobs))
                wanted.extend(range(span.first, span.first + count))
            indices = self._upload(np.array(wanted, dtype=np.int64))
        else:
            # Padding rows get logits too, because kernels are loaded only for padded sizes. If no slot
            # samples, no logits are computed.
            sampled = len(forward.logits_attention.slots) if slots else 0
        on_device = torch.cat((forward.attention.lens, self._upload(np.array(positions, dtype=np.int64))))
        one_each = logit_rows == list(range(len(logit_rows)))
        shared = None if one_each else self._upload(np.array(logit_rows, dtype=np.int64))
        sampling = SamplingBatch(self._slots(slots), on_device, shared, self._metadata(slots))
        return StepBatch(forward, sampling, indices, sampled, prompts)

    def advance(self, batch: SamplingBatch, token_ids: torch.Tensor) -> None:
        """Store the sampled `token_ids` ([sampling slots] int64) as the next input of their slots. BAD_TOKEN
        is stored as token 0, because it is not a valid input and the next step is launched before the host
        detects the failure."""
        token_ids = token_ids.clamp(min=0)
        self.lengths[batch.slots] = batch.positions
        self.last_tokens[batch.slots] = token_ids
        self.sampling.note(batch.metadata, token_ids)

    # ── uploads ──────────────────────────────────────────────────────────────────────────────────

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self.device)

    def _slots(self, slots: list[int]) -> torch.Tensor:
        """Return `slots` as a device tensor. Nothing is transferred if the slots are unchanged since the
        previous call."""
        if self._slots_cache[0] != slots:
            self._slots_cache = (list(slots), self._upload(np.array(slots, dtype=np.int64)))
        return self._slots_cache[1]


def chunk_results(forward: ForwardInput) -> list[int]:
    """Return the index of the result row of each prefill chunk's last token."""
    decodes, spans = len(forward.attention.slots), forward.attention.chunks
    if forward.logits_attention is not None:
        return list(range(decodes, decodes + len(spans)))
    return [span.last for span in spans]
