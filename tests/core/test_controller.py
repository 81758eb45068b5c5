"""Whom the switchboard tells what, without processes: the order in which deaths become known."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.traffic.credits import CreditAccount
from engine.messages import Report
from tests.monitoring.parts import Parts


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Any]:
    parts = Parts(tmp_path)
    yield parts.switchboard
    parts.close()


def test_a_replica_that_not_every_front_can_reach_gets_no_requests_and_starts_anew(board: Any) -> None:
    def attach_front(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    killed: list[str] = []
    account = CreditAccount("demo-0", "demo", "cpu")
    group = SimpleNamespace(attach_front=attach_front)
    replica = SimpleNamespace(
        name="demo-0",
        model="demo",
        account=account,
        group=group,
        described=None,
        info=None,
        kill=killed.append,
    )
    board.front_started(board.fronts[0])
    board.replica_ready(replica)
    assert killed == ["its channels to fronts could not be made: [Errno 24] Too many open files"]
    assert board.requests._models["demo"].accounts == []
    board.replica_lost(replica)


@pytest.mark.parametrize("replica_first", [True, False])
def test_nothing_is_remembered_of_a_front_that_is_gone(board: Any, replica_first: bool) -> None:
    replica = SimpleNamespace(name="demo-0", account=CreditAccount("demo-0", "demo", "cpu"))
    front = board.fronts[0]
    report = Report(step=1, credit_seqs=1, credit_tokens=1, finished=[], fronts_gone=[front.name])

    async def scenario() -> None:
        board.requests.add_replica(replica.account)
        board.front_started(front)
        if replica_first:
            board.replica_reported(replica, report)
            assert board.requests._lost_fronts == {front.name}
        board.front_lost(front, front.name)
        if not replica_first:
            board.replica_reported(replica, report)
        assert board.requests._lost_fronts == set()

    asyncio.run(scenario())
