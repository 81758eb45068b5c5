"""A snapshot's numbers and texts, under their names in recorded telemetry (`store.samples`), such as
`queue.running` or `models[demo].state`."""

from __future__ import annotations

import msgspec

from appliance.snapshot import Snapshot
from store.samples import leaves

SnapshotValue = str | float | int | bool | None


def named_values(snapshot: Snapshot) -> dict[str, SnapshotValue]:
    """Return all of a snapshot's numbers and texts by name, except those of individual requests, stalls and
    KV blocks."""
    kept = msgspec.structs.replace(
        snapshot,
        requests=[],
        stalls=[],
        kv=[one if one.blocks is None else msgspec.structs.replace(one, blocks=None) for one in snapshot.kv],
    )
    return dict(leaves(msgspec.to_builtins(kept)))
