"""Snapshots for tests."""

from __future__ import annotations

from appliance.snapshot import Host, Latency, Queue, Rates, ServiceTotals, Snapshot


def empty_snapshot(at: float = 2.0) -> Snapshot:
    """Return a snapshot of a service that started one second before `at` and has measured nothing yet."""
    return Snapshot(
        at=at,
        started_at=at - 1.0,
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
