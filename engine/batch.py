"""The device tables of one rank, and what a step reads of them: a `StepPlan` in, a `StepBatch` out.

A running sequence owns one row. What the device advances by itself (lengths, last tokens, penalty counts)
lives there; lengths have a mirror on the host that follows from the plans alone, so that shapes are known
without asking the device. Equal plans in equal order give equal tables: nothing here depends on time or rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.forward import ForwardInput
from engine.messages import BLOCK_TOKENS, Chunk, StepPlan
from engine.sampling_tables import Needs, SamplingTables
from engine.sizing import size_for
from engine.transfer import upload
from kernels import AttentionInput, ChunkSpan


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
class SamplingBatch:
    """The rows of a step that sample, in the plan's order."""

    rows: torch.Tensor
    """[sampling rows] int64: rows of the tables."""
    positions: torch.Tensor
    """[sampling rows] int64: where the sampled tokens will stand in their sequences."""
    logit_rows: torch.Tensor | None
    """[sampling rows] int64: which logit row each samples from; None: the first ones, one each."""
    needs: Needs


@dataclass(slots=True)
class StepBatch:
    """One step, ready for the device."""

    forward: ForwardInput
    sampling: SamplingBatch
    logit_index: torch.Tensor | None
    """[logit rows] int64: rows of the pass's result whose logits are wanted; None: the first ones."""
    sampled_logits: int
    """Logit rows for sampling, which come first; those after them belong to `prompts`."""
    prompts: list[PromptSlice]


@dataclass(frozen=True, slots=True)
class Padding:
    """Numbers of rows, rising, to which passes with prompts are padded, since the kernels for them are loaded
    (`engine.warmup`)."""

    tokens: list[int]
    """The last: a step's tokens."""
    ends: list[int]
    """Likewise of what such a pass results in; the last: max_rows."""


