"""Tests of the embedding on one of several ranks, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch

from kernels import reference

embedding = pytest.importorskip("kernels.triton.embedding", exc_type=ImportError)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("hidden", [64, 1000, 2880])
@pytest.mark.parametrize("first", [0, 40, 120])
def test_tokens_of_other_ranks_give_zeros(first: int, hidden: int) -> None:
    # The rows of other ranks are NaN.
    rows = torch.full((300, hidden), torch.nan, dtype=torch.float16, device=DEVICE)
    weight = rows[130:170]
    weight.copy_(torch.randn(40, hidden, generator=torch.Generator().manual_seed(1)))
    token_ids = torch.tensor([0, 39, 40, 42, 79, 119, 120, 159, 40, -1], device=DEVICE)
    found = embedding.embedding_part(token_ids, weight, first)
    assert torch.equal(found, reference.embedding(token_ids, weight, first))
    assert found.isfinite().all()


def test_no_tokens_launch_nothing() -> None:
    weight = torch.ones(4, 8, device=DEVICE)
    assert embedding.embedding_part(torch.zeros(0, dtype=torch.int64), weight, 4).shape == (0, 8)
