"""Tests of recorded KV block maps: each map can be read back, and its frames are small."""

from __future__ import annotations

import asyncio
import random
import zlib
from array import array
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.admin.kv_blocks import RECORDED_EVERY_S, BlockMaps
from appliance.history.block_frames import (
    MAX_RECORDED_CELLS,
    RecordedBlocks,
    coarse,
    decode_blocks,
    encode_blocks,
)
from appliance.history.details import DetailEncoder, decode_details
from appliance.models.replica_blocks import BlockUseReader
from appliance.snapshot import NO_OWNER, BlockMap, with_blocks
from engine.rank_messages import BlockOwner, BlockUse
from tests.core.test_event_stream import a_request
from tests.core.test_recorded_details import at


def a_map(
    chance: random.Random, cells: int, requests: list[str], *, stride: int = 1, ages: bool = True
) -> BlockMap:
    """Return a map of KV blocks with random states and owners."""
    owners = [chance.choice([NO_OWNER, *range(len(requests))]) for _ in range(cells)]
    return BlockMap(
        stride=stride,
        states=bytes(chance.randrange(4) for _ in range(cells)),
        ages=bytes(chance.randrange(12) for _ in range(cells)) if ages else None,
        owners=array("H", owners).tobytes(),
        requests=requests,
        tenants=[f"tenant-{one[-1]}" for one in requests],
        request_blocks=[chance.randrange(90) for _ in requests],
        preemptions=[chance.randrange(3) for _ in requests],
    )


def story(seed: int, count: int) -> list[BlockMap]:
    """Return the maps of a replica whose requests arrive and end. Occasionally, the order of the requests or
    the size of the pool changes."""
    chance = random.Random(seed)
    requests: list[str] = []
    found = []
    for number in range(count):
        requests = [one for one in requests if chance.random() > 0.3]
        requests += [f"req-{number}-{one}" for one in range(chance.randrange(3))]
        if chance.random() < 0.1:
            chance.shuffle(requests)
        cells = chance.choice([0, 5, 64, 64, 64, 64])
        found.append(a_map(chance, cells, list(requests), ages=chance.random() > 0.05))
    return found


@given(st.integers(0, 1 << 30), st.integers(1, 30))
def test_every_map_is_decoded_from_its_frame_and_the_map_before(seed: int, count: int) -> None:
    encoded = decoded = None
    for one in story(seed, count):
        frame = encode_blocks(one, encoded)
        sent = msgspec.msgpack.decode(msgspec.msgpack.encode(frame), type=RecordedBlocks)
        decoded = decode_blocks(sent, decoded)
        assert decoded == one
        encoded = one


def test_a_map_has_a_limited_number_of_cells_which_describe_every_nth_block() -> None:
    full = a_map(random.Random(1), 5000, ["a", "b"], stride=2)
    small = coarse(full)
    assert len(small.states) <= MAX_RECORDED_CELLS and small.stride == 2 * 5
    assert small.states == full.states[::5] and small.ages == (full.ages or b"")[::5]
    assert array("H", small.owners) == array("H", full.owners)[::5]
    assert small.requests == full.requests and small.request_blocks == full.request_blocks
    assert coarse(small) is small


def test_a_map_in_which_little_changes_takes_few_bytes() -> None:
    chance = random.Random(2)
    before = a_map(chance, MAX_RECORDED_CELLS, [f"req-{number}" for number in range(60)])
    states = bytearray(before.states)
    for _ in range(30):
        states[chance.randrange(len(states))] = 2
    after = _without_the_oldest(msgspec.structs.replace(before, states=bytes(states)))

    def size(frame: RecordedBlocks) -> int:
        return len(zlib.compress(msgspec.msgpack.encode(frame), 1))

    assert size(encode_blocks(after, before)) < 400 < 1000 < size(encode_blocks(after, None))


def _without_the_oldest(blocks: BlockMap) -> BlockMap:
    owners = [NO_OWNER if one in (0, NO_OWNER) else one - 1 for one in array("H", blocks.owners)]
    return msgspec.structs.replace(
        blocks,
        owners=array("H", owners).tobytes(),
        requests=blocks.requests[1:],
        tenants=blocks.tenants[1:],
        request_blocks=blocks.request_blocks[1:],
        preemptions=blocks.preemptions[1:],
    )


