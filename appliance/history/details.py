"""Snapshot details: the parts that are not recorded as numbers, namely unfinished requests, alerts, stalls
and KV block maps. Details are recorded every second as frames. A full frame contains all details; a partial
frame contains the changes since the preceding frame, in a few bytes per request. An hour of frames takes
several megabytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from appliance.events.frames import let_pass, signature
from appliance.history.block_frames import RecordedBlocks, coarse, decode_blocks, encode_blocks
from appliance.snapshot import Alert, BlockMap, Snapshot, Stall, UnfinishedRequest
from appliance.stalls import merged

MAX_RECORDED_REQUESTS = 1000
"""Maximum number of unfinished requests recorded each second. If there are more, the oldest are recorded."""
DETAIL_BYTES_PER_S = 16 << 10
"""Maximum average frame size, in bytes. If frames are larger, some seconds are not recorded."""
_SAVED_BYTES = 1 << 20
"""Maximum number of unused bytes that small frames can save up for a later, larger frame."""
_WHOLE_EVERY = 30
"""Every sequence of this many consecutive frames contains a full frame, so a reader never has to decode more
frames than this."""
_NO_BLOCKS: Mapping[str, BlockMap] = {}


class RecordedDetails(NamedTuple):
    """A snapshot's details, decoded from a frame."""

    at: float
    requests: list[UnfinishedRequest]
    alerts: list[Alert]
    stalls: list[Stall]
    blocks: dict[str, BlockMap]
    """Each replica's KV blocks, as coarse maps."""


class _Frame(msgspec.Struct, array_like=True, frozen=True):
    number: int
    """The frame's number. A partial frame contains the changes since the frame with the preceding number."""
    whole: bool
    at: float
    requests: list[UnfinishedRequest]
    """New requests, and requests with changes in fields other than tokens and times."""
    ended: list[int]
    """Indices of the finished requests in the preceding second's list of requests."""
    tokens: list[int]
    """Number of new output tokens of each unfinished request in the preceding second's list that is not in
    `requests`."""
    alerts: list[Alert] | None
    """All alerts, or None if they have not changed."""
    stalls: list[Stall] = []
    """In a full frame, all stalls; in a partial frame, the new stalls. Older recordings contain no stalls."""
    blocks: dict[str, RecordedBlocks | None] = {}
    """Each replica's KV block map, or None if the replica no longer has one. A full frame contains all maps,
    a partial frame only changed ones. Older recordings contain no maps."""


class _Known(NamedTuple):
    signature: tuple[object, ...]
    tokens: int | None


class _KnownBlocks(NamedTuple):
    source: BlockMap
    coarse: BlockMap


