"""Sampling parameters of each slot, on the device, and on the host the metadata by which a step chooses how
to sample.

The device updates only the penalty counts by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.plan import SlotSetup
from engine.transfer import upload
from kernels import sampling
from kernels.draws import Bans, Biases, Draws, Variant


@dataclass(slots=True)
class LogitsProcessors:
    """Changes to logits before sampling: penalties, biases, and stop tokens banned before `min_tokens`.

    "Processed" are the sampling slots whose logits change.
    """

    index: torch.Tensor
    """[processed] int64: indices into the sampling slots."""
    index_of: torch.Tensor
    """[sampling slots] int64: each slot's index among the processed ones, or -1."""
    count_rows: torch.Tensor | None
    """[processed] int64: each slot's row of the penalty counts, or -1; None if no slot has penalties."""
    bias: Biases | None
    banned: Bans | None
    counted: tuple[torch.Tensor, torch.Tensor] | None
    """Slots with penalties: their indices into the sampling slots, and their rows of the penalty counts."""


@dataclass(slots=True)
class SamplingMetadata:
    """How a step samples."""

    variant: Variant
    """The cheapest variant that serves every sampling slot."""
    processors: LogitsProcessors | None = None
    logprob_index: torch.Tensor | None = None
    """Indices into the sampling slots: those that return log probabilities."""
    logprob_rows: list[tuple[int, int]] = field(default_factory=list)
    """(index into the sampling slots, k) for each entry of `logprob_index`."""


@dataclass(slots=True)
class _CachedMetadata:
    """The metadata of some slots, valid until a setup or until a slot reaches its `min_tokens`."""

    epoch: int
    slots: list[int]
    array: np.ndarray
    banned: np.ndarray
    metadata: SamplingMetadata


