"""Implements sampling in plain torch. Contains the reference implementation of `kernels.draws.SamplingOps`,
with its noise, filters and penalties.

Rows are independent: a row's result never depends on the other rows of the batch. As in torch, functions
whose names end in `_` modify their first argument in place. `plain` and `full` inspect each row's parameters
on the host and skip features that a row does not use. This is cheap on a CPU, but on a GPU it would require
waiting for the device.

Tokens are drawn with the Gumbel-max method (Gumbel 1954; Maddison et al. 2014): the argmax of `logit /
temperature + g`, with independent standard Gumbel noise g, is a sample from the softmax. The noise is
*counter-based*: it is a pure function of the seed, sample number, position and token id. A draw therefore
does not depend on the batch, on a rank's vocabulary shard or on earlier draws, and can be reproduced after a
preemption or on a different replica.

    base  = splitmix64(splitmix64(seed) + sample)                    once per sequence, `noise_base`
    key   = splitmix64(base + position · 0x9E3779B97F4A7C15)         once per row and step, `noise_keys`
    t     = fmix32(token id)                                         once per process, `token_hashes`
    h     = fmix32((t xor low(key)) · (high(key) | 1))  mod 2^31     for each row and token
    g     = −ln(−ln(1 − (h + ½) / 2^31))

splitmix64 is the finalizer by Steele, Lea & Flood (2014), and fmix32 is the finalizer of MurmurHash3. Both
are bijective. All integers are identical on every device. g is computed in float32, where the last bit of
`log` may differ between devices. Large values of g result from small values of h, so the upper tail has the
full precision of float32 (up to g = 22).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.draws import (
    BAD_TOKEN,
    FREQUENCY,
    MIN_P,
    NOISE,
    PRESENCE,
    REPETITION,
    TEMPERATURE,
    TOP_P,
    Bans,
    Biases,
    Draws,
    Logits,
)

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX1 = 0xBF58476D1CE4E5B9
_MIX2 = 0x94D049BB133111EB

GREEDY_BELOW = 1e-5
"""Temperatures below this select greedy sampling. Dividing logits by them would either select the same token
or overflow."""

# ── the operations: see `kernels.draws.SamplingOps` ──────────────────────────────────────────────────


def greedy(logits: Logits) -> tuple[torch.Tensor, torch.Tensor]:
    return _tokens(logits, *best(_source(logits)))


def plain(logits: Logits, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    return _draw(logits, draws, narrowing=False)


def full(logits: Logits, draws: Draws) -> tuple[torch.Tensor, torch.Tensor]:
    return _draw(logits, draws, narrowing=True)


def edit(
    logits: Logits,
    draws: Draws,
    index: torch.Tensor,
    counts: torch.Tensor | None = None,
    count_slots: torch.Tensor | None = None,
    bias: Biases | None = None,
    banned: Bans | None = None,
) -> torch.Tensor:
    sampling_row = index.clamp(min=0)
    logit_row = sampling_row if logits.index is None else logits.index[sampling_row]
    edited = logits.values[logit_row, : logits.columns].float()
    if counts is not None and count_slots is not None:
        seen, floats = counts, draws.floats[draws.slots[sampling_row]]
        _change(
            edited,
            count_slots >= 0,
            lambda rows, at: penalize_(
                rows,
                seen[count_slots[at]],
                floats[at, REPETITION],
                floats[at, FREQUENCY],
                floats[at, PRESENCE],
            ),
        )
    if bias is not None:
        rows, ids, values = (part[bias[0] >= 0] for part in bias)
        edited[rows, ids] += values
    if banned is not None:
        rows, ids = (part[banned[0] >= 0] for part in banned)
        edited[rows, ids] = -torch.inf
    return edited


def _source(logits: Logits) -> torch.Tensor:
    """Return each sampling row's logits, [sampling rows, columns] float32. The result may share memory with
    the caller's tensors."""
    values = logits.values[:, : logits.columns]
    if logits.index is not None:
        values = values[logits.index]
    values = values.float()
    if logits.edited is None or logits.edited_index is None:
        return values
    edited = logits.edited[logits.edited_index.clamp(min=0)]
    return torch.where((logits.edited_index >= 0).unsqueeze(1), edited, values)


