"""Recorded history for the console tests. The snapshots are written as the service writes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from appliance.core.recording import sampled_tree
from appliance.history.details import DetailEncoder
from appliance.snapshot import Snapshot
from console.fake import FIXED_TIME, FakeSource
from store.samples import Splitter
from store.schemas import HISTORY
from store.telemetry import TelemetryLog
from store.writer import Writer


def fake_seconds(count: int) -> list[Snapshot]:
    """Return the snapshots of `count` successive seconds of a small simulated service."""
    fake = FakeSource(seed=7, requests=60, blocks=2048, gpus=4, tenants=8, interval_s=1.0, now=FIXED_TIME)
    return [msgspec.msgpack.decode(msgspec.msgpack.encode(fake.step()), type=Snapshot) for _ in range(count)]


def record(path: Path, snapshots: Sequence[Snapshot]) -> Path:
    """Write snapshots to a new `history.db`."""
    writer = Writer(path, HISTORY, synchronous="NORMAL")
    writer.start()
    telemetry, splitter, encoder = TelemetryLog(writer), Splitter(), DetailEncoder()
    for one in snapshots:
        blocks = {cache.replica: cache.blocks for cache in one.kv if cache.blocks is not None}
        telemetry.record(splitter.split(one.at, sampled_tree(one)), encoder.encode(one, blocks))
    telemetry.close()
    writer.close()
    return path
