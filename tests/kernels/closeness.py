"""Error measures for test results: the error of the whole tensor, and the error of its worst vector. The
worst vector matters because a norm over two thousand tokens with 32 heads each would not reveal a single
wrong head of one token."""

from __future__ import annotations

import torch


def error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the norm of the whole tensor's error, relative to the norm of the exact result."""
    return float((found.double() - exact).norm() / exact.norm())


def worst_error(found: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the largest relative error of any vector. A vector spans the last dimension: one head of a
    token, or the outputs of a token. If the exact vector is zero, any difference counts as an infinite error.
    """
    off, size = (found.double() - exact).norm(dim=-1), exact.double().norm(dim=-1)
    return float(torch.where(off == 0, 0.0, off / size).max())


def check_as_torch(
    found: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, roundings: float = 0.5
) -> None:
    """Assert that the error is at most twice torch's error plus `roundings` rounding errors, both over the
    whole tensor and for the worst vector. In the norm, one rounding error is a quarter of the dtype's eps."""
    more = roundings * torch.finfo(found.dtype).eps / 4
    assert found.shape == exact.shape and found.isfinite().all()
    assert error(found, exact) <= 2 * error(torchs, exact) + more
    check_worst(found, torchs, exact, roundings)


def check_worst(
    found: torch.Tensor, torchs: torch.Tensor, exact: torch.Tensor, roundings: float = 0.5
) -> None:
    """Assert the bound of `check_as_torch` for the worst vector only. torch's own worst vector may be a
    different one, because the error of a sum of only a few terms varies by chance."""
    more = roundings * torch.finfo(found.dtype).eps / 4
    off, bound = worst_error(found, exact), 2 * worst_error(torchs, exact) + more
    if not off <= bound:
        far = (found.double() - exact).norm(dim=-1) / exact.double().norm(dim=-1)
        many = int((far > bound).sum())
        raise AssertionError(f"{many} of {far.numel()} vectors have errors above {bound:.1e}: {off:.1e}")
