"""Tests of how the front pool, the model manager and the request manager work together, without processes."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from appliance.core.serving import ServingParts
from appliance.traffic.credits import CreditAccount
from engine.rank_messages import Report
from tests.monitoring.parts import Parts


@pytest.fixture
def serving(tmp_path: Path) -> Iterator[ServingParts]:
    parts = Parts(tmp_path)
    yield parts.serving
    parts.close()


def ready_replica(**fields: Any) -> Any:
    return SimpleNamespace(
        name="demo-0",
        model="demo",
        account=CreditAccount("demo-0", "demo", "cpu"),
        answers=True,
        group=SimpleNamespace(),
        described=None,
        info=None,
        **fields,
    )


def test_a_replica_that_not_every_front_can_reach_is_restarted_without_requests(
    serving: ServingParts,
) -> None:
    def attach_front(name: str) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    killed: list[str] = []
    replica = ready_replica(kill=killed.append)
    replica.group.attach_front = attach_front
    serving.fronts.front_started(serving.fronts.fronts[0])
    serving.models.connections.replica_ready(replica)
    assert killed == ["its channels to the fronts could not be created: [Errno 24] Too many open files"]
    assert serving.requests.state.models["demo"].accounts == []
    serving.models.connections.replica_exited(replica)


def test_fronts_that_start_later_are_attached_to_ready_replicas_and_not_to_ended_ones(
    serving: ServingParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def attach_front(name: str) -> int:
        opened.append(name)
        return os.open(os.devnull, os.O_RDONLY)

    replica, front = ready_replica(), serving.fronts.fronts[0]
    replica.group.attach_front = attach_front
    serving.models.connections.replica_ready(replica)
    assert opened == []
    serving.fronts.front_started(front)
    assert opened == ["front-0"]
    serving.models.connections.replica_exited(replica)
    serving.fronts.front_started(front)
    assert opened == ["front-0"]


@pytest.mark.parametrize("replica_first", [True, False])
def test_nothing_is_remembered_of_an_ended_front(serving: ServingParts, replica_first: bool) -> None:
    replica: Any = SimpleNamespace(name="demo-0", account=CreditAccount("demo-0", "demo", "cpu"))
    front = serving.fronts.fronts[0]
    report = Report(step=1, credit_seqs=1, credit_tokens=1, finished=[], disconnected_fronts=[front.name])

    async def scenario() -> None:
        serving.requests.add_replica(replica.account)
        serving.fronts.front_started(front)
        if replica_first:
            serving.models.connections.replica_reported(replica, report)
            assert serving.requests.state.broken_fronts == {front.name}
        serving.fronts.front_exited(front, front.name)
        if not replica_first:
            serving.models.connections.replica_reported(replica, report)
        assert serving.requests.state.broken_fronts == set()

    asyncio.run(scenario())
