"""Computes the frequencies of every RoPE scaling method and the cos/sin tables (RoFormer, Su et al. 2021).

All computations use float32 and the same order of operations as transformers, because models were trained
with that rounding. Rounding differently causes visible errors at large positions.
"""

from __future__ import annotations

import math

import torch


def default_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Return the unscaled frequencies `theta ** (-2i / head_dim)`: `[head_dim / 2]` float32, in radians per
    position."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponent)


def linear_frequencies(head_dim: int, theta: float, factor: float) -> torch.Tensor:
    """Return the frequencies of position interpolation (Chen et al. 2023), which divides every position by
    `factor`."""
    return default_frequencies(head_dim, theta) / factor


def dynamic_frequencies(
    head_dim: int, theta: float, factor: float, positions: int, length: int
) -> torch.Tensor:
    """Return the frequencies of dynamic NTK-aware scaling (bloc97 and emozilla 2023) for sequences of
    `length` tokens.

    positions: the configured `max_position_embeddings`. For lengths up to `positions`, the frequencies are
    unscaled. For longer sequences, they match what transformers computes for a sequence of exactly
    `length` tokens.
    """
    stretch = factor * max(length, positions) / positions - (factor - 1)
    return default_frequencies(head_dim, theta * stretch ** (head_dim / (head_dim - 2)))


def llama3_frequencies(
    head_dim: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> torch.Tensor:
    """Return Llama 3.1's frequencies. Frequencies with long wavelengths are divided by `factor`, those with
    short wavelengths are kept, and those in between are interpolated. original: maximum training length
    before scaling, in tokens.
    """
    frequencies = default_frequencies(head_dim, theta)
    wavelength = 2 * math.pi / frequencies
    smooth = (original / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    between = (1 - smooth) * frequencies / factor + smooth * frequencies
    long = wavelength > original / low_freq_factor
    short = wavelength < original / high_freq_factor
    return torch.where(long, frequencies / factor, torch.where(short, frequencies, between))


def yarn_frequencies(
    head_dim: int,
    theta: float,
    factor: float,
    original: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> torch.Tensor:
    """Return the frequencies of YaRN (Peng et al. 2023), also called "NTK by parts". Dimensions that rotate
    more than `beta_fast` times within the original length keep their frequency. Those that rotate fewer than
    `beta_slow` times are interpolated. Between these limits, the original and the interpolated frequency are
    blended along a linear ramp."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # avoid dividing by zero, as the YaRN authors' code does
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    wavelengths = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    keep = 1 - ramp
    return 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return the factor by which YaRN scales cos and sin if the checkpoint has no `attention_factor`. It is
    `0.1 ln(factor) + 1` or, if mscale and mscale_all_dim are given, `0.1 mscale ln(factor) + 1` divided by
    `0.1 mscale_all_dim ln(factor) + 1`. For factors up to 1, it is 1."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def cos_sin_table(frequencies: torch.Tensor, length: int, scale: float = 1.0) -> torch.Tensor:
    """Return each position's cosines and sines, multiplied by `scale`: `[length, head_dim]` float32. The
    first half of a row contains the cosines, the second half the sines. frequencies: `[head_dim / 2]`."""
    positions = torch.arange(length, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return table if scale == 1.0 else table.mul_(scale)
