"""Recorded KV block maps, which are part of the details recorded each second (`appliance.history.details`). A
recorded map is coarse: its number of cells is limited. A partial frame contains the differences from the
preceding map. Most blocks do not change within a second, so most differences are zero and compress well.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from appliance.snapshot import NO_OWNER, BlockMap

MAX_RECORDED_CELLS = 1024
"""Maximum number of blocks in a recorded map. If a replica has more, the map contains only every n-th
block."""


class RecordedBlocks(msgspec.Struct, array_like=True, frozen=True):
    """A frame of the recording: a whole map, or the differences from the preceding map."""

    whole: bool
    stride: int
    states: bytes
    """The block states. In a partial frame, they are XORed with those in the preceding map, as are `ages` and
    `owners`."""
    ages: bytes | None
    owners: bytes
    requests: list[str]
    """In a whole map, all requests; in a partial frame, those that are new since the preceding map."""
    tenants: list[str]
    ended: list[int]
    """Indices of the finished requests in the preceding map."""
    blocks: list[int]
    """Number of blocks of each request or, in a partial frame, the change in that number since the preceding
    map. The same applies to `preemptions`."""
    preemptions: list[int]


def coarse(blocks: BlockMap) -> BlockMap:
    """Return a KV block map, reduced to at most `MAX_RECORDED_CELLS` cells."""
    step = -(-len(blocks.states) // MAX_RECORDED_CELLS)
    if step <= 1:
        return blocks
    return msgspec.structs.replace(
        blocks,
        stride=blocks.stride * step,
        states=blocks.states[::step],
        ages=None if blocks.ages is None else blocks.ages[::step],
        owners=array("H", blocks.owners)[::step].tobytes(),
    )


def encode_blocks(blocks: BlockMap, before: BlockMap | None) -> RecordedBlocks:
    """Encode a KV block map as a frame. `before` is the preceding map, or None to encode the whole map."""
    frame = None if before is None else _changes(blocks, before)
    return frame or RecordedBlocks(
        True,
        blocks.stride,
        blocks.states,
        blocks.ages,
        blocks.owners,
        blocks.requests,
        blocks.tenants,
        [],
        blocks.request_blocks,
        blocks.preemptions,
    )


def decode_blocks(frame: RecordedBlocks, before: BlockMap | None) -> BlockMap:
    """Apply a frame to the preceding KV block map and return the resulting map. Raises ValueError if the
    frame does not fit the preceding map."""
    if frame.whole:
        base = BlockMap(states=b"", owners=b"", requests=[], tenants=[])
        states, ages, owners = frame.states, frame.ages, frame.owners
    elif before is None:
        raise ValueError("the preceding KV block map is missing")
    else:
        base = _without(before, frame.ended)
        states = _xor(frame.states, base.states)
        ages = None if frame.ages is None else _xor(frame.ages, base.ages or b"")
        owners = _xor(frame.owners, base.owners)
    return BlockMap(
        stride=frame.stride,
        states=states,
        ages=ages,
        owners=owners,
        requests=[*base.requests, *frame.requests],
        tenants=[*base.tenants, *frame.tenants],
        request_blocks=_plus(frame.blocks, base.request_blocks),
        preemptions=_plus(frame.preemptions, base.preemptions),
    )


def _changes(blocks: BlockMap, before: BlockMap) -> RecordedBlocks | None:
    """Return the partial frame that turns the map `before` into `blocks`, or None if no partial frame can do
    so."""
    if _shape(blocks) != _shape(before):
        return None
    unfinished = set(blocks.requests)
    ended = [number for number, one in enumerate(before.requests) if one not in unfinished]
    base = _without(before, ended)
    kept = len(base.requests)
    if (blocks.requests[:kept], blocks.tenants[:kept]) != (base.requests, base.tenants):
        return None
    return RecordedBlocks(
        False,
        blocks.stride,
        _xor(blocks.states, base.states),
        None if blocks.ages is None or base.ages is None else _xor(blocks.ages, base.ages),
        _xor(blocks.owners, base.owners),
        blocks.requests[kept:],
        blocks.tenants[kept:],
        ended,
        _plus(blocks.request_blocks, [-one for one in base.request_blocks]),
        _plus(blocks.preemptions, [-one for one in base.preemptions]),
    )


def _shape(blocks: BlockMap) -> tuple[int, int, bool]:
    return len(blocks.states), blocks.stride, blocks.ages is None


def _without(blocks: BlockMap, ended: Sequence[int]) -> BlockMap:
    """Return the KV block map without the requests at the indices in `ended`. The blocks of these requests
    then have no owner."""
    if not ended:
        return blocks
    removed = set(ended)
    left = [number for number in range(len(blocks.requests)) if number not in removed]
    numbers = {former: number for number, former in enumerate(left)}
    owners = array("H", [numbers.get(owner, NO_OWNER) for owner in array("H", blocks.owners)])
    return msgspec.structs.replace(
        blocks,
        owners=owners.tobytes(),
        requests=[blocks.requests[number] for number in left],
        tenants=[blocks.tenants[number] for number in left],
        request_blocks=[blocks.request_blocks[number] for number in left],
        preemptions=[blocks.preemptions[number] for number in left],
    )


def _xor(one: bytes, other: bytes) -> bytes:
    if len(one) != len(other):
        raise ValueError(f"the maps differ in size: {len(other)} bytes, then {len(one)} bytes")
    return (int.from_bytes(one) ^ int.from_bytes(other)).to_bytes(len(one))


def _plus(values: Sequence[int], others: Sequence[int]) -> list[int]:
    """Return the element-wise sums of two sequences. `others` may be shorter; its missing elements count as
    0."""
    return [value + (others[number] if number < len(others) else 0) for number, value in enumerate(values)]
