"""Tests of the operations of `kernels.sampling` against definitions, exact probabilities and transformers'
warpers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from kernels import sampling
from tests.examples import examples

CPU = torch.device("cpu")
UNUSED = torch.zeros(1, 1, dtype=torch.int64)


def keys_of(seeds: range, sample: int = 0, position: int = 0) -> torch.Tensor:
    base = torch.tensor([sampling.noise_base(seed, sample) for seed in seeds])
    return sampling.noise_keys(base, torch.full((len(base),), position))


def test_the_noise_follows_its_published_definition() -> None:
    """Computes the noise as the module documents it, but with Python's unbounded integers."""
    wide, narrow = (1 << 64) - 1, (1 << 32) - 1

    def splitmix64(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & wide
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & wide
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & wide
        return x ^ (x >> 31)

    def fmix32(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & narrow
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & narrow
        return x ^ (x >> 16)

    # These are the first outputs of the generators' reference implementations for a known input.
    assert splitmix64(1234567) == 6457827717110365317
    assert fmix32(1) == 0x514E28B7
    for seed, sample, position in [(0, 0, 0), (2**64 - 1, 3, 17), (-5, 1, 131071), (1 << 63, 0, 1)]:
        base = splitmix64((splitmix64(seed & wide) + sample) & wide)
        key = splitmix64((base + position * 0x9E3779B97F4A7C15) & wide)
        ids = [0, 1, 2, 8191, 128255]
        expected = [
            fmix32(((fmix32(i) ^ (key & narrow)) * ((key >> 32) | 1)) & narrow) & 0x7FFFFFFF for i in ids
        ]
        keys = sampling.noise_keys(
            torch.tensor([sampling.noise_base(seed, sample)]), torch.tensor([position])
        )
        hashes = sampling.token_hashes(0, 128256, CPU)
        bits = sampling.noise_bits(keys, hashes)[0]
        assert bits[ids].tolist() == expected
        gumbel = [-math.log(-math.log1p(-(h + 0.5) / 2**31)) for h in expected]
        assert sampling.gumbel_noise(keys, hashes)[0, ids].tolist() == pytest.approx(gumbel, rel=1e-5)


def test_the_noise_is_gumbel_distributed_and_uncorrelated_between_neighbours() -> None:
    hashes = sampling.token_hashes(0, 4096, CPU)
    noise = sampling.gumbel_noise(keys_of(range(64)), hashes).double()
    assert noise.isfinite().all()
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, rel=0.01)
    uniform = torch.exp(-torch.exp(-noise)).flatten().sort().values
    grid = torch.arange(1, len(uniform) + 1, dtype=torch.float64) / len(uniform)
    assert (uniform - grid).abs().max().item() < 1.95 / math.sqrt(len(uniform))  # Kolmogorov–Smirnov, 0.1%
    centred = (noise - noise.mean()) / noise.std()
    next_seed = (centred[1:] * centred[:-1]).mean().item()
    next_token = (centred[:, 1:] * centred[:, :-1]).mean().item()
    base = torch.full((64,), sampling.noise_base(7, 0))
    walk = sampling.gumbel_noise(sampling.noise_keys(base, torch.arange(64)), hashes).double()
    next_position = torch.corrcoef(walk).fill_diagonal_(0).abs().max().item()
    assert abs(next_seed) < 0.01 and abs(next_token) < 0.01 and next_position < 0.09


def test_the_noise_of_a_shard_equals_that_part_of_the_whole_vocabularys_noise() -> None:
    keys = keys_of(range(5), sample=2, position=77)
    whole = sampling.gumbel_noise(keys, sampling.token_hashes(0, 1003, CPU))
    for first, count in [(0, 251), (251, 251), (502, 251), (753, 250), (1, 7), (999, 4)]:
        part = sampling.gumbel_noise(keys, sampling.token_hashes(first, count, CPU))
        assert torch.equal(part, whole[:, first : first + count])


def logits_of(rows: int, vocab: int, seed: int, spread: float = 3.0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize("top_k", [1, 2, 7, 64])
def test_top_k_equals_that_of_transformers(top_k: int) -> None:
    logits = logits_of(9, 64, top_k)
    expected = TopKLogitsWarper(top_k)(UNUSED, logits.clone())
    actual = sampling.keep_top_k_(logits.clone(), torch.full((9,), top_k), top_k)
    assert torch.equal(actual, expected)


def test_rows_with_different_top_k_do_not_mix() -> None:
    logits = logits_of(4, 50, 1)
    actual = sampling.keep_top_k_(logits.clone(), torch.tensor([1, 5, 50, 9]), 50)
    assert actual.isfinite().sum(dim=1).tolist() == [1, 5, 50, 9]


@pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_top_p_equals_that_of_transformers(top_p: float, spread: float) -> None:
    logits = logits_of(16, 200, 3, spread)
    expected = TopPLogitsWarper(top_p)(UNUSED, logits.clone())
    actual = sampling.keep_top_p_(logits.clone(), logits, torch.full((16,), top_p))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.9])
