"""Stores each slot's sampling parameters on the device and determines on the host how a step samples. The
device itself updates only the penalty counts and the recent tokens compared with bad words.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np
import torch

from engine.messages import MAX_BAD_WORD_TOKENS
from engine.plan import SlotSetup
from engine.transfer import upload
from kernels import sampling
from kernels.draws import Bans, Biases, Draws, Variant

_PREFIX = MAX_BAD_WORD_TOKENS - 1
"""Number of recent output tokens per sequence that are compared with bad words."""
_ANY, _NONE = -1, -2
"""Placeholder token ids. _ANY pads short bad words and matches every token; _NONE pads short outputs and
matches none."""


@dataclass(slots=True)
class BadWords:
    """The bad words of several sampling slots, with one entry for each (slot, bad word) pair."""

    slots: torch.Tensor
    """Each entry's sequence slot: [entries] int64."""
    prefixes: torch.Tensor
    """All but the last token of each bad word, right-aligned and padded with _ANY: [entries,
    MAX_BAD_WORD_TOKENS - 1] int32."""
    targets: torch.Tensor
    """Index of each bad word's last token in the flattened logits of the processed slots: [entries] int64."""


@dataclass(slots=True)
class LogitsProcessors:
    """The modifications applied to the logits before sampling: penalties, biases, allowed tokens, bad words,
    and suppression of stop tokens before `min_tokens`.

    "Processed" slots are those whose logits are modified.
    """

    index: torch.Tensor
    """For each processed slot, its index in the list of sampling slots: [processed] int64."""
    index_of: torch.Tensor
    """For each sampling slot, its index in the list of processed slots, or -1 if it is not processed:
    [sampling slots] int64."""
    count_rows: torch.Tensor | None
    """For each processed slot, its row in the penalty counts, or -1 if it has no penalties: [processed]
    int64. None if no slot has penalties."""
    bias: Biases | None
    banned: Bans | None
    counted: tuple[torch.Tensor, torch.Tensor] | None
    """For slots with penalties: their indices in the list of sampling slots, and their rows in the penalty
    counts."""
    excluded: torch.Tensor | None
    """Tokens that each processed slot may not sample: [processed, vocabulary] bool. None if no slot restricts
    its tokens."""
    bad_words: BadWords | None
    remembered: tuple[torch.Tensor, torch.Tensor] | None
    """Slots whose requests have bad words: their indices in the list of sampling slots, and their slot
    numbers. Tokens sampled for them are stored as recent tokens."""


@dataclass(slots=True)
class SamplingMetadata:
    """Determines how a step samples: the kernel variant, the logits processors and the log probabilities."""

    variant: Variant
    """The cheapest sampling variant that supports every sampling slot."""
    processors: LogitsProcessors | None = None
    logprob_index: torch.Tensor | None = None
    """Slots that return log probabilities, as indices into the list of sampling slots."""
    logprob_rows: list[tuple[int, int]] = field(default_factory=list)
    """For each entry of `logprob_index`: (index in the list of sampling slots, requested number of
    alternatives)."""


@dataclass(slots=True)
class _CachedMetadata:
    """Cached metadata for a list of slots, valid until the next setup or until a slot reaches its
    `min_tokens`."""

    epoch: int
    slots: list[int]
    array: np.ndarray
    banned: np.ndarray
    metadata: SamplingMetadata