class RowTables:
    """The rows of one rank.

    max_rows: sequences at once. max_blocks_per_row: blocks of the longest sequence. vocab_size: of the whole
    model, not of the rank's shard. padding: None: passes are not padded.
    Memory: 8 bytes × rows × blocks, and that of `SamplingTables`.
    """

    def __init__(
        self,
        max_rows: int,
        max_blocks_per_row: int,
        vocab_size: int,
        device: torch.device,
        padding: Padding | None = None,
    ) -> None:
        self.device = device
        self._padding = padding
        self.sampling = SamplingTables(max_rows, vocab_size, device)
        self._blocks_host = np.zeros((max_rows, max_blocks_per_row), dtype=np.int64)
        on_host = torch.from_numpy(self._blocks_host)
        self._shared = device.type == "cpu"
        self.block_table = on_host if self._shared else on_host.to(device)
        """[rows, blocks] int64. Entries past a sequence's end are old or 0: valid blocks, never read."""
        self.lengths = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """[rows] int64: tokens in the cache, which is the position of the next one. Advanced by `advance`."""
        self.last_tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        """[rows] int64: sampled last, fed next."""
        self._lengths_host = np.zeros(max_rows, dtype=np.int64)
        self._iota = torch.arange(max_rows, dtype=torch.int64, device=device)
        self._rows_cache: tuple[list[int], torch.Tensor] = ([], self._upload(np.zeros(0, dtype=np.int64)))

    # ── the plan's changes ───────────────────────────────────────────────────────────────────────

    def apply(self, plan: StepPlan) -> None:
        """Stage the plan's setups and new block table entries. Copies of blocks are `Steps`'."""
        if plan.setups:
            self._lengths_host[[row for setup in plan.setups for row, _ in setup.members]] = 0
            self.sampling.set_up(plan.setups)
        if plan.blocks:
            # A dict, since the order of equal indices in a device write is undefined: the last entry counts.
            entries = {(row, index): block for row, index, block in plan.blocks}
            rows, indices = np.array(list(entries), dtype=np.int64).T
            blocks = np.fromiter(entries.values(), dtype=np.int64, count=len(entries))
            self._blocks_host[rows, indices] = blocks
            if not self._shared:
                staged = self._upload(np.stack((rows, indices, blocks)))
                self.block_table[staged[0], staged[1]] = staged[2]

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
        )
        if not plan.chunks:
            sampling = SamplingBatch(rows, lengths, None, self._needs(plan.decodes))
            return StepBatch(forward, sampling, None, decodes, [])
        following = self._add_chunks(forward, plan)
        scored = any(chunk.prompt_logprobs is not None for chunk in plan.chunks)
        forward.ends = None if scored else self._ends(forward, plan)
        return self._with_results(forward, plan, following)

    def decode_batch(self, plan: StepPlan, rows: torch.Tensor, positions: torch.Tensor) -> SamplingBatch:
        """The sampling of a plan without chunks whose pass a graph ran: `rows` and `positions` (where the
        sampled tokens will stand) are on the device already."""
        self._lengths_host[plan.decodes] += 1
        return SamplingBatch(rows, positions, None, self._needs(plan.decodes))

    def prompt_batch(self, plan: StepPlan) -> SamplingBatch:
        """The sampling of a plan whose chunks all end their prompts and have one logit row each, and in which
        nobody decodes."""
        rows, positions, logit_rows = [], [], []
        for index, chunk in enumerate(plan.chunks):
            rows.extend(chunk.sample_rows)
            positions.extend([chunk.start + len(chunk.token_ids)] * len(chunk.sample_rows))
            logit_rows.extend([index] * len(chunk.sample_rows))
        self._lengths_host[rows] = positions
        shared = self._upload(np.array(logit_rows, dtype=np.int64)) if len(rows) > len(plan.chunks) else None
        where = self._upload(np.array(positions, dtype=np.int64))
        return SamplingBatch(self._rows(rows), where, shared, self._needs(rows))

    def chunk_inputs(self, chunk: Chunk) -> np.ndarray:
        """Token ids, positions and slots of a chunk: `[3, tokens]` int64, on the host."""
        positions = np.arange(chunk.start, chunk.start + len(chunk.token_ids), dtype=np.int64)
        blocks = self._blocks_host[chunk.row, positions // BLOCK_TOKENS]
        slots = blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS
        return np.stack((np.array(chunk.token_ids, dtype=np.int64), positions, slots))

    def _needs(self, rows: list[int]) -> Needs:
        # A row's length after the step is the position of the token that the step samples.
        return self.sampling.needs(rows, self._lengths_host)

    def _add_chunks(self, forward: ForwardInput, plan: StepPlan) -> torch.Tensor:
        """Append the plan's chunks to the pass, in one transfer, then padding. Returns the token after each
        of theirs: `[tokens of chunks and padding]` int64, 0 where the chunk ends its prompt."""
        first, columns = len(plan.decodes), []
        for chunk in plan.chunks:
            inputs = self.chunk_inputs(chunk)
            following = np.append(inputs[0, 1:], chunk.next_token or 0)
            columns.append(np.concatenate((inputs, following[np.newaxis])))
            count = len(chunk.token_ids)
            forward.attention.chunks.append(ChunkSpan(first, count, chunk.start, chunk.row))
            first += count
        if self._padding is not None:
            padding = np.zeros((4, size_for(first, self._padding.tokens) - first), dtype=np.int64)
            padding[2] = -1
            columns.append(padding)
        staged = self._upload(np.concatenate(columns, axis=1))
        forward.token_ids = torch.cat((forward.token_ids, staged[0]))
        forward.positions = torch.cat((forward.positions, staged[1]))
        forward.slots = torch.cat((forward.slots, staged[2]))
        return staged[3]

    def _ends(self, forward: ForwardInput, plan: StepPlan) -> AttentionInput:
        """The decodes' tokens and each chunk's last, as the last layer's attention sees them; then
        padding."""
        decodes = forward.attention
        ends = [(span.slot, span.end, span.last) for span in decodes.chunks]
        most = max(length for _, length, _ in ends)
        count = len(plan.decodes) + len(ends)
        padded = count if self._padding is None else size_for(count, self._padding.ends)
        ends += [(0, 0, 0)] * (padded - count)
        rows, lens, queries = self._upload(np.array(ends, dtype=np.int64).T.copy())
        return AttentionInput(
            decodes.block_table,
            torch.cat((decodes.slots, rows)),
            torch.cat((decodes.lens, lens)),
            max(decodes.columns, -(-most // BLOCK_TOKENS)),
            chunks=[],
            queries=torch.cat((self._iota[: len(plan.decodes)], queries)),
        )

    def _with_results(self, forward: ForwardInput, plan: StepPlan, following: torch.Tensor) -> StepBatch:
        """Which rows of the pass's result are wanted, and for what."""
        decodes, spans = len(plan.decodes), forward.attention.chunks
        rows, results = list(plan.decodes), list(range(decodes))
        positions: list[int] = []
        for chunk, span, end in zip(plan.chunks, spans, ends_of(forward), strict=True):
            rows.extend(chunk.sample_rows)
            results.extend([end] * len(chunk.sample_rows))
            positions.extend([span.end] * len(chunk.sample_rows))
        index, logit_rows, prompts = None, results, list[PromptSlice]()
        if forward.ends is None:
            wanted = list(dict.fromkeys(results))
            place = {row: at for at, row in enumerate(wanted)}
            logit_rows = [place[row] for row in results]
            sampled = len(wanted)
            for chunk, span in zip(plan.chunks, spans, strict=True):
                if chunk.prompt_logprobs is None:
                    continue
                count = span.count if chunk.next_token is not None else span.count - 1
                targets = following[span.first - decodes : span.first - decodes + count]
                prompts.append(PromptSlice(chunk.row, len(wanted), targets, chunk.prompt_logprobs))
                wanted.extend(range(span.first, span.first + count))
            index = self._upload(np.array(wanted, dtype=np.int64))
        else:
            # Padding too: kernels for that many rows are loaded. Where nobody samples, no logits are made.
            sampled = len(forward.ends.slots) if rows else 0
        where = torch.cat((forward.attention.lens, self._upload(np.array(positions, dtype=np.int64))))
        one_each = logit_rows == list(range(len(logit_rows)))
        shared = None if one_each else self._upload(np.array(logit_rows, dtype=np.int64))
        sampling = SamplingBatch(self._rows(rows), where, shared, self._needs(rows))
        return StepBatch(forward, sampling, index, sampled, prompts)

    def advance(self, batch: SamplingBatch, token_ids: torch.Tensor) -> None:
        """The sample step's writes: `token_ids` [sampling rows] int64 become the rows' next input. A bad row
        gets token 0: the step after is launched before anybody sees that the row has ended."""
        token_ids = token_ids.clamp(min=0)
        self.lengths[batch.rows] = batch.positions
        self.last_tokens[batch.rows] = token_ids
        self.sampling.note(batch.needs, token_ids)

    # ── transfers ────────────────────────────────────────────────────────────────────────────────

    def _upload(self, array: np.ndarray) -> torch.Tensor:
        return upload(array, self.device)

    def _rows(self, rows: list[int]) -> torch.Tensor:
        """`rows` on the device; the transfer is saved while the same rows decode."""
        if self._rows_cache[0] != rows:
            self._rows_cache = (list(rows), self._upload(np.array(rows, dtype=np.int64)))
        return self._rows_cache[1]


def ends_of(forward: ForwardInput) -> list[int]:
    """Of each chunk of a pass, the row of the pass's result that is its last token's."""
    decodes, spans = len(forward.attention.slots), forward.attention.chunks
    if forward.ends is not None:
        return list(range(decodes, decodes + len(spans)))
    return [span.last for span in spans]