def test_min_p_equals_that_of_transformers(min_p: float) -> None:
    logits = logits_of(16, 200, 4)
    expected = MinPLogitsWarper(min_p)(UNUSED, logits.clone())
    actual = sampling.keep_min_p_(logits.clone(), logits, torch.full((16,), min_p))
    assert torch.equal(actual, expected)


@given(
    seed=st.integers(0, 10_000),
    top_p=st.sampled_from([1e-9, 0.02, 0.3, 0.7, 0.9, 0.99]),
    spread=st.sampled_from([0.01, 1.0, 4.0]),
    levels=st.sampled_from([0, 3]),
)
@examples(60)
def test_selection_without_sorting_samples_the_same_tokens_as_sorting(
    seed: int, top_p: float, spread: float, levels: int
) -> None:
    """Rounding to `levels` leaves only a few different logits, so that ties occur too."""
    logits = logits_of(12, 100, seed, spread)
    if levels:
        logits = (logits / spread * levels).round() * spread / levels
    scores = logits + sampling.gumbel_noise(keys_of(range(12)), sampling.token_hashes(0, 100, CPU))
    limits = torch.full((12,), top_p)
    # Skip cases in which top_p lies within rounding error of the nucleus's boundary, because rounding may
    # change their result.
    ranked = logits.double().softmax(dim=1).sort(dim=1, descending=True).values
    clear = ((ranked.cumsum(dim=1) - top_p).abs() > 1e-5).all(dim=1)
    expected = sampling.best(sampling.keep_top_p_(scores.clone(), logits, limits))
    actual = sampling.best_in_top_p(scores.clone(), logits, limits, tries=4)
    assert torch.equal(actual[1][clear], expected[1][clear])
    assert torch.equal(actual[0][clear], expected[0][clear])


def test_penalties_equal_those_of_transformers_and_openai() -> None:
    prompt, output = [3, 3, 5, 8], [5, 9, 9, 9]
    logits = logits_of(2, 20, 5)
    counts = torch.zeros(2, 20, dtype=torch.int32)
    for token in output:
        counts[0, token] += 2
    counts[0, prompt] |= 1
    rates = torch.tensor([[1.7, 1.0], [0.25, 0.0], [-0.5, 0.0]])
    history = torch.tensor([prompt + output])
    expected = RepetitionPenaltyLogitsProcessor(1.7)(history, logits[:1].clone())
    for token in set(output):
        expected[0, token] -= 0.25 * output.count(token) - 0.5
    actual = sampling.penalize_(logits.clone(), counts, *rates)
    torch.testing.assert_close(actual[:1], expected)
    assert torch.equal(actual[1], logits[1])


def test_the_best_value_of_logits_with_nan_or_only_minus_infinity_is_not_finite() -> None:
    scores = torch.tensor([[0.0, math.nan, 2.0], [-math.inf] * 3, [1.0, 1.0, 0.0]])
    values, columns = sampling.best(scores)
    assert values.isfinite().tolist() == [False, False, True]
    assert columns[2] == 0
    values, columns = sampling.best_in_top_p(scores.clone(), scores, torch.full((3,), 0.5))
    assert values.isfinite().tolist() == [False, False, True]


def chi_square(observed: np.ndarray, expected: np.ndarray) -> float:
    """Return the z-score of Pearson's statistic (Wilson–Hilferty). Cells with an expected count below five
    are pooled."""
    small = expected < 5
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    keep = expected > 0
    statistic = ((observed[keep] - expected[keep]) ** 2 / expected[keep]).sum()
    freedom = keep.sum() - 1
    return float(((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom)))


@pytest.mark.parametrize("position", [0, 1000])
def test_token_frequencies_over_many_seeds_match_the_softmax(position: int) -> None:
    draws, vocab = 40_000, 24
    logits = logits_of(1, vocab, 6, 1.5)
    keys = keys_of(range(draws), position=position)
    tokens = sampling.best(logits + sampling.gumbel_noise(keys, sampling.token_hashes(0, vocab, CPU)))[1]
    observed = torch.bincount(tokens, minlength=vocab).numpy()
    assert abs(chi_square(observed, logits[0].double().softmax(dim=0).numpy() * draws)) < 3.5
