"""Tests that the frequencies of every scaling method match the papers' formulas, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from kernels import rope

DIM, THETA = 32, 10000.0
INDEX = range(DIM // 2)


def _close(found: torch.Tensor, expected: list[float]) -> None:
    assert found.dtype == torch.float32
    relative = (found.double() / torch.tensor(expected, dtype=torch.float64) - 1).abs().max()
    assert relative < 2e-6


def _base(theta: float = THETA) -> list[float]:
    return [theta ** (-2 * i / DIM) for i in INDEX]


def test_linear_divides_every_frequency() -> None:
    _close(rope.default_frequencies(DIM, THETA), _base())
    _close(rope.linear_frequencies(DIM, THETA, 4.0), [f / 4 for f in _base()])


@pytest.mark.parametrize("length", [1, 100, 2048])
def test_dynamic_is_unscaled_up_to_the_configured_positions(length: int) -> None:
    _close(rope.dynamic_frequencies(DIM, THETA, 4.0, positions=2048, length=length), _base())


def test_dynamic_raises_the_base_beyond_the_configured_positions() -> None:
    theta = THETA * (4.0 * 5000 / 2048 - 3.0) ** (DIM / (DIM - 2))
    _close(rope.dynamic_frequencies(DIM, THETA, 4.0, positions=2048, length=5000), _base(theta))


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    kinds = set()
    expected = []
    for f in _base():
        wave = 2 * math.pi / f
        if wave < 1024 / 4:
            kinds.add("short")
            expected.append(f)
        elif wave > 1024:
            kinds.add("long")
            expected.append(f / 8)
        else:
            kinds.add("between")
            blend = (1024 / wave - 1) / (4 - 1)
            expected.append((1 - blend) * f / 8 + blend * f)
    assert kinds == {"short", "between", "long"}
    _close(rope.llama3_frequencies(DIM, THETA, 8.0, 1.0, 4.0, original=1024), expected)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_ramps_between_fast_and_slow_dimensions(truncate: bool) -> None:
    def turns_at(turns: float) -> float:
        return DIM * math.log(1024 / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = turns_at(32), turns_at(1)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in INDEX]
    assert 0.0 in ramp
    assert 1.0 in ramp
    expected = [(1 - r) * f + r * f / 4 for r, f in zip(ramp, _base(), strict=True)]
    _close(rope.yarn_frequencies(DIM, THETA, 4.0, 1024, 32.0, 1.0, truncate), expected)


def test_yarn_scales_attention_with_the_logarithm_of_its_factor() -> None:
    assert rope.yarn_attention_factor(4.0, None, None) == pytest.approx(0.1 * math.log(4) + 1)
    assert rope.yarn_attention_factor(1.0, None, None) == 1.0
    assert rope.yarn_attention_factor(40.0, 1.0, 1.0) == 1.0
    assert rope.yarn_attention_factor(40.0, 0.7, 0.0) == pytest.approx(0.1 * math.log(40) + 1)
    expected = (0.07 * math.log(40) + 1) / (0.05 * math.log(40) + 1)
    assert rope.yarn_attention_factor(40.0, 0.7, 0.5) == pytest.approx(expected)


def test_the_table_holds_cosines_then_sines() -> None:
    frequencies = rope.default_frequencies(DIM, THETA)
    table = rope.cos_sin_table(frequencies, 300, scale=1.5)
    assert table.shape == (300, DIM)
    angles = torch.arange(300.0, dtype=torch.float64).outer(frequencies.double())
    expected = 1.5 * torch.cat((angles.cos(), angles.sin()), dim=1)
    assert (table.double() - expected).abs().max() < 1e-4