class SamplingTables:
    """Sampling parameters of `max_num_seqs` slots over a vocabulary of `vocab_size` tokens (of the whole
    model).

    Penalty counts take 4 bytes × vocabulary for each slot with penalties. Their number of rows is rounded up
    to a power of two. A row is in use until its slot's next setup.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = device
        self.noise_base = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.floats = torch.zeros((max_num_seqs, 7), dtype=torch.float32, device=device)
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.counts: torch.Tensor | None = None
        """Penalty counts, [count rows, vocabulary] int32: 2 × (occurrences in the output) + (1 if in the
        prompt). None if no slot has penalties."""
        self._count_row_of: dict[int, int] = {}
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stops: dict[int, torch.Tensor] = {}
        self._variant = np.zeros(max_num_seqs, dtype=np.int8)
        self._processed = np.zeros(max_num_seqs, dtype=bool)
        """Whether the slot has penalties or biases."""
        self._stop_from = np.zeros(max_num_seqs, dtype=np.int64)
        """First position at which stop tokens may be sampled; 0 if they are never banned."""
        self._logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._epoch = 0
        self._cached: _CachedMetadata | None = None

    def draws(self, slots: torch.Tensor, positions: torch.Tensor) -> Draws:
        """Return the kernels' view of `slots`, which sample tokens for `positions`; both [sampling slots]
        int64."""
        return Draws(slots, positions, self.noise_base, self.floats, self.top_k)

    # ── setups ───────────────────────────────────────────────────────────────────────────────────

    def set_up(self, setups: list[SlotSetup]) -> None:
        """Store the sampling parameters of slots that get new sequences."""
        self._epoch += 1
        members = [(slot, sample, setup) for setup in setups for slot, sample in setup.members]
        floats = np.empty((len(members), self.floats.shape[1]), dtype=np.float32)
        integers = np.empty((3, len(members)), dtype=np.int64)
        for setup in setups:
            self._set_up_lists(setup)
        for i, (slot, sample, setup) in enumerate(members):
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
            integers[:, i] = (slot, sampling.noise_base(params.seed, sample), top_k)
            self._logprobs[slot] = -1 if params.logprobs is None else params.logprobs
            self._processed[slot] = slot in self._bias or params.penalised
            # Top-k, top-p and min-p always keep the largest logit, so a greedy slot needs none of them.
            filtered = top_k > 0 or params.top_p < 1 or params.min_p > 0
            self._variant[slot] = Variant.GREEDY if greedy else Variant.FULL if filtered else Variant.PLAIN
        self._set_up_counts(setups)
        staged, rates = upload(integers, self.device), upload(floats, self.device)
        self.noise_base[staged[0]] = staged[1]
        self.top_k[staged[0]] = staged[2]
        self.floats[staged[0]] = rates

    def _set_up_lists(self, setup: SlotSetup) -> None:
        """Store the biases and stop tokens of a setup. Its slots share the tensors, which are never written.

        Ids outside the vocabulary cannot be sampled, so they are dropped.
        """
        params, slots = setup.sampling, [slot for slot, _ in setup.members]
        for slot in slots:
            self._bias.pop(slot, None)
            self._stops.pop(slot, None)
        self._stop_from[slots] = 0
        bias = {token: x for token, x in (params.logit_bias or {}).items() if 0 <= token < self.vocab_size}
        if bias:
            ids = upload(np.fromiter(bias, dtype=np.int64, count=len(bias)), self.device)
            added = upload(np.fromiter(bias.values(), dtype=np.float32, count=len(bias)), self.device)
            self._bias.update(dict.fromkeys(slots, (ids, added)))
        stops = sorted({token for token in params.stop_token_ids if 0 <= token < self.vocab_size})
        if params.min_tokens > 0 and stops and not params.ignore_eos:
            banned = upload(np.array(stops, dtype=np.int64), self.device)
            self._stops.update(dict.fromkeys(slots, banned))
            self._stop_from[slots] = setup.prompt_tokens + params.min_tokens

    def _set_up_counts(self, setups: list[SlotSetup]) -> None:
        for setup in setups:
            for slot, _ in setup.members:
                self._count_row_of.pop(slot, None)
        penalised = [setup for setup in setups if setup.sampling.penalised]
        if not penalised and not self._count_row_of:
            self.counts = None
        for setup in penalised:
            first, *others = [self._take_count_row(slot) for slot, _ in setup.members]
            assert self.counts is not None
            history = upload(np.array(setup.history, dtype=np.int64), self.device)
            prompt_tokens = min(len(history), setup.prompt_tokens)
            counts = self.counts[first].zero_()
            counts[history[:prompt_tokens]] = 1
            output = history[prompt_tokens:]
            counts.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
            for row in others:
                self.counts[row].copy_(counts)

    def _take_count_row(self, slot: int) -> int:
        used = set(self._count_row_of.values())
        row = next(row for row in range(self.max_num_seqs) if row not in used)
        self._count_row_of[slot] = row
        held = 0 if self.counts is None else self.counts.shape[0]
        if row >= held:
            grown = min(max(2 * held, row + 1), self.max_num_seqs)
            counts = torch.empty((grown, self.vocab_size), dtype=torch.int32, device=self.device)
            if self.counts is not None:
                counts[:held] = self.counts
            self.counts = counts
        return row

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def metadata(self, slots: list[int], lengths: np.ndarray) -> SamplingMetadata:
        """Return how a step samples for `slots`. The result is cached while it stays the same.

        lengths: [all slots] int64 on the host, the position of each slot's next sampled token.
        """
        cached = self._cached
        same = cached is not None and cached.epoch == self._epoch and cached.slots == slots
        array = cached.array if cached is not None and same else np.array(slots, dtype=np.int64)
        banned = lengths[array] < self._stop_from[array]
        if cached is not None and same and np.array_equal(cached.banned, banned):
            return cached.metadata
        metadata = SamplingMetadata(Variant(int(self._variant[array].max(initial=Variant.GREEDY))))
        processed = np.flatnonzero(self._processed[array] | banned)
        if len(processed):
            metadata.processors = self._processors(processed, array, banned)
        with_logprobs = np.flatnonzero(self._logprobs[array] >= 0)
        if len(with_logprobs):
            metadata.logprob_index = upload(with_logprobs, self.device)
            tops = self._logprobs[array[with_logprobs]]
            metadata.logprob_rows = list(zip(with_logprobs.tolist(), tops.tolist(), strict=True))
        self._cached = _CachedMetadata(self._epoch, list(slots), array, banned, metadata)
        return metadata

    def _processors(
        self, processed: np.ndarray, slots: np.ndarray, stops_banned: np.ndarray
    ) -> LogitsProcessors:
        """processed: indices into `slots`. stops_banned: for each of `slots`, whether stop tokens are
        banned."""
        index_of = np.full(len(slots), -1, dtype=np.int64)
        index_of[processed] = np.arange(len(processed))
        owners = slots[processed].tolist()
        count_rows = np.array([self._count_row_of.get(slot, -1) for slot in owners], dtype=np.int64)
        counted = None
        if (count_rows >= 0).any():
            penalised = count_rows >= 0
            counted = (upload(processed[penalised], self.device), upload(count_rows[penalised], self.device))
        biased = [(i, *self._bias[slot]) for i, slot in enumerate(owners) if slot in self._bias]
        bias = None
        if biased:
            places = torch.cat([torch.full_like(ids, i) for i, ids, _ in biased])
            bias = (places, torch.cat([ids for _, ids, _ in biased]), torch.cat([x for _, _, x in biased]))
        stops = [(i, self._stops[slots[at]]) for i, at in enumerate(processed.tolist()) if stops_banned[at]]
        banned = None
        if stops:
            places = torch.cat([torch.full_like(ids, i) for i, ids in stops])
            banned = (places, torch.cat([ids for _, ids in stops]))
        return LogitsProcessors(
            index=upload(processed, self.device),
            index_of=upload(index_of, self.device),
            count_rows=None if counted is None else upload(count_rows, self.device),
            bias=bias,
            banned=banned,
            counted=counted,
        )

    def count(self, metadata: SamplingMetadata, token_ids: torch.Tensor) -> None:
        """Add the sampled tokens, [sampling slots] int64, to the penalty counts."""
        processors = metadata.processors
        if processors is not None and processors.counted is not None and self.counts is not None:
            index, count_rows = processors.counted
            # Each row of the counts occurs once, so no atomic addition is needed.
            self.counts[count_rows, token_ids[index]] += 2
