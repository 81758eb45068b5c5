"""Tests of recorded requests and alerts: every second can be read back, and the space used is bounded."""

from __future__ import annotations

import random
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.history.details import (
    DETAIL_BYTES_PER_S,
    MAX_RECORDED_REQUESTS,
    DetailEncoder,
    decode_details,
)
from appliance.snapshot import Alert, Snapshot, Stall, UnfinishedRequest
from appliance.stalls import merged
from tests.core.test_event_stream import a_request
from tests.core.test_snapshot import snapshot


def an_alert(name: str, **fields: Any) -> Alert:
    return Alert(id=name, rule="r", severity="info", state="firing", where="m", description="w", **fields)


def a_stall(replica: str, at: float, ms: float) -> Stall:
    return Stall(
        replica=replica, at=at, ms=ms, mean_ms=10.0, decodes=3, prompt_tokens=512, request="r", tenant="t"
    )


def at(seconds: float, requests: list[UnfinishedRequest], alerts: list[Alert] | None = None) -> Snapshot:
    copies = [msgspec.structs.replace(one) for one in requests]
    return msgspec.structs.replace(snapshot(), at=seconds, requests=copies, alerts=alerts or [])


def story(seed: int, seconds: int) -> list[Snapshot]:
    """Return the snapshots of a service with requests that arrive, go through their phases, generate tokens
    and end."""
    chance = random.Random(seed)
    requests: list[UnfinishedRequest] = []
    stalls: list[Stall] = []
    found, now = [], 1000.0
    for second in range(seconds):
        passed_s = chance.choice([1.0, 1.0, 1.5])
        now += passed_s
        requests = [one for one in requests if chance.random() > 0.2]
        for one in requests:
            one.age_s += passed_s
            if one.phase == "decode":
                one.generated_tokens = (one.generated_tokens or 0) + chance.randrange(90)
            elif one.phase == "queued" and chance.random() < 0.5:
                one.phase, one.state, one.generated_tokens = "decode", "running", 1
            elif one.phase == "queued":
                one.queue_s = (one.queue_s or 0.0) + passed_s
        for number in range(chance.randrange(4)):
            name = f"req-{second}-{number}"
            requests.append(a_request(name, phase="queued", state="queued", generated_tokens=None))
        alerts = [an_alert("a", value=float(second // 7))] if second % 20 > 5 else []
        if chance.random() < 0.7:
            stalls = merged(stalls, [a_stall(f"m-{chance.randrange(2)}", now, chance.uniform(100, 200))])
        found.append(msgspec.structs.replace(at(now, requests, alerts), stalls=stalls))
    return found


@given(st.integers(0, 1 << 30), st.integers(1, 45))
def test_every_second_is_decoded_from_the_frames_since_the_last_whole_frame(seed: int, seconds: int) -> None:
    encoder, frames = DetailEncoder(), list[bytes]()
    for one in story(seed, seconds):
        encoded = encoder.encode(one)
        assert encoded is not None
        whole, document = encoded
        frames = [document] if whole else [*frames, document]
        assert len(frames) <= 30
        decoded = decode_details(frames)
        assert decoded is not None and decoded.at == one.at
        assert decoded.alerts == one.alerts and decoded.stalls == one.stalls
        # An age is computed by adding the times between frames, so its last digits may differ.
        for known, sent in zip(decoded.requests, one.requests, strict=True):
            assert known.age_s == pytest.approx(sent.age_s) and known.queue_s == pytest.approx(sent.queue_s)
            assert msgspec.structs.replace(known, age_s=sent.age_s, queue_s=sent.queue_s) == sent


def test_a_missing_frame_makes_the_details_unknown_until_the_next_whole_frame() -> None:
    encoder = DetailEncoder()
    frames = [encoder.encode(one) for one in story(1, 40)]
    documents = [frame[1] for frame in frames if frame is not None]
    assert decode_details([documents[0], documents[2]]) is None
    assert decode_details([]) is None
    assert [number for number, frame in enumerate(frames) if frame is not None and frame[0]] == [0, 30]


def test_a_frame_that_was_not_recorded_is_followed_by_a_whole_one() -> None:
    encoder, seconds = DetailEncoder(), story(2, 5)
    encoder.encode(seconds[0])
    encoder.lose()
    encoded = encoder.encode(seconds[1])
    assert encoded is not None and encoded[0]
    decoded = decode_details([encoded[1]])
    assert decoded is not None and decoded.requests == seconds[1].requests


def test_frames_stay_within_their_mean_size_and_recording_continues() -> None:
    encoder, chance = DetailEncoder(), random.Random(3)
    sizes = []
    for second in range(60):
        # In every second, all earlier requests are replaced by new ones.
        requests = [
            a_request(f"req-{chance.getrandbits(96):024x}") for _ in range(MAX_RECORDED_REQUESTS + 100)
        ]
        encoded = encoder.encode(at(1000.0 + second, requests))
        if encoded is not None:
            decoded = decode_details([encoded[1]])
            assert encoded[0] is False or (
                decoded is not None and len(decoded.requests) == MAX_RECORDED_REQUESTS
            )
        sizes.append(0 if encoded is None else len(encoded[1]))
    assert sum(sizes) <= 60 * DETAIL_BYTES_PER_S + (1 << 20)
    assert any(sizes[45:])


def test_frames_that_were_recorded_before_stalls_existed_can_be_read() -> None:
    encoded = DetailEncoder().encode(at(1000.0, [a_request("r")], [an_alert("a")]))
    assert encoded is not None
    former = msgspec.msgpack.decode(zlib.decompress(encoded[1]))[:-1]
    decoded = decode_details([zlib.compress(msgspec.msgpack.encode(former))])
    assert decoded is not None and decoded.stalls == []
    assert [one.request_id for one in decoded.requests] == ["r"] and decoded.alerts == [an_alert("a")]


def test_a_damaged_frame_is_reported() -> None:
    with pytest.raises(ValueError, match="damaged"):
        decode_details([b"nonsense"])
