"""Tests of a real core's event stream: frames, snapshots and slow readers."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import msgspec
import pytest

from appliance import calls
from appliance.actions.parameters import CreateKey, CreateTenant
from appliance.admin.events import EventFeed
from appliance.calls import AdminError
from appliance.client import AdminClient
from appliance.events.async_client import AsyncAdminClient
from appliance.events.frames import Frame, MissingFrameError, SnapshotAssembler
from appliance.snapshot import Snapshot, UnfinishedRequest
from tests.core.conftest import Service, read_answer, running_core
from tests.core.test_snapshot import snapshot
from tests.waiting import wait_until

pytestmark = pytest.mark.system


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with running_core(tmp_path_factory.mktemp("core")) as service:
        yield service


def first(snapshots: Iterator[Snapshot], matches: Callable[[Snapshot], bool]) -> Snapshot:
    """Return the first snapshot that matches. Fail after 500 snapshots, which take minutes because the stream
    sends only several per second."""
    for _, one in zip(range(500), snapshots, strict=False):
        if matches(one):
            return one
    raise AssertionError("no snapshot matches")


def test_a_snapshot_has_the_same_values_as_the_admin_api(running: Service) -> None:
    for _ in range(3):
        read_answer(running.connect("m 3"))
    running.admin.act(CreateTenant(name="acme"))

    def is_complete(one: Snapshot) -> bool:
        return one.latency.e2e is not None and one.latency.e2e.count == 3 and bool(one.host.processes)

    seen = first(running.admin.snapshots(4), is_complete)
    status = running.admin.status()
    assert (seen.pid, seen.state, seen.version) == (status.pid, "ready", status.version)
    assert seen.started_at == status.started_at
    assert [model.name for model in seen.models] == ["m"] and seen.models[0].state == "ready"
    totals = seen.totals
    assert (totals.admitted, totals.ended, totals.failed, totals.billed_tokens) == (3, 3, 0, 9)
    assert {one.name for one in seen.tenants} == {"acme", "default", "local"}
    assert [(one.replica, one.model) for one in seen.batches] == [("m-0", "m")]
    assert {one.name: one.pid for one in seen.host.processes}["core"] == status.pid
    assert seen.host.memory_bytes and seen.queue.limit == status.queue.limit


def test_a_request_appears_counts_its_tokens_grows_older_and_disappears(running: Service) -> None:
    snapshots = running.admin.snapshots(4)
    assert next(snapshots).requests == []
    asked = running.connect("m 100000")
    begun = first(snapshots, lambda one: bool(one.requests) and one.requests[0].phase == "decode")
    tokens, age_s, at = begun.requests[0].generated_tokens or 0, begun.requests[0].age_s, begun.at
    later = first(snapshots, lambda one: one.at > at + 2 and (one.requests[0].generated_tokens or 0) > tokens)
    assert later.requests[0].age_s - age_s == pytest.approx(later.at - at, abs=0.01)
    listed = running.admin.in_flight()[0]
    assert (listed.request_id, listed.phase) == (later.requests[0].request_id, "decode")
    running.admin.cancel_request(listed.request_id)
    first(snapshots, lambda one: one.requests == [])
    asked.close()


def test_a_frame_contains_only_what_has_changed(running: Service) -> None:
    frames = running.admin.follow(calls.events(4))
    opening, *later = [next(frames) for _ in range(4)]
    assert opening.whole and set(opening.fields) == set(Snapshot.__struct_fields__) - {"requests"}
    assert [frame.seq for frame in later] == [opening.seq + 1, opening.seq + 2, opening.seq + 3]
    for frame in later:
        assert not frame.whole and "at" in frame.fields
        assert not {"version", "run_dir", "started_at", "queue", "tenants"} & set(frame.fields)


def test_a_stream_ends_after_the_number_of_frames_that_was_asked_for(running: Service) -> None:
    call = calls.events(4)._replace(path="/events?hz=4&frames=3")
    assert [frame.whole for frame in running.admin.follow(call)] == [True, False, False]


def test_the_asynchronous_client_delivers_snapshots(running: Service) -> None:
    async def two() -> list[Snapshot]:
        snapshots = AsyncAdminClient(running.run_dir).snapshots(4)
        try:
            return [await anext(snapshots), await anext(snapshots)]
        finally:
            await snapshots.aclose()

    before, after = asyncio.run(two())
    assert 0 < after.at - before.at < 60 and before.pid == after.pid


def test_a_read_key_may_follow_and_a_key_without_the_scope_may_not(running: Service) -> None:
    secrets = [
        running.admin.act(CreateKey(name="k", scopes=(scope,))).key  # type: ignore[attr-defined]
        for scope in ("read", "inference")
    ]
    assert next(AdminClient(running.run_dir, key=secrets[0]).snapshots()).state == "ready"
    with pytest.raises(AdminError, match="scope"):
        next(AdminClient(running.run_dir, key=secrets[1]).snapshots())
    with pytest.raises(AdminError, match="hz='9' is not valid"):
        next(running.admin.snapshots(9))


def test_the_predicted_duration_of_a_drain_follows_the_requests(running: Service) -> None:
    def eta_s() -> float | None:
        return running.admin.status().models[0].drain_eta_s

    asked = running.connect("m 100000")
    wait_until(lambda: (eta_s() or 0.0) > 0.0, description="a prediction of the running request")
    running.admin.cancel_request(running.admin.in_flight()[0].request_id)
    asked.close()
    wait_until(lambda: eta_s() == 0.0, description="the end of the request")


def test_a_client_that_does_not_read_its_stream_delays_nobody_and_takes_no_memory(running: Service) -> None:
    sock = socket.socket(socket.AF_UNIX)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.connect(str(running.run_dir / "admin.sock"))
    sock.sendall(b"GET /events?hz=4 HTTP/1.1\r\nhost: a\r\n\r\n")
    others = running.admin.snapshots(4)
    seen = [next(others) for _ in range(12)]
    assert seen[-1].at - seen[0].at >= 11 * 0.2
    sock.close()


def a_request(name: str, **fields: Any) -> UnfinishedRequest:
    known: dict[str, Any] = {
        "state": "running",
        "model": "m",
        "tenant": "t",
        "key_id": "",
        "peer": "",
        "front": "front-0",
        "replica": "m-0",
        "attempt": 0,
        "age_s": 1.0,
        "prompt_tokens": 4,
        "max_tokens": 9,
        "phase": "decode",
        "generated_tokens": 1,
        "queue_s": 0.5,
        "ttft_s": 0.6,
        **fields,
    }
    return UnfinishedRequest(request_id=name, **known)


def at(seconds: float, *requests: UnfinishedRequest, **fields: Any) -> Snapshot:
    return msgspec.structs.replace(snapshot(), at=seconds, requests=list(requests), **fields)


def sent(feed: EventFeed, one: Snapshot) -> Frame:
    feed.take(one)
    return msgspec.json.decode(feed.delta, type=Frame)


def test_frames_rebuild_every_snapshot() -> None:
    async def never() -> Snapshot:
        raise AssertionError

    feed, assembler = EventFeed(never, 0.5), SnapshotAssembler()
    story = [
        at(10.0, a_request("a"), a_request("b", phase="queued", state="queued", generated_tokens=None)),
        at(
            10.5,
            a_request("a", age_s=1.5, generated_tokens=7),
            a_request("b", phase="queued", state="queued", generated_tokens=None, age_s=1.5, queue_s=1.0),
        ),
        at(11.0, a_request("b", age_s=2.0, phase="prefill", queue_s=1.2), reason="draining"),
        at(11.5, a_request("b", age_s=2.5, phase="prefill", queue_s=1.2), a_request("c", age_s=0.1)),
        # The replica of request b exited, so b is queued again.
        at(12.0, a_request("b", age_s=3.0, phase="queued", attempt=1, queue_s=1.2)),
        at(12.5, a_request("b", age_s=3.5, phase="queued", attempt=1, queue_s=1.2)),
    ]
    frames = [sent(feed, one) for one in story]
    assert [(len(f.requests), f.ended, f.generated_tokens) for f in frames] == [
        (2, [], {}),
        (0, [], {"a": 7}),
        (1, ["a"], {}),
        (1, [], {}),
        (1, ["c"], {}),
        (0, [], {}),
    ]
    assert set(frames[1].fields) == {"at"} and set(frames[2].fields) == {"at", "reason"}
    for one, frame in zip(story, [msgspec.structs.replace(frames[0], whole=True), *frames[1:]], strict=True):
        assert assembler.add(frame) == one
    again = SnapshotAssembler()
    assert again.add(msgspec.json.decode(feed.whole_line(), type=Frame)) == story[-1]
    with pytest.raises(MissingFrameError, match="frame 9 does not follow frame 6"):
        again.add(Frame(seq=9, at=12.0))


def test_a_snapshot_of_another_version_is_refused_with_the_remedy() -> None:
    """The console handles only AdminError. Any other error would end the console."""
    feed = EventFeed(lambda: asyncio.sleep(0, at(10.0)), 1.0)
    feed.take(at(10.0))
    whole = msgspec.json.decode(feed.whole_line(), type=Frame)
    older = {name: value for name, value in whole.fields.items() if name != "totals"}
    newer = {**whole.fields, "state": msgspec.Raw(b'"hibernating"')}
    for fields, reason in ((older, "totals"), (newer, "state: .*hibernating")):
        with pytest.raises(AdminError, match=f"cannot read .*{reason}.* restart the service"):
            SnapshotAssembler().add(msgspec.structs.replace(whole, fields=fields))


def test_nothing_is_read_without_readers() -> None:
    reads = 0

    async def read() -> Snapshot:
        nonlocal reads
        reads += 1
        return at(float(reads))

    async def run() -> None:
        feed = EventFeed(read, 0.01)
        frames = feed.frames()
        lines = [await anext(frames) for _ in range(3)]
        await frames.aclose()
        await asyncio.sleep(0.3)
        before = reads
        await asyncio.sleep(0.3)
        assert reads == before
        # A reader that connects later gets a fresh snapshot, not the state of the last reader.
        line = await anext(feed.frames())
        assert msgspec.json.decode(line, type=Frame).at > msgspec.json.decode(lines[-1], type=Frame).at
        assert msgspec.json.decode(line, type=Frame).whole

    asyncio.run(run())


def test_a_reader_that_misses_frames_gets_one_whole_snapshot_instead() -> None:
    reads = 0

    async def read() -> Snapshot:
        nonlocal reads
        reads += 1
        return at(float(reads), a_request("a", generated_tokens=reads))

    async def run() -> None:
        feed = EventFeed(read, 0.01)
        slow, fast = feed.frames(), feed.frames()

        async def frame(frames: AsyncGenerator[bytes, None]) -> Frame:
            return msgspec.json.decode(await anext(frames), type=Frame)

        opening = await frame(slow)
        quick = [await frame(fast) for _ in range(6)]
        late = await frame(slow)
        assert opening.whole and late.whole and late.seq == quick[-1].seq > opening.seq + 1
        assert late.requests[0].generated_tokens == late.seq
        following = await frame(slow)
        assert not following.whole and following.seq == late.seq + 1
        await slow.aclose()
        await fast.aclose()

    asyncio.run(run())
