"""Responses and events come out the same, wherever the network cuts them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.http import EventSplitter, ProtocolError, ResponseParser

CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"7\r\ndata: a\r\n4;ext=1\r\n\n\nda\r\n7\r\nta: b\n\n\r\n0\r\nTrailer: x\r\n\r\n"
)
PLAIN = b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nwrong"


class Seen:
    """A parser, and what it said."""

    def __init__(self) -> None:
        self.body = b""
        self.ends = 0
        self.parser = ResponseParser(self._on_body, self._on_end)
        self.parser.expect()

    def _on_body(self, piece: bytes) -> None:
        self.body += piece

    def _on_end(self) -> None:
        self.ends += 1


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[low:high] for low, high in itertools.pairwise(edges) if low < high]


@given(st.lists(st.integers(0, 500)))
def test_a_chunked_response_is_the_same_however_it_is_cut(cuts: list[int]) -> None:
    seen = Seen()
    for piece in pieces(CHUNKED, cuts):
        seen.parser.feed(piece)
    assert (seen.body, seen.ends) == (b"data: a\n\ndata: b\n\n", 1)
    assert seen.parser.status == 200 and seen.parser.keeps_alive


@given(st.lists(st.integers(0, 500)))
def test_one_connection_carries_responses_of_both_kinds(cuts: list[int]) -> None:
    seen = Seen()
    for piece in pieces(b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, cuts):
        seen.parser.feed(piece)
    assert (seen.parser.status, seen.body, seen.ends) == (404, b"wrong", 1)
    seen.parser.expect()
    seen.parser.feed(CHUNKED)
    assert seen.ends == 2


def test_a_response_without_length_ends_with_its_connection() -> None:
    seen = Seen()
    seen.parser.feed(b"HTTP/1.1 200 OK\r\n\r\nab")
    seen.parser.feed(b"c")
    assert seen.ends == 0
    assert seen.parser.closed()
    assert (seen.body, seen.ends, seen.parser.keeps_alive) == (b"abc", 1, False)


def test_a_connection_that_closes_amid_a_response_is_no_end() -> None:
    for amount in range(len(CHUNKED) - 1):
        seen = Seen()
        seen.parser.feed(CHUNKED[:amount])
        assert not seen.parser.closed() and seen.ends == 0
        assert seen.parser.begun == (amount > 0)


@pytest.mark.parametrize(
    "wrong",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nabc",
        PLAIN + b"more",
        b"HTTP/1.1 " + b"x" * 100_000,
    ],
)
def test_what_is_no_http_is_refused(wrong: bytes) -> None:
    with pytest.raises(ProtocolError):
        Seen().parser.feed(wrong)


@given(st.lists(st.integers(0, 500)))
def test_events_are_the_same_however_they_are_cut(cuts: list[int]) -> None:
    stream = b': hello\r\ndata: {"a": 1}\r\n\r\ndata:two\ndata: lines\n\nevent: x\nid: 1\n\n'
    stream += b"data: [DONE]\n\ndata: cut off"
    splitter = EventSplitter()
    events = [event for piece in pieces(stream, cuts) for event in splitter.feed(piece)]
    assert events == [b'{"a": 1}', b"two\nlines", b"[DONE]"]
