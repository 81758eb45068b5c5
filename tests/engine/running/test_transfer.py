"""Memory for transfers is kept in the sizes in which it is asked for."""

from __future__ import annotations

import pytest

from engine.transfer import kept


@pytest.mark.parametrize(
    ("most", "largest"), [(1, 1), (2, 2), (3, 4), (262_144, 262_144), (262_145, 524_288)]
)
def test_every_power_of_two_is_kept_up_to_the_one_that_holds_the_most(most: int, largest: int) -> None:
    sizes = [nbytes for _, nbytes in kept(most)]
    assert sizes == [1 << bits for bits in range(len(sizes))]
    assert sizes[-1] == largest
    assert all(count >= 6 for count, _ in kept(most))
