"""A short version of `scripts/soak --kills`: one round that kills a replica in each state."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.system.replica_kills import STATES, Kills, kills

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def running() -> Iterator[Kills]:
    with kills() as made:
        yield made


@pytest.mark.parametrize("state", STATES)
def test_streams_continue_with_the_same_tokens_after_a_kill(running: Kills, state: str) -> None:
    running.kill_during(state)
