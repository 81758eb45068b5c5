"""Tests of telemetry recording in the real core, with fake fronts and replicas."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import msgspec
import pytest

from appliance.snapshot import Snapshot
from store.telemetry import RESOLUTIONS
from store.telemetry_reader import TelemetryReader
from tests.core.conftest import Service, read_answer
from tests.waiting import wait_until

pytestmark = pytest.mark.system
Make = Callable[..., Service]


def test_every_second_of_a_replicas_death_can_be_read_back(make_service: Make) -> None:
    service = make_service().start_and_wait()
    read_answer(service.connect("m 3"))
    reader = TelemetryReader(service.state_dir / "history.db")
    [pid] = service.admin.status().models[0].replicas[0].pids
    killed_at = time.time()
    os.kill(pid, signal.SIGKILL)

    def recorded() -> list[Snapshot]:
        seconds = reader.samples(killed_at - 60, time.time(), RESOLUTIONS[0])
        return [msgspec.convert(one.sample.tree(), Snapshot) for one in seconds]

    wait_until(lambda: any(one.models[0].replicas[0].restarts for one in recorded()))
    # The core lists its processes only every 2 s, so a new process may be missing from the first samples.
    names = {("core", "core"), ("front-0", "front"), ("m-0", "replica")}

    def is_complete(one: Snapshot) -> bool:
        listed = {(process.name, process.role) for process in one.host.processes}
        return one.models[0].replicas[0].state == "ready" and names <= listed

    wait_until(
        lambda: is_complete(recorded()[-1]), description="a second with the new replica and its process"
    )
    # The latency of a request is reported for a limited time only, and not in the second in which it ends.
    wait_until(lambda: any(one.latency.e2e is not None and one.latency.e2e.count == 1 for one in recorded()))
    snapshots = recorded()
    before = [one for one in snapshots if one.at < killed_at]
    assert all(one.models[0].replicas[0].restarts == 0 for one in before)
    after = next(one for one in snapshots if one.models[0].replicas[0].restarts)
    assert "was killed by SIGKILL" in after.models[0].replicas[0].last_error
    last = snapshots[-1]
    assert last.totals.ended == 1 and last.tenants[0].name == "default"
    assert service.stop() == 0
    span = reader.span()
    assert span is not None and span[0] <= killed_at
    newest = reader.snapshot(span[1])
    assert newest is not None and newest.sample.value("totals.ended") == 1