class SamplingTables:
    """Sampling parameters of `max_num_seqs` slots. `vocab_size` is the whole model's vocabulary size.

    Penalty counts take 4 bytes per vocabulary entry for each slot with penalties. The number of count rows is
    rounded up to a power of two. A count row stays in use until its slot is set up again. Allowed tokens take
    1 byte per vocabulary entry for each submission that restricts its tokens. In a step with such
    submissions, each processed slot needs another byte per vocabulary entry.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device) -> None:
        self.max_num_seqs = max_num_seqs
        self.vocab_size = vocab_size
        self.device = device
        self.noise_base = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.floats = torch.zeros((max_num_seqs, 7), dtype=torch.float32, device=device)
        self.top_k = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self.counts: torch.Tensor | None = None
        """Penalty counts: [count rows, vocabulary] int32. A count is 2 × (occurrences in the output) + (1 if
        the token occurs in the prompt). The tensor is None if no slot has penalties."""
        self._count_row_of: dict[int, int] = {}
        self._free_count_rows = list(range(max_num_seqs))
        """A heap, because using the lowest rows first keeps the tensor of counts small."""
        self._bias: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._stops: dict[int, torch.Tensor] = {}
        self._excluded: dict[int, torch.Tensor] = {}
        """Tokens that each slot may not sample: [vocabulary] bool per slot."""
        self._bad_words: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Each slot's bad words: their prefixes [words, MAX_BAD_WORD_TOKENS - 1] and their last tokens
        [words]."""
        self._recent = torch.full((max_num_seqs, _PREFIX), _NONE, dtype=torch.int32, device=device)
        """The latest output tokens of slots with bad words. The device updates them, because the host may
        launch a step before reading the previous step's tokens."""
        self._variant = np.zeros(max_num_seqs, dtype=np.int8)
        self._processed = np.zeros(max_num_seqs, dtype=bool)
        """Whether each slot has penalties, biases, allowed tokens or bad words."""
        self._stop_from = np.zeros(max_num_seqs, dtype=np.int64)
        """For each slot, the first position at which stop tokens may be sampled, or 0 if they are never
        suppressed."""
        self._logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        self._epoch = 0
        self._cached: _CachedMetadata | None = None

    def draws(self, slots: torch.Tensor, positions: torch.Tensor) -> Draws:
        """Return the sampling parameters of `slots` for the kernels. `slots` and `positions` (of the sampled
        tokens) are [sampling slots] int64."""
        return Draws(slots, positions, self.noise_base, self.floats, self.top_k)

    # ── setups ───────────────────────────────────────────────────────────────────────────────────

    def set_up(self, setups: list[SlotSetup]) -> None:
        """Store the sampling parameters for slots assigned to new sequences."""
        self._epoch += 1
        floats: list[tuple[float, ...]] = []
        integers: list[tuple[int, int, int]] = []
        for setup in setups:
            self._set_up_lists(setup)
            params, slots = setup.sampling, [slot for slot, _ in setup.members]
            greedy = params.temperature < sampling.GREEDY_BELOW
            top_k = params.top_k if 0 < params.top_k < self.vocab_size else 0
            rates = (
                1.0 if greedy else 1.0 / params.temperature,
                0.0 if greedy else 1.0,
                params.top_p,
                params.min_p,
                params.repetition_penalty,
                params.frequency_penalty,
                params.presence_penalty,
            )
            floats.extend([rates] * len(slots))
            integers.extend(
                (slot, sampling.noise_base(params.seed, sample), top_k) for slot, sample in setup.members
            )
            self._logprobs[slots] = -1 if params.logprobs is None else params.logprobs
            listed = any(setup.slot in lists for lists in (self._bias, self._excluded, self._bad_words))
            self._processed[slots] = listed or params.penalised
            # Top-k, top-p and min-p always keep the largest logit, so they do not affect greedy sampling.
            filtered = top_k > 0 or params.top_p < 1 or params.min_p > 0
            self._variant[slots] = Variant.GREEDY if greedy else Variant.FULL if filtered else Variant.PLAIN
        self._set_up_counts(setups)
        self._set_up_recent(setups)
        staged = upload(np.array(integers, dtype=np.int64).T.copy(), self.device)
        self.noise_base[staged[0]] = staged[1]
        self.top_k[staged[0]] = staged[2]
        self.floats[staged[0]] = upload(np.array(floats, dtype=np.float32), self.device)

    def _set_up_lists(self, setup: SlotSetup) -> None:
        """Store a setup's biases, stop tokens, allowed tokens and bad words. All of its slots share the same
        read-only tensors. Ids outside the vocabulary cannot be sampled and are dropped.
        """
        params, slots = setup.sampling, [slot for slot, _ in setup.members]
        for slot in slots:
            for lists in (self._bias, self._stops, self._excluded, self._bad_words):
                lists.pop(slot, None)
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
        if params.allowed_tokens:
            self._excluded.update(dict.fromkeys(slots, self._exclusion(params.allowed_tokens)))
        words = [word for word in params.bad_words if word and max(word) < self.vocab_size and min(word) >= 0]
        if words:
            prefixes = np.full((len(words), _PREFIX), _ANY, dtype=np.int32)
            for i, word in enumerate(words):
                prefixes[i, _PREFIX + 1 - len(word) :] = word[:-1]
            last = np.fromiter((word[-1] for word in words), dtype=np.int64, count=len(words))
            uploaded = (upload(prefixes, self.device), upload(last, self.device))
            self._bad_words.update(dict.fromkeys(slots, uploaded))

    def _set_up_counts(self, setups: list[SlotSetup]) -> None:
        for setup in setups:
            for slot, _ in setup.members:
                if slot in self._count_row_of:
                    heapq.heappush(self._free_count_rows, self._count_row_of.pop(slot))
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

    def _set_up_recent(self, setups: list[SlotSetup]) -> None:
        members = [
            (slot, setup.recent) for setup in setups for slot, _ in setup.members if slot in self._bad_words
        ]
        if not members:
            return
        recent = np.full((len(members), _PREFIX), _NONE, dtype=np.int32)
        for i, (_, tokens) in enumerate(members):
            if tokens:
                recent[i, -len(tokens) :] = tokens
        slots = upload(np.array([slot for slot, _ in members], dtype=np.int64), self.device)
        self._recent[slots] = upload(recent, self.device)

    def _take_count_row(self, slot: int) -> int:
        row = self._count_row_of[slot] = heapq.heappop(self._free_count_rows)
        held = 0 if self.counts is None else self.counts.shape[0]
        if row >= held:
            grown = min(max(2 * held, row + 1), self.max_num_seqs)
            counts = torch.empty((grown, self.vocab_size), dtype=torch.int32, device=self.device)
            if self.counts is not None:
                counts[:held] = self.counts
            self.counts = counts
        return row

    # ── sampling a step ──────────────────────────────────────────────────────────────────────────

    def metadata(self, slots: list[int], lengths: np.ndarray) -> SamplingMetadata:
        """Return a step's sampling metadata for `slots`, which is cached for as long as it is valid.
        `lengths` is the position of each slot's next sampled token: [all slots] int64, on the host.
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
        """Return a step's logits processors. `processed` contains indices into `slots`. `stops_banned`
        contains, for each entry of `slots`, whether stop tokens are suppressed."""
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
        bad_words, remembered = self._words(processed, owners)
        return LogitsProcessors(
            index=upload(processed, self.device),
            index_of=upload(index_of, self.device),
            count_rows=None if counted is None else upload(count_rows, self.device),
            bias=bias,
            banned=banned,
            counted=counted,
            excluded=self._exclusions(owners),
            bad_words=bad_words,
            remembered=remembered,
        )

    def _exclusion(self, allowed_tokens: bytes) -> torch.Tensor:
        """Return a mask of the tokens whose bits are not set in `allowed_tokens`: `[vocabulary]` bool."""
        size = -(-self.vocab_size // 8)
        packed = np.zeros(size, dtype=np.uint8)
        given = np.frombuffer(allowed_tokens, dtype=np.uint8)[:size]
        packed[: len(given)] = given
        shifts = torch.arange(8, dtype=torch.uint8, device=self.device)
        bits = (upload(packed, self.device).unsqueeze(1) >> shifts) & 1
        return bits.flatten()[: self.vocab_size] == 0

    def _exclusions(self, owners: list[int]) -> torch.Tensor | None:
        """Return the mask of tokens that the processed slots `owners` may not sample
        (`LogitsProcessors.excluded`)."""
        if not any(slot in self._excluded for slot in owners):
            return None
        nothing = torch.zeros(self.vocab_size, dtype=torch.bool, device=self.device)
        return torch.stack([self._excluded.get(slot, nothing) for slot in owners])

    def _words(
        self, processed: np.ndarray, owners: list[int]
    ) -> tuple[BadWords | None, tuple[torch.Tensor, torch.Tensor] | None]:
        """Return the bad words of the processed slots `owners`, and the slots that have bad words
        (`LogitsProcessors.bad_words` and `LogitsProcessors.remembered`)."""
        found = [
            (i, slot, *self._bad_words[slot]) for i, slot in enumerate(owners) if slot in self._bad_words
        ]
        if not found:
            return None, None
        words = BadWords(
            slots=torch.cat([torch.full_like(last, slot) for _, slot, _, last in found]),
            prefixes=torch.cat([prefixes for _, _, prefixes, _ in found]),
            targets=torch.cat([last + i * self.vocab_size for i, _, _, last in found]),
        )
        index = upload(processed[[i for i, _, _, _ in found]], self.device)
        return words, (
            index,
            upload(np.array([slot for _, slot, _, _ in found], dtype=np.int64), self.device),
        )

    def restrict_(self, logits: torch.Tensor, processors: LogitsProcessors) -> None:
        """Set to -inf, in place, the logits of tokens that are not allowed or would complete a bad word.
        `logits` is [processed, vocabulary] float32."""
        if processors.excluded is not None:
            logits.masked_fill_(processors.excluded, -torch.inf)
        words = processors.bad_words
        if words is not None:
            recent = self._recent[words.slots]
            complete = ((recent == words.prefixes) | (words.prefixes == _ANY)).all(dim=1)
            # Several bad words may ban the same token. Taking the minimum makes the result independent of the
            # write order.
            limits = torch.where(complete, -torch.inf, torch.inf)
            logits.view(-1).scatter_reduce_(0, words.targets, limits, "amin")

    def note(self, metadata: SamplingMetadata, token_ids: torch.Tensor) -> None:
        """Store the sampled tokens ([sampling slots] int64) of slots with penalties or bad words, because
        they affect those slots' next tokens."""
        processors = metadata.processors
        if processors is None:
            return
        if processors.counted is not None and self.counts is not None:
            index, count_rows = processors.counted
            # Each count row occurs only once, so no atomic addition is needed.
            self.counts[count_rows, token_ids[index]] += 2
        if processors.remembered is not None:
            index, slots = processors.remembered
            sampled = token_ids[index].unsqueeze(1).int()
            self._recent[slots] = torch.cat((self._recent[slots, 1:], sampled), dim=1)
