"""Tests that all ranks of a group exit and leave nothing behind after one of them is killed or
stopped. They cover the states of a rank that `test_deaths` and `attacks.test_replicas` do not cover.
`scripts/soak` tests every state ten times."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.system.attacks.reading import configured
from tests.system.rank_faults import CPU_SETTINGS, FLAGS, Expected, inflict, undisturbed
from tests.system.service import Service

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Service]:
    with configured(CPU_SETTINGS, *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def expected(two_ranks: Service) -> Expected:
    return undisturbed(two_ranks)


@pytest.mark.parametrize(
    ("fault", "state", "victim"),
    [
        (signal.SIGKILL, "idle", 1),
        (signal.SIGSTOP, "idle", 0),
        (signal.SIGKILL, "prompt", 0),
        (signal.SIGSTOP, "prompt", 1),
    ],
    ids=["killed idle", "stopped idle", "killed in a prompt", "stopped in a prompt"],
)
def test_a_fault_of_a_rank_ends_its_group_and_streams_continue(
    two_ranks: Service, expected: Expected, fault: signal.Signals, state: str, victim: int
) -> None:
    inflict(two_ranks, expected, fault, state, victim)
