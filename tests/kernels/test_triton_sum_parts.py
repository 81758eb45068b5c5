"""Tests of adding the ranks' partial results and the residual, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

sums = pytest.importorskip("kernels.triton.sum_parts", exc_type=ImportError)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("world", "rows", "hidden"), [(2, 3, 1024), (4, 5, 257), (8, 1, 8192)])
def test_parts_are_added_in_rank_order_with_one_rounding(
    dtype: torch.dtype, world: int, rows: int, hidden: int
) -> None:
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    for rank in (0, world - 1):
        parts, own, residual = random(world, rows + 2, hidden), random(rows, hidden), random(rows, hidden)
        parts[rank] = torch.nan  # this rank's own partial result is not copied
        total = torch.zeros(rows, hidden, device=DEVICE)
        for source in range(world):
            total += (own if source == rank else parts[source, :rows]).float()
        wanted = (total + residual.float()).to(dtype)
        out = torch.full_like(residual, torch.nan)
        sums.sum_parts(parts, own, residual, out, rank)
        assert torch.equal(out, wanted)
        sums.sum_parts(parts, own, residual, residual, rank)
        assert torch.equal(residual, wanted)
