"""Tests of the struct that the console, `appliance top` and the event stream share."""

from __future__ import annotations

import msgspec

from appliance.protocol import InFlight
from appliance.snapshot import BlockMap, KvCache, ServiceTotals, Snapshot, UnfinishedRequest
from tests.snapshots import empty_snapshot


def snapshot() -> Snapshot:
    blocks = BlockMap(states=b"\0\1\2", owners=b"\xff\xff\xff\xff\0\0", requests=["req-1"], tenants=["a"])
    made = empty_snapshot()
    made.kv = [
        KvCache(
            model="demo",
            replica="demo-1",
            blocks_total=3,
            blocks_used=1,
            blocks_cached=1,
            block_tokens=64,
            blocks=blocks,
        )
    ]
    return made


def test_a_snapshot_survives_json() -> None:
    before = snapshot()
    assert msgspec.json.decode(msgspec.json.encode(before), type=Snapshot) == before


def test_a_request_has_every_value_of_the_admin_api() -> None:
    assert set(InFlight.__struct_fields__) <= set(UnfinishedRequest.__struct_fields__)


def test_values_that_were_not_measured_are_null_and_not_zero() -> None:
    sent = msgspec.json.decode(msgspec.json.encode(ServiceTotals()))
    assert set(sent.values()) == {None}
