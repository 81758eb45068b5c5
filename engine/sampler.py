"""From logits to tokens: greedy, plain (temperature only) and full sampling, and log probabilities.

Each row pays for what it asks for only: the rows of a step are partitioned (`batch.Partition`) into *greedy*
(the largest logit, the lowest id on ties), *plain* (Gumbel noise at a temperature: no softmax, no sort) and
*full* (the distribution is changed first). With tensor parallelism, greedy and plain rows exchange each
rank's best (value, id), which gives exactly the single-rank draw; full rows gather their logits.

The order in full rows: repetition penalty, frequency and presence penalties, logit bias, ban of stop tokens
before `min_tokens`, temperature, top-k, top-p, min-p. Penalties before temperature and top-p over what top-k
left (renormalised) are Hugging Face's and vLLM's order; min-p last is Hugging Face's (vLLM has it before
top-k, and differs only where top-p would then be renormalised over fewer tokens). The bias comes after the
penalties, so that −100 bans and +100 forces whatever was said before, and the ban comes last, so that no bias
lifts it. Ties with the last token kept by top-k, top-p or min-p are kept.

Log probabilities are of the model's own distribution: before all of the above.

A row whose largest logit is not a finite number (a NaN anywhere, an overflow, or every token banned) yields
token id −1 (`BAD_TOKEN`): the sequence has to end with an error. Other rows do not notice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.batch import (
    FREQUENCY,
    MIN_P,
    NOISE,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_P,
    FullGroup,
    Group,
    Rows,
    RowTables,
    StepBatch,
)
from engine.messages import BAD_TOKEN, LOWEST_LOGPROB
from engine.parallel import Ranks
from kernels import sampling


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
    on every rank. vocab_real: columns of real tokens. vocab_size: tokens of the model.
    """

    def __init__(
        self,
        ranks: Ranks,
        device: torch.device,
        *,
        vocab_size: int,
        first_vocab: int = 0,
        vocab: int | None = None,
        vocab_real: int | None = None,
    ) -> None:
        self._ranks = ranks
        self._vocab_size = vocab_size
        self._first = first_vocab
        self._vocab = vocab_size if vocab is None else vocab
        self._real = self._vocab if vocab_real is None else vocab_real
        self._hashes = sampling.token_hashes(first_vocab, self._vocab, device)
        alone = ranks.size == 1
        self._all_hashes = self._hashes if alone else sampling.token_hashes(0, vocab_size, device)

    def sample(self, logits: torch.Tensor, batch: StepBatch, tables: RowTables) -> SampledStep:
        """Draw a token for each sampling row and write it into `tables` as the rows' next input.

        `logits` [at least batch.sampled_logits, columns of this rank] float32; only padding is changed.
        """
        logits = self._without_padding(logits[: batch.sampled_logits])
        if batch.logit_rows is not None:
            logits = logits[batch.logit_rows]
        part = batch.partition
        keys = None
        if part.plain is not None or part.full is not None:
            keys = sampling.noise_keys(tables.noise_base[batch.rows], batch.positions)
        results = []
        if part.greedy is not None:
            local = sampling.best(logits[part.greedy.index])
            results.append((part.greedy, self._best_of_ranks(*local)))
        if part.plain is not None and keys is not None:
            local = sampling.best(self._plain_scores(logits, keys, part.plain, tables))
            results.append((part.plain, self._best_of_ranks(*local)))
        if part.full is not None and keys is not None:
            results.append((part.full, self._full(logits, keys, part.full, tables)))
        token_ids = _join(results, len(batch.rows), logits.device)
        tables.advance(batch, token_ids.clamp(min=0))
        logprobs = None
        if part.logprob_index is not None:
            index = part.logprob_index
            top = max(k for _, k in part.logprob_rows)
            logprobs = self.token_logprobs(logits[index], token_ids[index].clamp(min=0), top)
        return SampledStep(token_ids, logprobs)

    def pick(self, logits: torch.Tensor) -> torch.Tensor:
        """Each row's best token, of one rank's `[rows, columns]` logits: `[rows]` int64, BAD_TOKEN where the
        largest is not finite."""
        return self._best_of_ranks(*sampling.best(self._without_padding(logits)))

    def token_logprobs(self, logits: torch.Tensor, token_ids: torch.Tensor, top: int) -> torch.Tensor:
        """Log probabilities of `token_ids` [rows] int64 (of the whole vocabulary) and of the `top` best.

        `logits` [rows, columns of this rank] float32. Returns [rows, 1 + 2k] float64 with k = top, or less in
        a smaller vocabulary: the tokens' own log probabilities, the k highest, falling, and their token ids.
        """
        logits = self._without_padding(logits)
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

    def _plain_scores(
        self, logits: torch.Tensor, keys: torch.Tensor, group: Group, tables: RowTables
    ) -> torch.Tensor:
        scores = sampling.gumbel_noise(keys[group.index], self._hashes)
        rates = tables.floats[group.rows, TEMPERATURE].unsqueeze(1)
        return scores.addcmul_(logits[group.index], rates)

    def _full(
        self, logits: torch.Tensor, keys: torch.Tensor, group: FullGroup, tables: RowTables
    ) -> torch.Tensor:
        """Token ids [rows of the group] int64, equal on every rank."""
        mine = logits[group.index]
        if self._ranks.size > 1:
            logits = self._ranks.all_gather_last_dim(mine.contiguous())[:, : self._vocab_size].contiguous()
        else:
            # What follows changes it, and log probabilities want the original.
            logits = mine.clone() if isinstance(group.index, slice) else mine
        floats = tables.floats[group.rows]
        if group.penalised is not None and group.slots is not None and tables.counts is not None:
            rates, counts = floats[group.penalised], tables.counts[group.slots]
            _edit(
                logits,
                group.penalised,
                lambda rows: sampling.penalize_(
                    rows, counts, rates[:, REPETITION], rates[:, FREQUENCY], rates[:, PRESENCE]
                ),
            )
        if group.bias is not None:
            rows, ids, values = group.bias
            logits[rows, ids] += values
        if group.suppressed is not None:
            logits[group.suppressed] = -torch.inf
        logits *= floats[:, TEMPERATURE].unsqueeze(1)
        if group.top_k is not None:
            top_k = tables.top_k[group.rows[group.top_k]]
            _edit(logits, group.top_k, lambda rows: sampling.keep_top_k_(rows, top_k, group.largest_k))
        scores = sampling.gumbel_noise(keys[group.index], self._all_hashes)
        scores.mul_(floats[:, NOISE].unsqueeze(1)).add_(logits)
        if group.min_p is not None:
            unlikely, min_p = logits[group.min_p], floats[group.min_p, MIN_P]
            _edit(scores, group.min_p, lambda rows: sampling.keep_min_p_(rows, unlikely, min_p))
        values, ids = self._best_full(scores, logits, group.top_p, floats)
        return torch.where(values.isfinite(), ids, BAD_TOKEN)

    def _best_full(
        self, scores: torch.Tensor, logits: torch.Tensor, top_p: Rows | None, floats: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if top_p is None:
            return sampling.best(scores)
        limits = floats[top_p, TOP_P]
        if logits.device.type == "cpu":
            if isinstance(top_p, slice):
                return sampling.best_in_top_p(scores, logits, limits)
            values, ids = sampling.best(scores)
            values[top_p], ids[top_p] = sampling.best_in_top_p(scores[top_p], logits[top_p], limits)
            return values, ids
        _edit(scores, top_p, lambda rows: sampling.keep_top_p_(rows, logits[top_p], limits))
        return sampling.best(scores)

    def _best_of_ranks(self, values: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Token ids [rows] int64 from each rank's best value and column; the lowest id on ties."""
        ids = columns + self._first if self._first else columns
        if self._ranks.size > 1:
            stack = self._ranks.all_gather_stack(torch.stack((values.double(), ids.double())))
            # Ranks hold rising ids, and the first maximum (or NaN) wins.
            winner = stack[:, 0].argmax(dim=0, keepdim=True)
            values, ids = stack[:, 0].gather(0, winner)[0], stack[:, 1].gather(0, winner)[0].long()
        return torch.where(values.isfinite(), ids, BAD_TOKEN)

    def _without_padding(self, logits: torch.Tensor) -> torch.Tensor:
        if self._real < self._vocab:
            logits[:, self._real :] = -torch.inf
        return logits


def _edit(rows: torch.Tensor, some: Rows, change_: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Apply an in-place operation to some of the rows."""
    if isinstance(some, slice):
        change_(rows)
    else:
        rows[some] = change_(rows[some])


def _join(results: list[tuple[Group, torch.Tensor]], rows: int, device: torch.device) -> torch.Tensor:
    """Each group's token ids at their places."""
    if len(results) == 1 and isinstance(results[0][0].index, slice):
        return results[0][1]
    token_ids = torch.zeros(rows, dtype=torch.int64, device=device)
    for group, ids in results:
        token_ids[group.index] = ids
    return token_ids
