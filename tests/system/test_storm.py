"""A short version of `scripts/soak`."""

from __future__ import annotations

import pytest

from tests.system.attacks.reading import configured
from tests.system.rank_faults import SETTINGS
from tests.system.storm import check_service, storm

pytestmark = pytest.mark.system


def test_after_a_storm_of_requests_and_kills_nothing_is_lost_or_left_behind() -> None:
    with configured(SETTINGS, "--fronts", "2", "--tensor-parallel-size", "2") as running:
        kills = streamed = 0
        for seed in range(7, 15):  # on a slow machine, few streams finish between one kill and the next
            tally = storm(running, seconds=6, seed=seed, kill_every_s=2.0)
            check_service(running, tally)
            kills, streamed = kills + tally.kills, streamed + tally.outcomes.get("streamed", 0)
            if kills >= 2 and streamed > 5:
                break
        assert kills >= 2 and streamed > 5
