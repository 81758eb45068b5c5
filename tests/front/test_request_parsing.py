"""Tests that requests are parsed one by one from the bytes of a connection, and that the result does not
depend on how the bytes are split."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.http.bodies import FRAMING_BYTES, ChunkedBody, body_of
from appliance.http.errors import RequestError
from appliance.http.heads import MAX_HEAD_BYTES, HeadReader

HEAD = b"POST /x HTTP/1.1\r\nHost: x\r\n"
CONTENTS = st.lists(
    st.sampled_from([b"\r\n\r\n", b"\r\n", b"0\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"a" * 40])
)


def sized(content: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n%b" % (len(content), content)


def upgrading(content: bytes) -> bytes:
    return HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n%b" % (
        len(content),
        content,
    )


def chunked(content: bytes, trailer: bytes = b"") -> bytes:
    middle = len(content) // 2
    chunks = [b"%x\r\n%b\r\n" % (len(part), part) for part in (content[:middle], content[middle:]) if part]
    return HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(chunks) + b"0\r\n" + trailer + b"\r\n"


def with_trailer(content: bytes) -> bytes:
    return chunked(content, b"A: b\r\nB: c\r\n")


@given(
    st.lists(st.tuples(st.sampled_from([sized, upgrading, chunked, with_trailer]), CONTENTS), max_size=4),
    st.lists(st.integers(1, 60)),
)
def test_requests_are_parsed_the_same_however_their_bytes_are_split(
    requests: list[tuple[object, list[bytes]]], sizes: list[int]
) -> None:
    contents = [b"".join(parts) for _, parts in requests]
    sent = b"".join(make(content) for (make, _), content in zip(requests, contents, strict=True))  # type: ignore[operator]
    data, found = bytearray(), []
    reader, body = HeadReader(), None
    for size in itertools.chain(sizes, [len(sent)]):
        data += sent[:size]
        sent = sent[size:]
        while data or (body is not None and body.complete):
            if body is None:
                head = reader.feed(data)
                if head is None:
                    break
                reader, body = HeadReader(), body_of(head)
                found.append(b"")
            if not body.complete:
                content, consumed = body.feed(bytes(data))
                del data[:consumed]
                found[-1] += content
                if not body.complete:
                    break
            body = None
    assert found == contents
    assert not data


def test_the_bytes_after_a_head_stay_unparsed() -> None:
    one = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
    data = bytearray(one * 1000)
    assert HeadReader().feed(data) is not None
    assert data == one * 999


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01", 400),
        (b"GET / HTTP/1.1\nHost: x\n", 400),
        (b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * MAX_HEAD_BYTES, 431),
        (b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * MAX_HEAD_BYTES, 431),
    ],
)
def test_an_invalid_head_is_refused_before_it_is_complete(data: bytes, status: int) -> None:
    with pytest.raises(RequestError) as refused:
        HeadReader().feed(bytearray(data))
    assert refused.value.status == status


@pytest.mark.parametrize(
    "headers",
    [
        b"",
        b"Host: x\r\nHost: x\r\n",
        b"Host: x\r\nContent-Length: 3\r\nContent-Length: 3\r\n",
        b"Host: x\r\nContent-Length: 3, 3\r\n",
        b"Host: x\r\nContent-Length: +3\r\n",
        b"Host: x\r\nContent-Length: 0x3\r\n",
        b"Host: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Host: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n",
        b"Host: x\r\nTransfer-Encoding: gzip, chunked\r\n",
        b"Host: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Host: x\r\nTransfer-Encoding : chunked\r\n",
        b"Host: x\r\nTransfer-Encoding: \x0bchunked\r\n",
        b"Host: x\r\nA: b\r\n c\r\n",
        b"Host: x\r\nA: b\0\r\n",
    ],
)
def test_a_head_that_servers_could_frame_differently_is_refused(headers: bytes) -> None:
    with pytest.raises(RequestError) as refused:
        HeadReader().feed(bytearray(b"POST / HTTP/1.1\r\n" + headers + b"\r\n"))
    assert refused.value.status == 400


def test_chunks_of_one_byte_are_refused_after_a_bounded_number() -> None:
    body, consumed = ChunkedBody(), 0
    with pytest.raises(RequestError, match="too small"):
        while True:
            consumed += body.feed(b"1\r\nx\r\n" * 1000)[1]
    assert consumed < 2 * FRAMING_BYTES


def test_trailers_are_bounded() -> None:
    body, consumed = ChunkedBody(), 0
    with pytest.raises(RequestError):
        body.feed(b"0\r\n")
        while True:
            consumed += body.feed(b"a: b\r\n" * 1000)[1]
    assert consumed < 2 * FRAMING_BYTES
