"""Tests of channels: frames arrive complete, in order and with their descriptors, and a closed peer is
detected."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import resource
import select
import socket
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine import wire
from engine.wire import Channel, socketpair
from tests.examples import examples


class Note(msgspec.Struct, tag="note"):
    text: str


class Parcel(msgspec.Struct, tag="parcel"):
    label: int


Both = Note | Parcel


def make_pair() -> tuple[Channel[Both], Channel[Both]]:
    left, right = socketpair()
    return Channel(left, Both), Channel(right, Both)


@given(st.lists(st.text(max_size=200), max_size=30), st.integers(1, 64))
@examples(50)
def test_frames_arrive_whole_and_in_order_however_the_bytes_are_cut(texts: list[str], piece: int) -> None:
    sender, receiver = socketpair()
    raw, channel = sender, Channel[Both](receiver, Both)
    encoder = msgspec.msgpack.Encoder()
    stream = b"".join(
        len(payload).to_bytes(4, "little") + payload
        for payload in (encoder.encode(Note(text)) for text in texts)
    )
    got: list[Both] = []
    for start in range(0, len(stream), piece):
        raw.send(stream[start : start + piece])
        got += channel.read()
    assert got == [Note(text) for text in texts]
    raw.close()
    channel.close()


def test_descriptors_travel_with_their_frames_in_order() -> None:
    left, right = make_pair()
    pipes = [os.pipe() for _ in range(3)]
    for number, (read_end, _) in enumerate(pipes):
        left.send(Note("between"))
        left.send(Parcel(number), (read_end,))
        os.close(read_end)
    labels = []
    for message in right.read() + right.read() + right.read() + right.read() + right.read():
        if isinstance(message, Parcel):
            fd = right.take_fd()
            os.write(pipes[message.label][1], b"%d" % message.label)
            labels.append(os.read(fd, 10))
            os.close(fd)
    assert labels == [b"0", b"1", b"2"]
    with pytest.raises(LookupError):
        right.take_fd()
    for _, write_end in pipes:
        os.close(write_end)


def test_messages_written_before_the_end_are_read_before_the_end_of_file() -> None:
    async def scenario() -> list[str]:
        left, right = make_pair()
        events: list[str] = []
        done = asyncio.Event()

        def closed() -> None:
            events.append("closed")
            done.set()

        right.listen(lambda message: events.append(message.text), closed)  # type: ignore[union-attr]
        left.send(Note("last words"))
        left.close()
        await asyncio.wait_for(done.wait(), 60)
        assert right.closed
        return events

    assert asyncio.run(scenario()) == ["last words", "closed"]


def test_an_error_of_a_callback_loses_neither_the_next_messages_nor_the_end_of_file() -> None:
    async def scenario() -> list[int]:
        left, right = make_pair()
        delivered: list[int] = []
        done = asyncio.Event()

        def take(message: Both) -> None:
            assert isinstance(message, Parcel)
            delivered.append(message.label // message.label)

        right.listen(take, done.set)
        for label in (1, 0, 1):
            left.send(Parcel(label))
        left.close()
        await asyncio.wait_for(done.wait(), 60)
        return delivered

    assert asyncio.run(scenario()) == [1, 1]


def test_messages_beyond_the_socket_buffer_are_queued_and_delivered_later() -> None:
    left, right = make_pair()
    texts = [f"{number}" * 50_000 for number in range(100)]
    for text in texts:
        left.send(Note(text))
    assert left.backlog_bytes > 0
    got: list[Both] = []
    while len(got) < len(texts):
        got += right.read()
        left.flush()
    assert [message.text for message in got] == texts  # type: ignore[union-attr]
    assert left.backlog_bytes == 0


def test_drain_waits_for_the_reader_up_to_its_timeout() -> None:
    left, right = make_pair()
    texts = ["x" * 100_000] * 50
    for text in texts:
        left.send(Note(text))
    assert not left.drain(0.01)
    got: list[Both] = []

    def read() -> None:
        while len(got) < len(texts):
            select.select([right], [], [])
            got.extend(right.read())

    reader = threading.Thread(target=read)
    reader.start()
    assert left.drain(60.0)
    assert left.backlog_bytes == 0
    reader.join()
    assert [message.text for message in got] == texts  # type: ignore[union-attr]


def test_drain_ends_when_the_peer_closes() -> None:
    left, right = make_pair()
    for _ in range(50):
        left.send(Note("x" * 100_000))
    dying = threading.Timer(0.05, right.close)
    dying.start()
    assert left.drain(60.0)
    dying.join()
    left.read()
    assert left.closed
    assert left.drain()


def test_one_read_returns_only_part_of_a_flood() -> None:
    sender, receiver = socketpair()
    sender.setblocking(True)
    channel = Channel[Both](receiver, Both)
    payload = msgspec.msgpack.encode(Note("x" * 100_000))
    frame = len(payload).to_bytes(4, "little") + payload
    flood = threading.Thread(target=lambda: sender.sendall(frame * 600))
    flood.start()
    parts: list[int] = []
    while sum(parts) < 600:
        parts.append(len(channel.read()))
    flood.join()
    assert max(parts) <= (16 * (1 << 18)) // len(frame) + 1
    sender.close()
    channel.close()


def test_a_channel_to_a_peer_that_never_reads_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_BACKLOG_BYTES", 1 << 20)
    left, right = make_pair()
    for _ in range(100):
        left.send(Note("x" * 100_000))
    assert left.closed
    right.close()


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\xff", (3).to_bytes(4, "little") + b"\xc1\xc1\xc1"])
def test_an_invalid_frame_closes_the_channel(garbage: bytes) -> None:
    left, right = socketpair()
    channel = Channel[Both](right, Both)
    left.send(garbage)
    assert channel.read() == []
    assert channel.closed and channel.violation
    left.close()


def test_sending_to_a_dead_peer_does_not_raise() -> None:
    left, right = make_pair()
    right.close()
    for _ in range(3):
        left.send(Note("anyone?"))
    assert left.read() == []
    assert left.closed


def test_the_caller_keeps_its_own_descriptor() -> None:
    left, right = make_pair()
    ours, theirs = socket.socketpair()
    left.send(Parcel(1), (theirs.fileno(),))
    theirs.close()
    right.read()
    adopted = socket.socket(fileno=right.take_fd())
    ours.send(b"still here")
    assert adopted.recv(20) == b"still here"
    for end in (ours, adopted):
        end.close()


def test_a_message_whose_descriptors_cannot_all_be_duplicated_is_not_sent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left, right = make_pair()
    with open("/dev/null") as kept:
        before = os.listdir("/proc/self/fd")
        free = iter([os.dup(kept.fileno())])

        def duplicate(descriptor: int) -> int:
            for copy in free:
                return copy
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as shortage:
            shortage.setattr(os, "dup", duplicate)
            with pytest.raises(OSError, match="Too many open files"):
                left.send(Parcel(1), (kept.fileno(), kept.fileno()))
        assert os.listdir("/proc/self/fd") == before
    left.send(Note("next"))
    assert right.read() == [Note("next")]
    left.close()
    right.close()


def test_a_descriptor_dropped_by_the_kernel_is_missing_only_from_its_own_message() -> None:
    ours, theirs = make_pair()
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    read_end, write_end = os.pipe()
    fillers: list[int] = []
    ours.send(Parcel(1), (write_end,))
    resource.setrlimit(resource.RLIMIT_NOFILE, (write_end + 20, limits[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        assert theirs.read() == [Parcel(1)]
    finally:
        for filler in fillers:
            os.close(filler)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    ours.send(Parcel(2), (write_end,))
    assert theirs.read() == [Parcel(2)]
    with pytest.raises(LookupError):
        theirs.take_fd()
    with open(theirs.take_fd(), "wb") as arrived:
        arrived.write(b"x")
    assert os.read(read_end, 1) == b"x"
    for descriptor in (read_end, write_end):
        os.close(descriptor)
    ours.close()
    theirs.close()