class DetailEncoder:
    """Encodes the details of successive snapshots as frames."""

    def __init__(self) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._number = 0
        self._since_whole = _WHOLE_EVERY
        self._requests: dict[str, _Known] = {}
        self._alerts: list[Alert] | None = None
        self._stalls: list[Stall] = []
        self._blocks: dict[str, _KnownBlocks] = {}
        self._saved_bytes = _SAVED_BYTES

    def encode(
        self, snapshot: Snapshot, blocks: Mapping[str, BlockMap] = _NO_BLOCKS
    ) -> tuple[bool, bytes] | None:
        """Encode the next frame. Return whether it is a full frame, and its bytes. Return None if the frame
        is too large to record. `blocks` contains each replica's KV blocks."""
        maps = {name: self._known(name, one) for name, one in blocks.items()}
        requests = {one.request_id: one for one in snapshot.requests[:MAX_RECORDED_REQUESTS]}
        self._number += 1
        self._since_whole += 1
        if self._since_whole >= _WHOLE_EVERY:
            frame = _Frame(
                self._number,
                True,
                snapshot.at,
                list(requests.values()),
                [],
                [],
                list(snapshot.alerts),
                snapshot.stalls,
                {name: encode_blocks(one.coarse, None) for name, one in maps.items()},
            )
        else:
            frame = self._changes(snapshot, requests, maps)
        document = zlib.compress(self._encode(frame), 1)
        self._saved_bytes = min(_SAVED_BYTES, self._saved_bytes + DETAIL_BYTES_PER_S)
        if len(document) > self._saved_bytes:
            self.lose()
            return None
        self._saved_bytes -= len(document)
        self._requests = {
            name: _Known(signature(one), one.generated_tokens) for name, one in requests.items()
        }
        self._alerts, self._stalls, self._blocks = list(snapshot.alerts), list(snapshot.stalls), maps
        if frame.whole:
            self._since_whole = 0
        return frame.whole, document

    def lose(self) -> None:
        """Make the next frame a full frame, because the last one was not recorded."""
        self._since_whole = _WHOLE_EVERY

    def _known(self, name: str, blocks: BlockMap) -> _KnownBlocks:
        known = self._blocks.get(name)
        return known if known is not None and known.source is blocks else _KnownBlocks(blocks, coarse(blocks))

    def _changes(
        self,
        snapshot: Snapshot,
        requests: dict[str, UnfinishedRequest],
        maps: dict[str, _KnownBlocks],
    ) -> _Frame:
        changed, ended, tokens = [], [], []
        for position, (name, known) in enumerate(self._requests.items()):
            one = requests.get(name)
            if one is None:
                ended.append(position)
            elif known.signature != signature(one) or (known.tokens is None) != (
                one.generated_tokens is None
            ):
                changed.append(one)
            else:
                tokens.append((one.generated_tokens or 0) - (known.tokens or 0))
        changed += [one for name, one in requests.items() if name not in self._requests]
        alerts = None if snapshot.alerts == self._alerts else list(snapshot.alerts)
        stalls = [one for one in snapshot.stalls if one not in self._stalls]
        blocks: dict[str, RecordedBlocks | None] = {name: None for name in self._blocks if name not in maps}
        for name, known_map in maps.items():
            before = self._blocks.get(name)
            if before is not known_map:
                blocks[name] = encode_blocks(known_map.coarse, None if before is None else before.coarse)
        return _Frame(self._number, False, snapshot.at, changed, ended, tokens, alerts, stalls, blocks)


def decode_details(documents: Iterable[bytes]) -> RecordedDetails | None:
    """Decode consecutive frames and return the details that result from the last one. The first one must be a
    full frame. Return None if there are no frames or one is missing. Raises ValueError if a frame is
    damaged."""
    number, at = -1, 0.0
    requests: list[UnfinishedRequest] = []
    alerts: list[Alert] = []
    stalls: list[Stall] = []
    blocks: dict[str, BlockMap] = {}
    for document in documents:
        try:
            frame = msgspec.msgpack.decode(zlib.decompress(document), type=_Frame)
        except (zlib.error, msgspec.DecodeError) as error:
            raise ValueError(f"recorded requests are damaged: {error}") from error
        if frame.whole:
            requests = frame.requests
        elif frame.number != number + 1:
            return None
        else:
            requests = _applied(requests, frame, frame.at - at)
        alerts = alerts if frame.alerts is None else frame.alerts
        stalls = frame.stalls if frame.whole else merged(stalls, frame.stalls)
        blocks = _applied_blocks({} if frame.whole else blocks, frame.blocks)
        number, at = frame.number, frame.at
    return None if number < 0 else RecordedDetails(at, requests, alerts, stalls, blocks)


def _applied(requests: list[UnfinishedRequest], frame: _Frame, passed_s: float) -> list[UnfinishedRequest]:
    changed = {one.request_id: one for one in frame.requests}
    ended, tokens = set(frame.ended), iter(frame.tokens)
    found = []
    for position, one in enumerate(requests):
        if position in ended:
            continue
        if (other := changed.pop(one.request_id, None)) is not None:
            found.append(other)
            continue
        let_pass(one, passed_s)
        further = next(tokens, 0)
        if one.generated_tokens is not None:
            one.generated_tokens += further
        found.append(one)
    return [*found, *changed.values()]


def _applied_blocks(
    blocks: dict[str, BlockMap], changes: Mapping[str, RecordedBlocks | None]
) -> dict[str, BlockMap]:
    found = dict(blocks)
    for name, change in changes.items():
        if change is None:
            found.pop(name, None)
            continue
        try:
            found[name] = decode_blocks(change, found.get(name))
        except (ValueError, IndexError) as error:
            raise ValueError(f"recorded KV blocks are damaged: {error}") from error
    return found