def test_the_details_of_a_second_contain_the_maps_that_were_known_then() -> None:
    chance, encoder = random.Random(3), DetailEncoder()
    first, second = (a_map(chance, 100, ["r"]) for _ in range(2))
    told: list[dict[str, BlockMap]] = [
        {},
        {"a": first},
        {"a": first, "b": second},
        {"a": second, "b": second},
        {"b": second},
        {},
        {"a": first},
    ]
    documents = []
    for number, blocks in enumerate(told):
        encoded = encoder.encode(at(1000.0 + number, [a_request("r")]), blocks)
        assert encoded is not None
        documents.append(encoded[1])
        decoded = decode_details(documents)
        assert decoded is not None and decoded.blocks == blocks
    sizes = [len(one) for one in documents]
    encoded = encoder.encode(at(1007.0, [a_request("r")]), told[-1])
    assert encoded is not None and len(encoded[1]) < sizes[-1], "an unchanged map is not recorded again"


def test_the_map_after_a_lost_frame_is_a_full_frame() -> None:
    chance, encoder = random.Random(4), DetailEncoder()
    encoder.encode(at(1000.0, []), {"a": a_map(chance, 100, ["r"])})
    encoder.lose()
    newest = a_map(chance, 100, ["r", "s"])
    encoded = encoder.encode(at(1001.0, []), {"a": newest})
    assert encoded is not None and encoded[0]
    decoded = decode_details([encoded[1]])
    assert decoded is not None and decoded.blocks == {"a": newest}


def test_a_frame_that_does_not_fit_the_map_before_is_reported() -> None:
    chance = random.Random(5)
    before, after = a_map(chance, 10, ["r"]), a_map(chance, 10, ["r"])
    frame = encode_blocks(after, before)
    assert not frame.whole
    with pytest.raises(ValueError, match="missing"):
        decode_blocks(frame, None)
    with pytest.raises(ValueError, match="the maps differ in size: 20 bytes, then 10 bytes"):
        decode_blocks(frame, a_map(chance, 20, ["r"]))


def test_the_blocks_of_each_request_come_from_the_map() -> None:
    snapshot = at(1000.0, [a_request("r"), a_request("s")])
    blocks = a_map(random.Random(6), 10, ["s"])
    with_blocks(snapshot, {"m-0": blocks})
    found = [(one.blocks, one.preemptions) for one in snapshot.requests]
    assert found == [(None, None), (blocks.request_blocks[0], blocks.preemptions[0])]


def test_a_map_of_an_older_service_has_no_blocks_of_requests() -> None:
    snapshot = at(1000.0, [a_request("r")])
    blocks = msgspec.structs.replace(a_map(random.Random(6), 10, ["r"]), request_blocks=[], preemptions=[])
    with_blocks(snapshot, {"m-0": blocks})
    assert snapshot.requests[0].blocks is None


class Asked:
    """Stands in for a replica's processes, and counts the requests for the state of its KV blocks."""

    count = 0

    def ask_blocks(self) -> None:
        self.count += 1


def use(states: bytes) -> BlockUse:
    return BlockUse(1, states, b"\0" * len(states), b"\xff\xff" * len(states), [BlockOwner("r", 3, 1)])


def test_the_history_rarely_asks_a_replica_and_uses_the_answers_to_operators(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("appliance.models.replica_blocks.time.monotonic", lambda: now)

    async def steps() -> None:
        nonlocal now
        group: Any = Asked()
        reader = BlockUseReader(lambda: group)
        replica: Any = SimpleNamespace(name="m-0", blocks=reader)
        traffic: Any = SimpleNamespace(in_flight={"r": SimpleNamespace(tenant="acme")})
        maps = BlockMaps(lambda: [replica], traffic)
        for _ in range(3):
            assert maps.recent() == {}
        assert group.count == 1, "an answer is awaited"
        reader.received(use(b"\1"))
        first = maps.recent()["m-0"]
        assert first.states == b"\1" and first.tenants == ["acme"] and first.request_blocks == [3]
        now += RECORDED_EVERY_S - 0.5
        assert maps.recent()["m-0"] is first and group.count == 1
        # An operator's query brings a newer map, which the history then uses too.
        reading = asyncio.create_task(maps.read())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert group.count == 2
        reader.received(use(b"\2"))
        [shown] = await reading
        assert maps.recent()["m-0"] is shown.blocks and shown.blocks.states == b"\2"
        now += RECORDED_EVERY_S + 0.5
        assert maps.recent()["m-0"] is shown.blocks and group.count == 3
        reader.reset()
        assert maps.recent() == {}

    asyncio.run(steps())
