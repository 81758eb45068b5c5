"""Tests that responses are parsed the same way wherever the network splits them, and that a non-HTTP response
counts as a failure."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.bench.client import TargetConnection, TargetExchange

EVENTS = (
    b': comment\r\ndata: {"choices": [{"text": "a"}]}\r\n\r\n'
    b'event: x\ndata:{"choices": [{"text": ""}]}\n\n'
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n'
    b'data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}\n\ndata: [DONE]\n\n'
)
HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = (
    HEAD
    + b"Transfer-Encoding: chunked\r\n\r\n"
    + b"".join(b"%x;ext=1\r\n%b\r\n" % (len(part), part) for part in (EVENTS[:30], EVENTS[30:]))
    + b"0\r\nTrailer: x\r\n\r\n"
)
UNTIL_CLOSE = HEAD + b"\r\n" + EVENTS
REFUSED = b'HTTP/1.1 404 Not Found\r\nContent-Length: 31\r\n\r\n{"error": {"message": "wrong"}}'


class Transport(asyncio.Transport):
    def write(self, data: Any) -> None: ...

    def abort(self) -> None: ...


def received(*pieces: bytes, closes: bool = False) -> tuple[TargetExchange, TargetConnection]:
    """Send one request, and deliver its response in the given pieces. Return the exchange and its
    connection."""

    async def run() -> tuple[TargetExchange, TargetConnection]:
        connection, exchange = TargetConnection(), TargetExchange(streamed=True)
        connection.connection_made(Transport())
        connection.start(b"", exchange)
        for piece in pieces:
            connection.data_received(piece)
        if closes:
            connection.connection_lost(None)
        return exchange, connection

    return asyncio.run(run())


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(place % (len(data) + 1) for place in cuts), len(data)]
    return [data[low:high] for low, high in itertools.pairwise(edges) if low < high]


@given(st.lists(st.integers(0, 1000)), st.sampled_from([CHUNKED, UNTIL_CLOSE]))
def test_a_streamed_completion_is_the_same_however_the_network_splits_it(
    cuts: list[int], response: bytes
) -> None:
    exchange, connection = received(*cut(response, cuts), closes=response is UNTIL_CLOSE)
    assert exchange.done.done() and exchange.failure == ""
    assert (exchange.chunks, len(exchange.gaps_s)) == (2, 1)
    assert (exchange.usage.prompt_tokens, exchange.usage.completion_tokens) == (7, 2)
    assert connection.is_open == (response is CHUNKED)


@given(st.lists(st.integers(0, 200)))
def test_a_refusal_after_an_interim_response_is_the_same_however_the_network_splits_it(
    cuts: list[int],
) -> None:
    exchange, connection = received(*cut(b"HTTP/1.1 100 Continue\r\n\r\n" + REFUSED, cuts))
    assert (exchange.failure, exchange.message) == ("http 404", "wrong")
    assert connection.is_open


def test_a_connection_that_closes_during_a_response_is_a_failure() -> None:
    for length in range(len(CHUNKED) - 1):
        exchange, connection = received(*cut(CHUNKED[:length], []), closes=True)
        assert exchange.failure == "closed"
        assert connection.has_response == (length > 0)


@pytest.mark.parametrize(
    "wrong",
    [
        b"SSH-2.0-OpenSSH_9.2\r\n\r\n",
        b"HTTP/1.1 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
        b"HTTP/1.1 101 Switching\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n\0",
        HEAD + b"Content-Length: 15\r\n\r\ndata: no JSON\n\n",
    ],
)
def test_a_response_that_is_not_an_http_completion_is_a_protocol_failure(wrong: bytes) -> None:
    exchange, _ = received(wrong)
    assert exchange.failure == "protocol" and exchange.message


def test_data_after_a_complete_response_closes_the_connection() -> None:
    exchange, connection = received(REFUSED, b"more")
    assert exchange.failure == "http 404" and not connection.is_open
