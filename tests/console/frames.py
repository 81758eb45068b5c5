"""Sources and sessions for the console tests."""

from __future__ import annotations

import asyncio
from functools import cache
from typing import get_args

from appliance.snapshot import Snapshot
from console.context import Context
from console.fake import FIXED_TIME, FakeSource
from console.screens.registry import all_views, alternate_views
from console.session import ConsoleSession
from console.source import ListName
from tests.snapshots import empty_snapshot

SIZES = ((120, 40), (80, 24))
VIEWS = [*all_views(), *alternate_views()]
VIEW_NAMES = [view.name for view in VIEWS]


def source(**options: float) -> FakeSource:
    """Return a small simulated service with a fixed clock."""
    return FakeSource(now=FIXED_TIME, **{"requests": 60, "blocks": 2048, "gpus": 4, "tenants": 8, **options})  # type: ignore[arg-type]


@cache
def _stepped(steps: int, interval_s: float) -> tuple[FakeSource, list[Snapshot]]:
    fake = source(interval_s=interval_s)
    return fake, [fake.step() for _ in range(steps)]


def session(steps: int = 40, *, interval_s: float = 0.5, write: bool = False) -> ConsoleSession:
    """Return a session that has received `steps` snapshots and has read all lists."""
    fake, snapshots = _stepped(steps, interval_s)
    made = ConsoleSession(fake, write=write)
    for snapshot in snapshots:
        made.accept(snapshot)
    for name in get_args(ListName):
        made.take_rows(name, asyncio.run(fake.rows(name)))
    return made


def unknown() -> Snapshot:
    """Return a snapshot of a service that has no measured values yet."""
    return empty_snapshot(FIXED_TIME)


def context(snapshot: Snapshot) -> Context:
    """Return a context whose history contains only this snapshot."""
    made = Context(snapshot=snapshot)
    made.history.add(snapshot)
    return made
