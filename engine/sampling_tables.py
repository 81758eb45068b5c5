"""What each row asks of sampling: its parameters on the device, and on the host what a step must know to
choose how to sample.

Penalty counts are the one thing here that the device advances by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.messages import SlotSetup
from engine.transfer import upload
from kernels import sampling
from kernels.draws import Bans, Biases, Draws, Variant


@dataclass(slots=True)
class Edits:
    """Sampling rows whose logits are changed before a token is drawn: penalised, biased, or not yet allowed
    to stop."""

    index: torch.Tensor
    """[edited rows] int64 into the sampling rows."""
    index_of: torch.Tensor
    """[sampling rows] int64: its place among the edited rows, or -1."""
    slots: torch.Tensor | None
    """[edited rows] int64 into the penalty counts, or -1; None where none is penalised."""
    bias: Biases | None
    banned: Bans | None
    counted: tuple[torch.Tensor, torch.Tensor] | None
    """Index into the sampling rows, and slot, of the rows whose token is to be counted."""


@dataclass(slots=True)
class Needs:
    """What the sampling rows of a step ask for."""

    variant: Variant
    """The cheapest that serves every row."""
    edits: Edits | None = None
    logprob_index: torch.Tensor | None = None
    """Into the sampling rows: those that want log probabilities."""
    logprob_rows: list[tuple[int, int]] = field(default_factory=list)
    """(index into the sampling rows, k) for each of `logprob_index`."""


@dataclass(slots=True)
class _Asked:
    """The answer for some rows, kept while they ask the same."""

    epoch: int
    rows: list[int]
    array: np.ndarray
    waiting: np.ndarray
    needs: Needs


class SamplingTables:
    """Sampling parameters of `max_rows` rows over a vocabulary of `vocab_size` tokens (of the whole model).

    Memory: while a row has penalties (until the row's next setup), 4 bytes × vocabulary for each such row,
    rounded up to a power of two.
    """

    def __init__(self, max_rows: int, vocab_size: int, device: torch.device) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self.device = device
        self.noise_base = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.floats = torch.zeros((max_rows, 7), dtype=torch.float32, device=device)
        self.top_k = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self.counts: torch.Tensor | None = None
        """[slots, vocabulary] int32: 2 × (times in the output) + (1 if in the prompt); None if not needed."""
        self._slot_of_row: dict[int, int] = {}
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stops: dict[int, torch.Tensor] = {}
        self._variant = np.zeros(max_rows, dtype=np.int8)
        self._edited = np.zeros(max_rows, dtype=bool)
        """Whether the row is penalised or biased."""
        self._stop_from = np.zeros(max_rows, dtype=np.int64)
        """Position from which on stop tokens may be chosen; 0 where they always may."""
        self._logprobs = np.full(max_rows, -1, dtype=np.int64)
        self._epoch = 0
        self._asked: _Asked | None = None

    def draws(self, rows: torch.Tensor, positions: torch.Tensor) -> Draws:
        """`rows` sample tokens for `positions`, each [sampling rows] int64 on the device."""
        return Draws(rows, positions, self.noise_base, self.floats, self.top_k)

    # ── setups ───────────────────────────────────────────────────────────────────────────────────

    def set_up(self, setups: list[SlotSetup]) -> None:
        """New owners of rows."""
        self._epoch += 1
        owners = [(row, sample, setup) for setup in setups for row, sample in setup.members]
        floats = np.empty((len(owners), self.floats.shape[1]), dtype=np.float32)
        integers = np.empty((3, len(owners)), dtype=np.int64)
        for setup in setups:
            self._set_up_lists(setup)
        for i, (row, sample, setup) in enumerate(owners):
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
            integers[:, i] = (row, sampling.noise_base(params.seed, sample), top_k)
            self._logprobs[row] = -1 if params.logprobs is None else params.logprobs
            self._edited[row] = row in self._bias or params.penalised
            # Whatever is kept, the largest logit is: a greedy row stays greedy.
            narrowed = top_k > 0 or params.top_p < 1 or params.min_p > 0
            self._variant[row] = Variant.GREEDY if greedy else Variant.FULL if narrowed else Variant.PLAIN
        self._set_up_counts(setups)
        staged, rates = upload(integers, self.device), upload(floats, self.device)
        self.noise_base[staged[0]] = staged[1]
        self.top_k[staged[0]] = staged[2]
        self.floats[staged[0]] = rates

    def _set_up_lists(self, setup: SlotSetup) -> None:
        """The token lists of the setup's rows: all read the same tensors, and nobody writes them. Ids outside
        the vocabulary cannot be chosen anyway: they are left out."""
        params, rows = setup.sampling, [row for row, _ in setup.members]
        for row in rows:
            self._bias.pop(row, None)
            self._stops.pop(row, None)
        self._stop_from[rows] = 0
        bias = {token: x for token, x in (params.logit_bias or {}).items() if 0 <= token < self.vocab_size}
        if bias:
            ids = upload(np.fromiter(bias, dtype=np.int64, count=len(bias)), self.device)
            added = upload(np.fromiter(bias.values(), dtype=np.float32, count=len(bias)), self.device)
            self._bias.update(dict.fromkeys(rows, (ids, added)))
        stops = sorted({token for token in params.stop_token_ids if 0 <= token < self.vocab_size})
        if params.min_tokens > 0 and stops and not params.ignore_eos:
            banned = upload(np.array(stops, dtype=np.int64), self.device)
            self._stops.update(dict.fromkeys(rows, banned))
            self._stop_from[rows] = setup.prompt_tokens + params.min_tokens

    def _set_up_counts(self, setups: list[SlotSetup]) -> None:
        for setup in setups:
            for row, _ in setup.members:
                self._slot_of_row.pop(row, None)
        wanting = [setup for setup in setups if setup.sampling.penalised]
        if not wanting and not self._slot_of_row:
            self.counts = None
        for setup in wanting:
            first, *others = [self._take_slot(row) for row, _ in setup.members]
            assert self.counts is not None
            history = upload(np.array(setup.history, dtype=np.int64), self.device)
            prompt_tokens = min(len(history), setup.prompt_tokens)
            counts = self.counts[first].zero_()
            counts[history[:prompt_tokens]] = 1
            output = history[prompt_tokens:]
            counts.index_add_(0, output, torch.full_like(output, 2, dtype=torch.int32))
            for slot in others:
                self.counts[slot].copy_(counts)

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

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def needs(self, rows: list[int], lengths: np.ndarray) -> Needs:
        """What `rows` ask for now. lengths: [table rows] int64 on the host: where each row's next sampled
        token will stand. The answer is kept while the same rows ask the same."""
        asked = self._asked
        same = asked is not None and asked.epoch == self._epoch and asked.rows == rows
        array = asked.array if asked is not None and same else np.array(rows, dtype=np.int64)
        waiting = lengths[array] < self._stop_from[array]
        if asked is not None and same and np.array_equal(asked.waiting, waiting):
            return asked.needs
        needs = Needs(Variant(int(self._variant[array].max(initial=Variant.GREEDY))))
        edited = np.flatnonzero(self._edited[array] | waiting)
        if len(edited):
            needs.edits = self._edits(edited, array, waiting)
        wanting = np.flatnonzero(self._logprobs[array] >= 0)
        if len(wanting):
            needs.logprob_index = upload(wanting, self.device)
            tops = self._logprobs[array[wanting]]
            needs.logprob_rows = list(zip(wanting.tolist(), tops.tolist(), strict=True))
        self._asked = _Asked(self._epoch, list(rows), array, waiting, needs)
        return needs

    def _edits(self, edited: np.ndarray, rows: np.ndarray, waiting: np.ndarray) -> Edits:
        index_of = np.full(len(rows), -1, dtype=np.int64)
        index_of[edited] = np.arange(len(edited))
        owners = rows[edited].tolist()
        slots = np.array([self._slot_of_row.get(row, -1) for row in owners], dtype=np.int64)
        counted = None
        if (slots >= 0).any():
            penalised = slots >= 0
            counted = (upload(edited[penalised], self.device), upload(slots[penalised], self.device))
        biased = [(i, *self._bias[row]) for i, row in enumerate(owners) if row in self._bias]
        bias = None
        if biased:
            places = torch.cat([torch.full_like(ids, i) for i, ids, _ in biased])
            bias = (places, torch.cat([ids for _, ids, _ in biased]), torch.cat([x for _, _, x in biased]))
        stopped = [(i, self._stops[rows[at]]) for i, at in enumerate(edited.tolist()) if waiting[at]]
        banned = None
        if stopped:
            places = torch.cat([torch.full_like(ids, i) for i, ids in stopped])
            banned = (places, torch.cat([ids for _, ids in stopped]))
        return Edits(
            index=upload(edited, self.device),
            index_of=upload(index_of, self.device),
            slots=None if counted is None else upload(slots, self.device),
            bias=bias,
            banned=banned,
            counted=counted,
        )

    def count(self, needs: Needs, token_ids: torch.Tensor) -> None:
        """Count the sampled tokens, [sampling rows] int64, of the rows that are penalised."""
        if needs.edits is not None and needs.edits.counted is not None and self.counts is not None:
            index, slots = needs.edits.counted
            # No slot is there twice, so this needs no atomic addition.
            self.counts[slots, token_ids[index]] += 2
