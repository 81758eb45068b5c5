"""Sources and frames for the tests of the console."""

from __future__ import annotations

import asyncio
from typing import get_args

from appliance.snapshot import Host, Latency, Queue, Rates, ServiceTotals, Snapshot
from console.context import Context
from console.fake import FIXED_TIME, FakeSource
from console.session import ConsoleSession
from console.source import ListName

SIZES = ((120, 40), (80, 24))


def source(**options: int) -> FakeSource:
    """Return a small simulated service with a fixed clock."""
    return FakeSource(now=FIXED_TIME, **{"requests": 60, "blocks": 2048, "gpus": 4, "tenants": 8, **options})


def session(steps: int = 40, *, write: bool = False) -> ConsoleSession:
    """Return a session that has seen `steps` snapshots and has read all lists."""
    fake = source()
    made = ConsoleSession(fake, write=write)
    for _ in range(steps):
        made.accept(fake.step())
    for name in get_args(ListName):
        made.take_rows(name, asyncio.run(fake.rows(name)))
    return made


def unknown() -> Snapshot:
    """Return a snapshot of a service that has measured nothing yet."""
    return Snapshot(
        at=FIXED_TIME,
        started_at=FIXED_TIME - 1.0,
        uptime_s=1.0,
        version="0.1.0",
        state="starting",
        totals=ServiceTotals(),
        rates=Rates(),
        latency=Latency(),
        queue=Queue(waiting=0, running=0, oldest_wait_s=0.0, waiting_tokens=0, limit=100),
        batches=[],
        kv=[],
        requests=[],
        gpus=[],
        models=[],
        tenants=[],
        alerts=[],
        host=Host(),
    )


def context(snapshot: Snapshot) -> Context:
    """Return the context of one snapshot."""
    made = Context(snapshot=snapshot)
    made.history.add(snapshot)
    return made
