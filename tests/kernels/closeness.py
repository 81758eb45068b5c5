"""How far results are off, over all and where they are worst: one wrong head of one token drowns in a norm
over two thousand tokens of 32 heads."""

from __future__ import annotations

import torch


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of all, relative to the norm of all."""
    return float((found.double() - exact).norm() / exact.norm())


def worst_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Of the vector (the last dimension: a head of a token, a token's outputs) that is the furthest off,
    relative to its norm; where that is zero, anything else is infinitely far."""
    off, size = (found.double() - exact).norm(dim=-1), exact.double().norm(dim=-1)
    return float(torch.where(off == 0, 0.0, off / size).max())


def check_as_torch(
    found: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, roundings: float = 0.5
) -> None:
    """At most twice torch's error, over all and of the worst vector, and so many roundings of the result,
    whose error is a quarter of its dtype's eps in norm."""
    more = roundings * torch.finfo(found.dtype).eps / 4
    assert found.shape == exact.shape and found.isfinite().all()
    assert error(found, exact) <= 2 * error(torchs, exact) + more
    check_worst(found, torchs, exact, roundings)


def check_worst(
    found: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, roundings: float = 0.5
) -> None:
    """As `check_as_torch`, of the worst vector alone. Torch's worst may be another: of vectors that are sums
    of a few, one is lucky where another is not."""
    more = roundings * torch.finfo(found.dtype).eps / 4
    off, bound = worst_error(found, exact), 2 * worst_error(torchs, exact) + more
    if not off <= bound:
        far = (found.double() - exact).norm(dim=-1) / exact.double().norm(dim=-1)
        many = int((far > bound).sum())
        raise AssertionError(f"{many} of {far.numel()} vectors are further off than {bound:.1e}: {off:.1e}")
