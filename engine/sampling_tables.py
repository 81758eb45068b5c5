"""What each row asks of sampling: its parameters on the device, and on the host what a step must know to
choose how to sample.

Penalty counts are the one thing here that the device advances by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from engine.messages import MAX_BAD_WORD_TOKENS, RowSetup
from engine.transfer import upload
from kernels import sampling
from kernels.draws import Bans, Biases, Draws, Variant

_PREFIX = MAX_BAD_WORD_TOKENS - 1
"""Output tokens of a sequence that bad words are compared with."""
_ANY, _NONE = -1, -2
"""In place of token ids: before a shorter bad word's prefix, where every token matches; before the first
output token, where none does."""


@dataclass(slots=True)
class BadWords:
    """The bad words of some sampling rows, one entry each."""

    rows: torch.Tensor
    """[entries] int64: the table row."""
    prefixes: torch.Tensor
    """[entries, MAX_BAD_WORD_TOKENS - 1] int32: the tokens before the last, aligned right, _ANY before
    them."""
    places: torch.Tensor
    """[entries] int64 into the flattened edited logits: the last token."""


@dataclass(slots=True)
class Edits:
    """Sampling rows whose logits are changed before a token is drawn: penalised, biased, restricted to some
    tokens or against bad words, or not yet allowed to stop."""

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
    excluded: torch.Tensor | None
    """[edited rows, vocabulary] bool: tokens that are not among a row's allowed ones; None where no row is
    restricted."""
    bad_words: BadWords | None
    remembered: tuple[torch.Tensor, torch.Tensor] | None
    """Index into the sampling rows, and table row, of the rows whose token is to be remembered for bad
    words."""


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
    rounded up to a power of two; for each submission with allowed tokens 1 byte × vocabulary, and as much for
    each edited row of a step with such rows.
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
        self._excluded: dict[int, torch.Tensor] = {}
        """[vocabulary] bool: the tokens that a row may not sample."""
        self._bad_words: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Prefixes [words, MAX_BAD_WORD_TOKENS - 1] and last tokens [words] of a row's bad words."""
        self._recent = torch.full((max_rows, _PREFIX), _NONE, dtype=torch.int32, device=device)
        """The last output tokens of rows with bad words. The device advances them, so that a step that is
        launched before the last one's tokens are read compares the right ones."""
        self._variant = np.zeros(max_rows, dtype=np.int8)
        self._edited = np.zeros(max_rows, dtype=bool)
        """Whether the row is penalised, biased, restricted or has bad words."""
        self._stop_from = np.zeros(max_rows, dtype=np.int64)
        """Position from which on stop tokens may be chosen; 0 where they always may."""
        self._logprobs = np.full(max_rows, -1, dtype=np.int64)
        self._epoch = 0
        self._asked: _Asked | None = None

    def draws(self, rows: torch.Tensor, positions: torch.Tensor) -> Draws:
        """`rows` sample tokens for `positions`, each [sampling rows] int64 on the device."""
        return Draws(rows, positions, self.noise_base, self.floats, self.top_k)

    # ── setups ───────────────────────────────────────────────────────────────────────────────────

    def set_up(self, setups: list[RowSetup]) -> None:
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
            listed = row in self._bias or row in self._excluded or row in self._bad_words
            self._edited[row] = listed or params.penalised
            # Whatever is kept, the largest logit is: a greedy row stays greedy.
            narrowed = top_k > 0 or params.top_p < 1 or params.min_p > 0
            self._variant[row] = Variant.GREEDY if greedy else Variant.FULL if narrowed else Variant.PLAIN
        self._set_up_counts(setups)
        self._set_up_recent(setups)
        staged, rates = upload(integers, self.device), upload(floats, self.device)
        self.noise_base[staged[0]] = staged[1]
        self.top_k[staged[0]] = staged[2]
        self.floats[staged[0]] = rates

    def _set_up_lists(self, setup: RowSetup) -> None:
        """The token lists of the setup's rows: all read the same tensors, and nobody writes them. Ids outside
        the vocabulary cannot be chosen anyway: they are left out."""
        params, rows = setup.sampling, [row for row, _ in setup.members]
        for row in rows:
            for lists in (self._bias, self._stops, self._excluded, self._bad_words):
                lists.pop(row, None)
        self._stop_from[rows] = 0
        bias = {token: x for token, x in (params.logit_bias or {}).items() if 0 <= token < self.vocab_size}
        if bias:
            ids = upload(np.fromiter(bias, dtype=np.int64, count=len(bias)), self.device)
            added = upload(np.fromiter(bias.values(), dtype=np.float32, count=len(bias)), self.device)
            self._bias.update(dict.fromkeys(rows, (ids, added)))
        if params.allowed_tokens:
            self._excluded.update(dict.fromkeys(rows, self._exclusion(params.allowed_tokens)))
        words = [word for word in params.bad_words if word and max(word) < self.vocab_size and min(word) >= 0]
        if words:
            prefixes = np.full((len(words), _PREFIX), _ANY, dtype=np.int32)
            for i, word in enumerate(words):
                prefixes[i, _PREFIX + 1 - len(word) :] = word[:-1]
            last = np.fromiter((word[-1] for word in words), dtype=np.int64, count=len(words))
            uploaded = (upload(prefixes, self.device), upload(last, self.device))
            self._bad_words.update(dict.fromkeys(rows, uploaded))
        stops = sorted({token for token in params.stop_token_ids if 0 <= token < self.vocab_size})
        if params.min_tokens > 0 and stops and not params.ignore_eos:
            banned = upload(np.array(stops, dtype=np.int64), self.device)
            self._stops.update(dict.fromkeys(rows, banned))
            self._stop_from[rows] = setup.prompt_tokens + params.min_tokens

    def _set_up_counts(self, setups: list[RowSetup]) -> None:
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

    def _set_up_recent(self, setups: list[RowSetup]) -> None:
        wanting = [
            (row, setup.recent) for setup in setups for row, _ in setup.members if row in self._bad_words
        ]
        if not wanting:
            return
        recent = np.full((len(wanting), _PREFIX), _NONE, dtype=np.int32)
        for i, (_, tokens) in enumerate(wanting):
            if tokens:
                recent[i, -len(tokens) :] = tokens
        rows = upload(np.array([row for row, _ in wanting], dtype=np.int64), self.device)
        self._recent[rows] = upload(recent, self.device)

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
        bad_words, remembered = self._words(edited, owners)
        return Edits(
            index=upload(edited, self.device),
            index_of=upload(index_of, self.device),
            slots=None if counted is None else upload(slots, self.device),
            bias=bias,
            banned=banned,
            counted=counted,
            excluded=self._exclusions(owners),
            bad_words=bad_words,
            remembered=remembered,
        )

    def _exclusion(self, allowed_tokens: bytes) -> torch.Tensor:
        """[vocabulary] bool: the tokens whose bit in `allowed_tokens` is not set."""
        size = -(-self.vocab_size // 8)
        packed = np.zeros(size, dtype=np.uint8)
        given = np.frombuffer(allowed_tokens, dtype=np.uint8)[:size]
        packed[: len(given)] = given
        shifts = torch.arange(8, dtype=torch.uint8, device=self.device)
        bits = (upload(packed, self.device).unsqueeze(1) >> shifts) & 1
        return bits.flatten()[: self.vocab_size] == 0

    def _exclusions(self, owners: list[int]) -> torch.Tensor | None:
        """As `Edits.excluded`, for the edited rows `owners`."""
        if not any(row in self._excluded for row in owners):
            return None
        nothing = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        return torch.stack([self._excluded.get(row, nothing) for row in owners])

    def _words(
        self, edited: np.ndarray, owners: list[int]
    ) -> tuple[BadWords | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """As `Edits.bad_words` and `Edits.remembered`."""
        wanting = [(i, row, *self._bad_words[row]) for i, row in enumerate(owners) if row in self._bad_words]
        if not wanting:
            return None, None
        words = BadWords(
            rows=torch.cat([torch.full_like(last, row) for _, row, _, last in wanting]),
            prefixes=torch.cat([prefixes for _, _, prefixes, _ in wanting]),
            places=torch.cat([last + i * self.vocab_size for i, _, _, last in wanting]),
        )
        index = upload(edited[[i for i, _, _, _ in wanting]], self.device)
        return words, (
            index,
            upload(np.array([row for _, row, _, _ in wanting], dtype=np.int64), self.device),
        )

    def restrict_(self, edited: torch.Tensor, edits: Edits) -> None:
        """Exclude tokens that are not allowed, and those that would complete a bad word, from `edited`
        [edited rows, vocabulary] float32, in place."""
        if edits.excluded is not None:
            edited.masked_fill_(edits.excluded, -torch.inf)
        words = edits.bad_words
        if words is not None:
            recent = self._recent[words.rows]
            complete = ((recent == words.prefixes) | (words.prefixes == _ANY)).all(dim=1)
            # Entries may share a place: the least value counts, whichever is written last.
            limits = torch.where(complete, -torch.inf, torch.inf)
            edited.view(-1).scatter_reduce_(0, words.places, limits, "amin")

    def note(self, needs: Needs, token_ids: torch.Tensor) -> None:
        """Note the sampled tokens, [sampling rows] int64, of the rows whose next ones depend on them: those
        that are penalised, and those with bad words."""
        edits = needs.edits
        if edits is None:
            return
        if edits.counted is not None and self.counts is not None:
            index, slots = edits.counted
            # No slot is there twice, so this needs no atomic addition.
            self.counts[slots, token_ids[index]] += 2
        if edits.remembered is not None:
            index, rows = edits.remembered
            sampled = token_ids[index].unsqueeze(1).int()
            self._recent[rows] = torch.cat((self._recent[rows, 1:], sampled), dim=1)
