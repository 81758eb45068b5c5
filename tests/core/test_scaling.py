"""Tests that a real core with simulated replicas adds and removes replicas as the load changes."""

from __future__ import annotations

import socket
from collections.abc import Callable

import pytest

from appliance.actions.parameters import CancelRequest
from tests.core.conftest import Service
from tests.waiting import wait_until

pytestmark = pytest.mark.system
STREAMS = 50
"""Number of concurrent streams. They take more than 70% of the 64 slots of a simulated replica."""


def test_a_replica_is_added_while_another_one_finishes_its_requests(
    make_service: Callable[..., Service],
) -> None:
    service = make_service("[autoscaling]\ncooldown_s = 0\nidle_s = 1")
    with service.config.open("a") as file:
        file.write("max_replicas = 2\n")
    service.start_and_wait()

    streams: list[socket.socket] = []

    def states() -> dict[str, str]:
        return {one.name: one.state for one in service.admin.status().models[0].replicas}

    def add_load() -> set[str]:
        """Start streams on all replicas. Return their ids."""
        before = open_requests(service)
        for _ in range(STREAMS):
            streams.append(service.connect("m 1000000"))
        wait_until(lambda: len(open_requests(service) - before) == STREAMS, description="the streams")
        return open_requests(service) - before

    def end_load(ids: set[str]) -> None:
        for request_id in ids:
            service.admin.act(CancelRequest(request_id=request_id))

    assert states() == {"m-0": "ready"}
    load = add_load()
    wait_until(lambda: states().get("m-1") == "ready", description=f"the second replica ({service.log})")
    # The new replica gets requests only after its first report, which states its credit.
    wait_until(lambda: service.admin.status().models[0].replicas[1].credit_seqs > 0, description="its credit")
    streams.append(service.connect("m 1000000"))  # runs on the second replica, which has more credit
    wait_until(
        lambda: service.admin.status().models[0].replicas[1].running == 1, description="the long stream"
    )
    end_load(load)
    wait_until(lambda: states().get("m-1") == "draining", description="the removal of the second replica")
    load = add_load()
    wait_until(lambda: states().get("m-2") == "ready", description="a third replica")
    assert states()["m-1"] == "draining"
    end_load(open_requests(service))
    wait_until(lambda: "m-1" not in states(), description="the end of the second replica")


def open_requests(service: Service) -> set[str]:
    return {row.request_id for row in service.rows() if row.state == "open"}
