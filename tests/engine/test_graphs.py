"""The ladder of captured batch sizes; what graphs compute is for a GPU to prove (tests/gpu)."""

from __future__ import annotations

import itertools

import pytest

from engine.graphs import ladder


@pytest.mark.parametrize("most", [1, 2, 3, 16, 17, 64, 100, 256, 1000, 1024])
def test_the_ladder_reaches_the_most_rows_in_steps_that_waste_little(most: int) -> None:
    sizes = ladder(most)
    assert sizes == sorted(set(sizes))
    assert sizes[0] == 1
    assert sizes[-1] == most
    assert len(sizes) <= 32
    for low, high in itertools.pairwise(sizes):
        # A batch that is one larger than a size pays for the next: at most a quarter too much, or a few rows.
        assert high - (low + 1) <= max(8, (low + 1) / 4)
