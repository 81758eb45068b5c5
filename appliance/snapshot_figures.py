"""All figures and texts of a snapshot by their names, such as `queue.running` or `models[demo].state`, which
are those of recorded telemetry (`store.samples`)."""

from __future__ import annotations

import msgspec

from appliance.snapshot import Snapshot
from store.samples import leaves

Value = str | float | int | bool | None


def named_values(snapshot: Snapshot) -> dict[str, Value]:
    """Return every figure and text of a snapshot by its name, apart from single requests and KV blocks."""
    kept = msgspec.structs.replace(
        snapshot,
        requests=[],
        kv=[one if one.blocks is None else msgspec.structs.replace(one, blocks=None) for one in snapshot.kv],
    )
    return dict(leaves(msgspec.to_builtins(kept)))
