"""From logits to tokens, over one rank's part of the vocabulary, and log probabilities.

What a row draws is defined in `kernels.draws`; who computes it is given. With tensor parallelism, greedy and
plain rows exchange each rank's best (value, id), which gives exactly the single-rank draw; where a row is
narrowed or edited, the step's logits are gathered first.

The order in a row: repetition penalty, frequency and presence penalties, logit bias, ban of stop tokens
before `min_tokens`, allowed tokens, bad words, temperature, top-k, top-p, min-p. Penalties before temperature
and top-p over what top-k left (renormalised) are Hugging Face's and vLLM's order; min-p last is Hugging
Face's (vLLM has it before top-k, and differs only where top-p would then be renormalised over fewer tokens).
The bias comes after the penalties, so that −100 bans and +100 forces whatever was said before, and the bans
come last, so that no bias lifts them. Ties with the last token kept by top-k, top-p or min-p are kept.

Log probabilities are of the model's own distribution: before all of the above.

A row whose largest logit is not a finite number (a NaN anywhere, an overflow, or every token banned) yields
token id −1 (`BAD_TOKEN`): the sequence has to end with an error. Other rows do not notice.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from engine.batch import RowTables, SamplingBatch
from engine.messages import LOWEST_LOGPROB
from engine.parallel import Ranks
from kernels import sampling
from kernels.draws import BAD_TOKEN, Draws, Logits, SamplingOps, Variant

LOGPROB_ROWS = 128
"""Rows whose log probabilities are computed at once: those of a whole chunk or batch could take gigabytes."""


@dataclass(slots=True)
class SampledStep:
    """What a step sampled, still on the device."""

    token_ids: torch.Tensor
    """[sampling rows] int64; BAD_TOKEN where a row has none."""
    logprobs: torch.Tensor | None
    """[rows that want them, 1 + 2k] float64: chosen; k best; their ids. See `token_logprobs`."""


class Sampler:
    """Samples from one rank's part of the vocabulary.

    first_vocab: token id of the first column of this rank's logits. vocab: columns, padding included, equal
    on every rank. vocab_real: columns of real tokens. vocab_size: tokens of the model. Logits are
    `[rows, vocab]` in float32 or 16 bits; what their padding holds is never looked at.
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
        """Of the whole vocabulary."""

    def sample(self, logits: torch.Tensor, batch: SamplingBatch, tables: RowTables) -> SampledStep:
        """Draw a token for each sampling row and write it into `tables` as the rows' next input.

        logits: of the step's logit rows on this rank, perhaps with others after them; they stay as they are.
        """
        if batch.logit_rows is None:
            logits = logits[: len(batch.rows)]
        needs, draws = batch.needs, tables.sampling.draws(batch.rows, batch.positions)
        source, whole = self._source(logits, needs.variant, whole=needs.edits is not None)
        source = replace(source, index=batch.logit_rows)
        if needs.edits is not None:
            edits, counts = needs.edits, tables.sampling.counts
            edited = self._ops.edit(source, draws, edits.index, counts, edits.slots, edits.bias, edits.banned)
            tables.sampling.restrict_(edited, edits)
            source = replace(source, edited=edited, edited_index=edits.index_of)
        token_ids = self._best(needs.variant, source, draws, whole)
        tables.advance(batch, token_ids)
        return SampledStep(token_ids, self.logprobs(logits, batch, token_ids))

    def draw(self, logits: torch.Tensor, variant: Variant, draws: Draws) -> torch.Tensor:
        """The token ids [rows] int64 of `sample` for rows that are not edited, one logit row each. Nothing
        else is done: a graph may hold it, if the operations that were given allow it."""
        source, whole = self._source(logits, variant, whole=False)
        return self._best(variant, source, draws, whole)

    def logprobs(
        self, logits: torch.Tensor, batch: SamplingBatch, token_ids: torch.Tensor
    ) -> torch.Tensor | None:
        """As `SampledStep.logprobs`, of the tokens that were drawn: [sampling rows] int64."""
        index = batch.needs.logprob_index
        if index is None:
            return None
        top = max(k for _, k in batch.needs.logprob_rows)
        rows = index if batch.logit_rows is None else batch.logit_rows[index]
        chosen = token_ids[index].clamp(min=0)
        pieces = zip(rows.split(LOGPROB_ROWS), chosen.split(LOGPROB_ROWS), strict=True)
        return torch.cat([self.token_logprobs(logits[some], ids, top) for some, ids in pieces])

    def token_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
        """Log probabilities of `token_ids` [rows] int64 (of the whole vocabulary) and of the `top` best.

        May overwrite the padding of `logits` [rows, columns of this rank]. Returns [rows, 1 + 2k] float64
        with k = top, or less in a smaller vocabulary: the tokens' own log probabilities, the k highest,
        falling, and their token ids.
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
            stack = self._ranks.all_gather_stack(torch.cat((sums, chosen, values, ids), dim=1).double())
            sums, chosen = stack[:, :, :1].logsumexp(dim=0), stack[:, :, 1:2].amax(dim=0)
            k = values.shape[1]
            merged = stack[:, :, 2 : 2 + k].movedim(0, 1).flatten(1)
            merged_ids = stack[:, :, 2 + k :].movedim(0, 1).flatten(1)
            values, at = merged.topk(min(top, self._vocab_size), dim=1)
            ids = merged_ids.gather(1, at)
        logprobs = torch.cat((chosen, values), dim=1).double() - sums.double()
        logprobs = logprobs.nan_to_num(LOWEST_LOGPROB, LOWEST_LOGPROB, LOWEST_LOGPROB)
        return torch.cat((logprobs.clamp(LOWEST_LOGPROB, 0.0), ids.double()), dim=1)

    def _source(self, logits: torch.Tensor, variant: Variant, whole: bool) -> tuple[Logits, bool]:
        """What to sample from, and whether that is the whole vocabulary: if it must be, it is gathered."""
        if self._ranks.size == 1:
            return Logits(logits, self._vocab_size, hashes=self._hashes), True
        if whole or variant == Variant.FULL:
            # Columns beyond the vocabulary are the last ones.
            logits = self._ranks.all_gather_last_dim(logits)
            return Logits(logits, self._vocab_size, hashes=self._hashes), True
        mine = self._hashes[self._first : self._first + self._real]
        return Logits(logits, self._real, self._first, mine), False

    def _best(self, variant: Variant, source: Logits, draws: Draws, whole: bool) -> torch.Tensor:
        if variant == Variant.GREEDY:
            values, ids = self._ops.greedy(source)
        elif variant == Variant.PLAIN:
            values, ids = self._ops.plain(source, draws)
        else:
            values, ids = self._ops.full(source, draws)
        return ids if whole else self._best_of_ranks(values, ids)

    def _best_of_ranks(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Token ids [rows] int64 from each rank's best value and its token; the lowest id on ties."""
        stack = self._ranks.all_gather_stack(torch.stack((values.double(), ids.double())))
        # Ranks hold rising ids, and the first maximum (or NaN) wins.
        winner = stack[:, 0].argmax(dim=0, keepdim=True)
        values, ids = stack[:, 0].gather(0, winner)[0], stack[:, 1].gather(0, winner)[0].long()
        return torch.where(values.isfinite(), ids, BAD_TOKEN)
