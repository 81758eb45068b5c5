"""The short form of `scripts/soak`."""

from __future__ import annotations

import pytest

from tests.system.service import service
from tests.system.storm import check_house, storm

pytestmark = pytest.mark.system


def test_after_a_storm_of_requests_and_kills_the_house_is_in_order() -> None:
    with service("--fronts", "2", "--tensor-parallel-size", "2") as running:
        tally = storm(running, seconds=15, seed=7)
        assert tally.kills >= 2
        assert tally.outcomes.get("streamed", 0) > 5
        check_house(running, tally)
