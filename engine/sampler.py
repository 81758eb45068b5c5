"""Samples tokens from logits and computes log probabilities. Each rank has logits for one part of the
vocabulary.

`kernels.draws` defines how a token is drawn from a row of logits. The caller passes in the sampling
operations (kernels or reference implementation). With tensor parallelism, the ranks exchange each row's best
(value, id) pair. For greedy sampling, and for sampling with only a temperature, the result is exactly the
same as with a single rank. If a row needs top-k, top-p, min-p or logits processors, the step's logits are
gathered first.

The sampling parameters are applied in this order: repetition penalty, frequency and presence penalties, logit
bias, suppression of stop tokens before `min_tokens`, allowed tokens, bad words, temperature, top-k, top-p,
min-p. As in Hugging Face and vLLM, penalties precede the temperature, and top-p applies to the renormalised
result of top-k. Min-p is last, as in Hugging Face. vLLM applies min-p before top-k, which changes the result
only if top-p then renormalises over fewer tokens.

The bias is applied after the penalties, so that −100 bans a token and +100 forces it regardless of the
penalties. Stop tokens are suppressed after the bias, so that a bias cannot re-enable them. Tokens that tie
with the last token kept by top-k, top-p or min-p are also kept.

Log probabilities are computed from the model's own distribution, before any of these parameters is applied.

If the largest logit of a row is not finite, the row's token id is −1 (`BAD_TOKEN`), and the caller must end
the sequence with an error. This happens if the row contains a NaN, a value overflowed, or every token is
banned. Other rows are not affected.
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
"""Maximum number of rows whose log probabilities are computed together. Computing a whole chunk or batch at
once could take gigabytes of memory."""


@dataclass(slots=True)
class SampledStep:
    """The result of sampling, on the device."""

    token_ids: torch.Tensor
    """Sampled tokens: [sampling slots] int64, with BAD_TOKEN where no token could be sampled."""
    logprobs: torch.Tensor | None
    """Log probabilities: [slots with logprobs, 1 + 2k] float64, in the format of `Sampler.token_logprobs`."""


class Sampler:
    """Samples tokens from one rank's part of the vocabulary.

    `first_vocab` is the token id of the first column of this rank's logits. `vocab` is the number of columns
    including padding, which is the same on every rank; `vocab_real` is the number without padding.
    `vocab_size` is the size of the model's vocabulary. Logits are `[rows, vocab]` in float32 or a 16-bit
    dtype; values in the padding are ignored.
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
        """Sample a token for each sampling slot and store it in `tables` as the slot's next input.

        `logits` are the step's logit rows on this rank; any additional rows are ignored. `logits` is not
        modified.
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
        """Sample one token id per row of logits, without logits processors: [rows] int64. Can be captured in
        a CUDA graph if the sampling operations allow it."""
        source, whole = self._source(logits, variant, whole=False)
        return self._best(variant, source, draws, whole)

    def logprobs(
        self, logits: torch.Tensor, batch: SamplingBatch, token_ids: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the log probabilities of the sampled `token_ids` ([sampling slots] int64), in the format of
        `SampledStep.logprobs`, or None if no slot requested them."""
        index = batch.metadata.logprob_index
        if index is None:
            return None
        top = max(k for _, k in batch.metadata.logprob_rows)
        rows = index if batch.logit_rows is None else batch.logit_rows[index]
        chosen = token_ids[index].clamp(min=0)
        parts = zip(rows.split(LOGPROB_ROWS), chosen.split(LOGPROB_ROWS), strict=True)
        return torch.cat([self.token_logprobs(logits[some], ids, top) for some, ids in parts])

    def token_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
        """Return the log probabilities of `token_ids` ([rows] int64) and of the `top` most likely tokens.

        `logits` is [rows, columns of this rank], and its padding may be overwritten. The result is [rows, 1 +
        2k] float64. It contains the log probability of the row's token, the k highest log probabilities in
        descending order, and the k corresponding token ids. k is `top`, or the vocabulary size if that is
        smaller.
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
        """Return the logits to sample from, and whether they cover the whole vocabulary, which they always do
        if `whole` is true."""
        if self._ranks.size == 1:
            return Logits(logits, self._vocab_size, hashes=self._hashes), True
        if whole or variant == Variant.FULL:
            # All padding is at the end of the gathered columns, so the vocabulary is the first `vocab_size`
            # columns.
            logits = self._ranks.all_gather_last_dim(logits)
            return Logits(logits, self._vocab_size, hashes=self._hashes), True
        mine = self._hashes[self._first : self._first + self._real]
        return Logits(logits, self._real, self._first, mine), False

    def _best(self, variant: Variant, source: Logits, draws: Draws, whole: bool) -> torch.Tensor:
        if not whole and not self._real:
            # With a small vocabulary, all of this rank's columns may be padding.
            rows = len(source.values if source.index is None else source.index)
            values = torch.full((rows,), -torch.inf, device=source.values.device)
            ids = torch.full((rows,), self._first, dtype=torch.int64, device=values.device)
        elif variant == Variant.GREEDY:
            values, ids = self._ops.greedy(source)
        elif variant == Variant.PLAIN:
            values, ids = self._ops.plain(source, draws)
        else:
            values, ids = self._ops.full(source, draws)
        # Token ids increase with the rank, so ties go to the lowest id.
        return ids if whole else self._ranks.best(values, ids)
