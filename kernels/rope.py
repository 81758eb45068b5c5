"""Rotary position embedding (RoFormer, Su et al. 2021): frequencies for every scaling method, and cos/sin
tables.

Everything is computed in float32 and in the order of operations of transformers. Models were trained with
that rounding, and different rounding shows at long positions.
"""

from __future__ import annotations

import math

import torch


def default_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """Return `theta ** (-2i / head_dim)`: `[head_dim / 2]` float32, radians per position."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    return 1.0 / (theta**exponent)


def linear_frequencies(head_dim: int, theta: float, factor: float) -> torch.Tensor:
    """Return the frequencies of position interpolation (Chen et al. 2023), which divides every position by
    `factor`."""
    return default_frequencies(head_dim, theta) / factor


def dynamic_frequencies(
    head_dim: int, theta: float, factor: float, positions: int, length: int
) -> torch.Tensor:
    """Return the frequencies of dynamic NTK-aware scaling (bloc97 and emozilla 2023), frozen at sequences of
    `length` tokens.

    positions: the configured `max_position_embeddings`. For lengths up to `positions` the frequencies are the
    default frequencies. For larger lengths they are what transformers computes for a sequence of exactly
    `length` tokens.
    """
    stretch = factor * max(length, positions) / positions - (factor - 1)
    return default_frequencies(head_dim, theta * stretch ** (head_dim / (head_dim - 2)))


def llama3_frequencies(
    head_dim: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> torch.Tensor:
    """Return the frequencies of Llama 3.1: frequencies of long wavelengths are divided by `factor`, those of
    short wavelengths stay, and those in between are interpolated.

    original: sequence length in tokens of the training before scaling.
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
    """Return the frequencies of YaRN (Peng et al. 2023), "NTK by parts". Dimensions that turn more than
    `beta_fast` times within the original length keep their frequency, dimensions below `beta_slow` turns are
    interpolated, and a linear ramp connects both."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(beta_fast), dimension(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # as in the authors' code: avoids a division by zero
    ramp = torch.clamp((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low), 0, 1)
    wavelengths = theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    keep = 1 - ramp
    return 1.0 / (factor * wavelengths) * (1 - keep) + 1.0 / wavelengths * keep


def yarn_attention_factor(factor: float, mscale: float | None, mscale_all_dim: float | None) -> float:
    """Return YaRN's factor on cos and sin for checkpoints that give none: `0.1 ln(factor) + 1`."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if mscale and mscale_all_dim:
        return scale(mscale) / scale(mscale_all_dim)
    return scale(1.0)


def cos_sin_table(frequencies: torch.Tensor, length: int, scale: float = 1.0) -> torch.Tensor:
    """Return cosines and sines by position: `[length, head_dim]` float32. The first half of a row holds the
    cosines, the second half the sines, both times `scale`. frequencies: `[head_dim / 2]`."""
    positions = torch.arange(length, dtype=torch.float32, device=frequencies.device)
    angles = torch.outer(positions, frequencies)
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return table if scale == 1.0 else table.mul_(scale)