def _draw(logits: Logits, draws: Draws, narrowing: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row, in three groups: greedy rows, rows with only noise, and rows that also have
    top-k, top-p or min-p."""
    assert logits.hashes is not None
    source, rows = _source(logits), draws.slots.clamp(min=0)
    floats, top_k = draws.floats[rows], draws.top_k[rows]
    keys = noise_keys(draws.noise_base[rows], draws.positions)
    kinds = (floats[:, NOISE] > 0).long()
    if narrowing:
        kinds += kinds * ((top_k > 0) | (floats[:, TOP_P] < 1) | (floats[:, MIN_P] > 0))
    values = torch.empty(len(rows), dtype=torch.float32, device=source.device)
    columns = torch.empty(len(rows), dtype=torch.int64, device=source.device)
    for kind in kinds.unique().tolist():
        here = (kinds == kind).nonzero().squeeze(1)
        some = slice(None) if len(here) == len(rows) else here
        x, rates = source[some], floats[some, TEMPERATURE].unsqueeze(1)
        if kind == 0:
            values[some], columns[some] = best(x)
            continue
        noise = gumbel_noise(keys[some], logits.hashes)
        if kind == 1:
            values[some], columns[some] = best(noise.addcmul_(x, rates))
        else:
            values[some], columns[some] = _best_narrowed(x * rates, noise, floats[some], top_k[some])
    values[draws.slots < 0] = -torch.inf
    return _tokens(logits, values, columns)


def _best_narrowed(
    logits: torch.Tensor, noise: torch.Tensor, floats: torch.Tensor, top_k: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """For each row, return the best score among the tokens kept by top-k, top-p and min-p, and its column.
    Modifies `logits` and `noise`."""
    largest_k = int(top_k.max())
    _change(logits, top_k > 0, lambda rows, at: keep_top_k_(rows, top_k[at], largest_k))
    scores = noise.add_(logits)
    min_p, top_p = floats[:, MIN_P], floats[:, TOP_P]
    _change(scores, min_p > 0, lambda rows, at: keep_min_p_(rows, logits[at], min_p[at]))
    at = (top_p < 1).nonzero().squeeze(1)
    if len(at) == len(top_p):
        return best_in_top_p(scores, logits, top_p)
    values, columns = best(scores)
    if len(at):
        values[at], columns[at] = best_in_top_p(scores[at], logits[at], top_p[at])
    return values, columns


def _change(
    rows: torch.Tensor, some: torch.Tensor, change_: Callable[[torch.Tensor, torch.Tensor | slice], object]
) -> None:
    """Apply an in-place operation to the rows for which `some` is true. The operation is called with these
    rows and their indices."""
    at = some.nonzero().squeeze(1)
    if len(at) == len(rows):
        change_(rows, slice(None))
    elif len(at):
        part = rows[at]
        change_(part, at)
        rows[at] = part


def _tokens(logits: Logits, values: torch.Tensor, columns: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return values, torch.where(values.isfinite(), columns + logits.first, BAD_TOKEN)


# ── noise ────────────────────────────────────────────────────────────────────────────────────────────


def _signed64(value: int) -> int:
    value &= _MASK64
    return value - (1 << 64) if value >> 63 else value


def _splitmix64(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * _MIX1) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX2) & _MASK64
    return value ^ (value >> 31)


def noise_base(seed: int, sample: int) -> int:
    """Return a sequence's noise base, the part of the noise key that does not depend on the position, as a
    signed 64-bit integer."""
    return _signed64(_splitmix64((_splitmix64(seed & _MASK64) + sample) & _MASK64))


def noise_keys(base: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return the noise keys for tokens at `positions`: [rows] int64. base, positions: [rows] int64."""
    x = positions * _signed64(_GOLDEN)
    x += base
    x += _signed64(_GOLDEN)
    # torch shifts int64 arithmetically; the masks make the shifts logical.
    x ^= (x >> 30) & ((1 << 34) - 1)
    x *= _signed64(_MIX1)
    x ^= (x >> 27) & ((1 << 37) - 1)
    x *= _signed64(_MIX2)
    x ^= (x >> 31) & ((1 << 33) - 1)
    return x


def _fmix32_(x: torch.Tensor) -> torch.Tensor:
    """Apply MurmurHash3's finalizer to int32 values in place. Multiplications wrap around."""
    x ^= (x >> 16) & 0xFFFF
    x *= 0x85EBCA6B - (1 << 32)
    x ^= (x >> 13) & 0x7FFFF
    x *= 0xC2B2AE35 - (1 << 32)
    x ^= (x >> 16) & 0xFFFF
    return x


def token_hashes(first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return the hashes of token ids `first` to `first + count - 1`: [count] int32. They are computed once
    per vocabulary shard."""
    return _fmix32_(torch.arange(first, first + count, dtype=torch.int32, device=device))


def noise_bits(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Return the random integers that the noise is computed from: [rows, tokens] int32, in 0 … 2^31 − 1."""
    low = ((keys << 32) >> 32).to(torch.int32).unsqueeze(1)
    high = (keys >> 32).to(torch.int32).unsqueeze(1) | 1
    bits = _fmix32_((low ^ hashes).mul_(high))
    bits &= 0x7FFFFFFF
    return bits


def gumbel_noise(keys: torch.Tensor, hashes: torch.Tensor) -> torch.Tensor:
    """Return standard Gumbel noise, [rows, tokens] float32. keys: [rows] int64. hashes: [tokens] int32."""
    share = noise_bits(keys, hashes).to(torch.float32)
    share.add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return share.neg_().log1p_().neg_().log_().neg_()


# ── best score, penalties and narrowing ──────────────────────────────────────────────────────────────


def best(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's largest value, [rows], and its column, [rows] int64. The lowest column wins a tie.
    The value is NaN if a row contains NaN, and −inf if all of its values are −inf; callers treat a non-finite
    value as an error.
    """
    result = scores.max(dim=1)
    return result.values, result.indices


def penalize_(
    logits: torch.Tensor,
    counts: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    """Apply penalties to `logits` [rows, vocabulary] float32 in place.

    counts: [rows, vocabulary] int32, 2 × (occurrences in the output) + (1 if the token is in the prompt).
    repetition, frequency, presence: [rows] float32.

    For tokens in the prompt or output, the repetition penalty (Keskar et al. 2019, as in Hugging Face)
    divides positive logits and multiplies negative logits. For tokens in the output, frequency × count and
    presence are then subtracted, as in OpenAI's API.
    """
    factor = torch.where(counts > 0, repetition.unsqueeze(1), 1.0)
    torch.where(logits > 0, logits / factor, logits * factor, out=logits)
    output = counts >> 1
    logits -= output * frequency.unsqueeze(1)
    logits -= (output > 0) * presence.unsqueeze(1)
    return logits


def keep_top_k_(logits: torch.Tensor, top_k: torch.Tensor, largest: int) -> torch.Tensor:
    """Set to −inf all logits that are smaller than the k-th largest in their row. Tokens that tie with the
    k-th largest are kept, as in Hugging Face's implementation.

    top_k: [rows] int64, at least 1.
    largest: the maximum of `top_k`, as a Python integer.
    """
    if largest >= logits.shape[1]:
        top_k = top_k.clamp(max=logits.shape[1])
        largest = logits.shape[1]
    ranked = logits.topk(largest, dim=1).values
    lowest = ranked.gather(1, (top_k - 1).unsqueeze(1))
    return logits.masked_fill_(logits < lowest, -torch.inf)


def keep_min_p_(scores: torch.Tensor, logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set scores to −inf for tokens less likely than min_p × the highest probability (Nguyen et al. 2024).

    scores, logits: [rows, vocabulary] float32.
    min_p: [rows] float32; 0 keeps all tokens.
    """
    lowest = logits.amax(dim=1) + min_p.log()
    return scores.masked_fill_(logits < lowest.unsqueeze(1), -torch.inf)


def keep_top_p_(scores: torch.Tensor, logits: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Set the scores of tokens outside the nucleus to −inf. The nucleus (Holtzman et al. 2020) is the
    smallest set of most likely tokens whose probabilities add up to at least top_p. Tokens that tie with its
    last token are kept. Sorts each row, without synchronising with the host."""
    ranked = logits.sort(dim=1, descending=True).values
    probabilities = ranked.softmax(dim=1)
    before = probabilities.cumsum(dim=1) - probabilities
    # `before`, the total probability of all more likely tokens, never decreases except by rounding. The
    # number of its entries below top_p is therefore the size of the nucleus.
    size = (before < top_p.unsqueeze(1)).sum(dim=1).clamp_(min=1)
    lowest = ranked.gather(1, (size - 1).unsqueeze(1))
    return scores.masked_fill_(logits < lowest, -torch.inf)


def best_in_top_p(
    scores: torch.Tensor, logits: torch.Tensor, top_p: torch.Tensor, tries: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `best(keep_top_p_(scores, logits, top_p))`, usually without sorting. Modifies `scores`. Tokens
    are tried in order of decreasing score, and the first token in the nucleus is returned. A token is in the
    nucleus if the total probability of all more likely tokens is below top_p. The result is the same as with
    sorting, except for rounding at the boundary of the nucleus. On average, about 1 / top_p tokens are tried;
    after `tries` tokens, the row is sorted instead. Reads results on the host, so it is meant for CPUs.
    """
    values, columns = best(scores)
    highest = logits.amax(dim=1, keepdim=True)
    weights = (logits - highest).exp_()
    target = weights.sum(dim=1).mul_(top_p)
    open_rows = torch.arange(logits.shape[0], device=logits.device)
    for attempt in range(tries):
        everything = open_rows.shape[0] == logits.shape[0]
        mine = logits if everything else logits[open_rows]
        mass = weights if everything else weights[open_rows]
        chosen = mine.gather(1, columns[open_rows].unsqueeze(1))
        above = mass.masked_fill(mine <= chosen, 0.0).sum(dim=1)
        inside = (above < target[open_rows]) | (chosen >= highest[open_rows]).squeeze(1)
        inside |= ~values[open_rows].isfinite()
        open_rows = open_rows[~inside]
        if open_rows.numel() == 0:
            return values, columns
        scores[open_rows, columns[open_rows]] = -torch.inf
        rest = scores[open_rows]
        if attempt == tries - 1:
            keep_top_p_(rest, logits[open_rows], top_p[open_rows])
        values[open_rows], columns[open_rows] = best(rest)
    return values, columns
