"""Whom the switchboard tells what, without processes: the order in which deaths become known."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.traffic.credits import CreditAccount
from engine.messages import Report
from tests.watch.parts import Parts


@pytest.fixture
def board(tmp_path: Path) -> Iterator[Any]:
    parts = Parts(tmp_path)
    yield parts.switchboard
    parts.close()


@pytest.mark.parametrize("replica_first", [True, False])
def test_nothing_is_remembered_of_a_front_that_is_gone(board: Any, replica_first: bool) -> None:
    replica = SimpleNamespace(name="demo-0", account=CreditAccount("demo-0", "demo", "cpu"))
    front = board.fronts[0]
    report = Report(step=1, credit_rows=1, credit_tokens=1, finished=[], fronts_gone=[front.name])

    async def scenario() -> None:
        board.ledger.add_replica(replica.account)
        board.front_started(front)
        if replica_first:
            board.replica_reported(replica, report)
            assert board.ledger._lost_fronts == {front.name}
        board.front_lost(front, front.name)
        if not replica_first:
            board.replica_reported(replica, report)
        assert board.ledger._lost_fronts == set()

    asyncio.run(scenario())
