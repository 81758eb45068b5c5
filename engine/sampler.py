"""Sampling: from logits to tokens, over one rank's part of the vocabulary, and log probabilities.

`kernels.draws` defines how a token is drawn from a row of logits. The sampling operations are passed in. With
tensor parallelism, greedy and plain rows exchange each rank's best (value, id), which gives exactly the
single-rank result. If a row needs top-k, top-p, min-p or logits processors, the step's logits are gathered
first.

The operations apply in this order: repetition penalty, frequency and presence penalties, logit bias, ban of
stop tokens before `min_tokens`, allowed tokens, bad words, temperature, top-k, top-p, min-p. Hugging Face and
vLLM also apply penalties before the temperature, and top-p to the renormalised result of top-k. Min-p last is
Hugging Face's order; vLLM applies it before top-k, which differs only if top-p would then renormalise over
fewer tokens. The bias follows the penalties, so that −100 bans a token and +100 forces it whatever the
penalties are. The ban comes after the bias, so that no bias lifts it. Tokens that tie with the last one kept
by top-k, top-p or min-p are kept too.

Log probabilities are those of the model's own distribution, before all of these operations.

A row whose largest logit is not finite (it contains NaN, it overflowed, or every token is banned) yields
token id −1 (`BAD_TOKEN`), and its sequence must end with an error. Other rows are not affected.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.device_tables import SamplingBatch, SlotTables
from engine.parallel import Ranks
from engine.plan import LOWEST_LOGPROB
from kernels import sampling
from kernels.draws import Draws, Logits, SamplingOps, Variant

LOGPROB_ROWS = 128
"""Number of rows whose log probabilities are computed at once: a whole chunk or batch could take
gigabytes."""


@dataclass(slots=True)
class SampledStep:
    """The result of sampling, on the device."""

    token_ids: torch.Tensor
    """The sampled tokens: [sampling slots] int64; BAD_TOKEN if no token could be sampled."""
    logprobs: torch.Tensor | None
    """Log probabilities: [slots with logprobs, 1 + 2k] float64, as `Sampler.token_logprobs` returns them."""


class Sampler:
    """Samples from one rank's part of the vocabulary.

    first_vocab: token id of the first column of this rank's logits. vocab: number of columns, padding
    included, equal on every rank. vocab_real: number of columns without padding. vocab_size: number of tokens
    of the model. Logits are `[rows, vocab]` in float32 or a 16-bit dtype; values in the padding are ignored.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        ops: SamplingOps,
        *,
        vocab_size: int,
        first_vocab: int = 0,
        vocab: int | None = None,
        vocab_real: int | None = None,
    ) -> None:
        self._ranks = ranks
        self._ops = ops
        self._vocab_size = vocab_size
        self._first = first_vocab
        self._vocab = vocab_size if vocab is None else vocab
        self._real = self._vocab if vocab_real is None else vocab_real
        self._hashes = sampling.token_hashes(0, vocab_size, device)
        """Hashes of all token ids, for the sampling noise."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, tables: SlotTables) -> SampledStep:
        """Sample a token for each sampling slot, and write it into `tables` as the slot's next input.

        logits: the step's logit rows on this rank, possibly followed by other rows. They are not modified.
        """
        if batch.logit_rows is None:
            logits = logits[: len(batch.slots)]
        variant, processors = batch.metadata.variant, batch.metadata.processors
        draws = tables.sampling.draws(batch.slots, batch.positions)
        source, whole = self._source(logits, variant, whole=processors is not None)
        source = replace(source, index=batch.logit_rows)
        if processors is not None:
            index, count_rows, counts = processors.index, processors.count_rows, tables.sampling.counts
            edited = self._ops.edit(
                source, draws, index, counts, count_rows, processors.bias, processors.banned
            )
            tables.sampling.restrict_(edited, processors)
            source = replace(source, edited=edited, edited_index=processors.index_of)
        token_ids = self._best(variant, source, draws, whole)
        tables.advance(batch, token_ids)
        return SampledStep(token_ids, self.logprobs(logits, batch, token_ids))

    def draw(self, logits: torch.Tensor, variant: Variant, draws: Draws) -> torch.Tensor:
        """Sample token ids [rows] int64 without logits processors, one logit row each, and do nothing else. A
        CUDA graph can capture this if the sampling operations allow it."""
        source, whole = self._source(logits, variant, whole=False)
        return self._best(variant, source, draws, whole)

    def logprobs(
        self, logits: torch.Tensor, batch: SamplingBatch, token_ids: torch.Tensor
    ) -> torch.Tensor | None:
        """Return `SampledStep.logprobs` for the sampled `token_ids`, [sampling slots] int64."""
        index = batch.metadata.logprob_index
        if index is None:
            return None
        top = max(k for _, k in batch.metadata.logprob_rows)
        rows = index if batch.logit_rows is None else batch.logit_rows[index]
        chosen = token_ids[index].clamp(min=0)
        parts = zip(rows.split(LOGPROB_ROWS), chosen.split(LOGPROB_ROWS), strict=True)
        return torch.cat([self.token_logprobs(logits[some], ids, top) for some, ids in parts])

    def token_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
        """Return log probabilities of `token_ids` [rows] int64 and of the `top` most likely tokens.

        logits: [rows, columns of this rank], whose padding may be overwritten. Returns [rows, 1 + 2k]
        float64: the log probability of the row's token, the k highest in descending order, and their token
        ids. k is `top`, or the size of the vocabulary if that is smaller.
        """
        logits = logits.float()
        logits[:, self._real :] = -torch.inf
        sums = logits.logsumexp(dim=1, keepdim=True)
        columns = (token_ids - self._first).unsqueeze(1)
        mine = (columns >= 0) & (columns < self._real)
        chosen = logits.gather(1, columns.clamp(0, self._vocab - 1)).masked_fill_(~mine, -torch.inf)
        values, ids = logits.topk(min(top, self._vocab), dim=1)
        if self._ranks.size > 1:
            ids = ids + self._first
            words = torch.cat((sums, chosen, values, ids.int().view(torch.float32)), dim=1)
            stack = self._ranks.all_gather_stack(words)
            sums, chosen = stack[:, :, :1].double().logsumexp(dim=0), stack[:, :, 1:2].amax(dim=0)
            k = values.shape[1]
            merged = stack[:, :, 2 : 2 + k].movedim(0, 1).flatten(1)
            merged_ids = stack[:, :, 2 + k :].contiguous().view(torch.int32).movedim(0, 1).flatten(1)
            values, at = merged.topk(min(top, self._vocab_size), dim=1)
            ids = merged_ids.gather(1, at)
        logprobs = torch.cat((chosen, values), dim=1).double() - sums.double()
        logprobs = logprobs.nan_to_num(LOWEST_LOGPROB, LOWEST_LOGPROB, LOWEST_LOGPROB)
        return torch.cat((logprobs.clamp(LOWEST_LOGPROB, 0.0), ids.double()), dim=1)

    def _source(self, logits: torch.Tensor, variant: Variant, whole: bool) -> tuple[Logits, bool]:
        """Return the logits to sample from, and whether they cover the whole vocabulary. With `whole`, they
        always do."""
        if self._ranks.size == 1:
            return Logits(logits, self._vocab_size, hashes=self._hashes), True
        if whole or variant == Variant.FULL:
            # The padding of all ranks is at the end, so the first `vocab_size` columns are the vocabulary.
            logits = self._ranks.all_gather_last_dim(logits)
            return Logits(logits, self._vocab_size, hashes=self._hashes), True
        mine = self._hashes[self._first : self._first + self._real]
        return Logits(logits, self._real, self._first, mine), False

    def _best(self, variant: Variant, source: Logits, draws: Draws, whole: bool) -> torch.Tensor:
        if not whole and not self._real:
            # The vocabulary is so small that all columns of this rank are padding.
            rows = len(source.values if source.index is None else source.index)
            values = torch.full((rows,), -torch.inf, device=source.values.device)
            ids = torch.full((rows,), self._first, dtype=torch.int64, device=values.device)
        elif variant == Variant.GREEDY:
            values, ids = self._ops.greedy(source)
        elif variant == Variant.PLAIN:
            values, ids = self._ops.plain(source, draws)
        else:
            values, ids = self._ops.full(source, draws)
        # Token ids ascend with the rank, so the lowest id wins among equal values.
        return ids if whole else self._ranks.best(values, ids)
