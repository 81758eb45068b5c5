"""Tests of the memory limits for request heads and bodies that are still being received, and for answers that
clients do not read. Bodies are limited per connection, per tenant and per front process."""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Iterator

import pytest

from appliance.http.request_memory import MAX_REQUEST_MEMORY_BYTES
from appliance.http.server import MAX_UNSENT_BYTES
from tests.system.attacks.conftest import Target, limited
from tests.system.attacks.wire import (
    MEGABYTE,
    Memory,
    chat,
    connect,
    exchange,
    post,
    read_all,
    wait_for,
)

pytestmark = pytest.mark.system
LIMIT = 8 * MEGABYTE


@pytest.fixture(scope="module")
def bounded(attacked: Target) -> Iterator[Target]:
    """Limit the unfinished request bodies in the service's front to 16 MiB per tenant and 24 MiB in total.
    Requests may remain unfinished for longer than any test takes."""
    limits = (
        f"max_body_bytes = {LIMIT}\nmax_tenant_body_bytes = {2 * LIMIT}\nmax_front_body_bytes = {3 * LIMIT}\n"
        "header_timeout_s = 600\nunauthenticated_timeout_s = 600\nbody_timeout_s = 600\n"
    )
    with limited(attacked, limits) as made:
        yield made


def head(length: int, *headers: str) -> bytes:
    lines = ["POST /v1/chat/completions HTTP/1.1", "Host: x", f"Content-Length: {length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n"


@contextlib.contextmanager
def unfinished(bounded: Target, count: int, *headers: str) -> Iterator[list[socket.socket]]:
    """Open uploads and send all of their data except the last byte. Yield the uploads."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connect(bounded.tcp)) for _ in range(count)]
        for sock in sockets:
            # The service may refuse the upload before it has been sent completely.
            with contextlib.suppress(OSError):
                sock.sendall(head(LIMIT, *headers) + b" " * (LIMIT - 1))
        yield sockets


def test_the_unfinished_bodies_of_a_tenant_are_bounded(bounded: Target) -> None:
    memory = Memory(bounded.running)
    with unfinished(bounded, 30, bounded.authorization) as sockets:
        assert memory.growth() < 60 * MEGABYTE
        answers = [read_all(sock) for sock in sockets[2:]]
        # The local user is another tenant. Its small body fits into the remaining memory, so the service
        # accepts it.
        assert exchange(bounded.unix, post("/v1/chat/completions", chat(), "Connection: close")).startswith(
            b"HTTP/1.1 200 OK"
        )
    refused = [answer for answer in answers if answer]
    assert refused
    for answer in refused:
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after: 1" in answer
        assert b"too_many_body_bytes" in answer

    bounded.wait_for_problem("the bodies of unfinished requests use too much memory")
    wait_for(lambda: memory.growth() < 30 * MEGABYTE, "the memory to be returned")


def test_the_unfinished_bodies_of_all_tenants_are_bounded(bounded: Target) -> None:
    keys = []
    for name in ("one", "two", "three"):
        bounded.running.tenant(name)
        keys.append(f"Authorization: Bearer {bounded.running.key(name, name)}")
    with contextlib.ExitStack() as stack:
        held = [stack.enter_context(unfinished(bounded, 1, key))[0] for key in keys]
        with connect(bounded.tcp) as sock:
            sock.sendall(head(LIMIT, bounded.authorization))
            assert read_all(sock).startswith(b"HTTP/1.1 503 ")
        for sock in held:
            sock.sendall(b" ")
            assert b"HTTP/1.1 400 " in sock.recv(1 << 16)
    ask = post("/v1/chat/completions", chat(), bounded.authorization, "Connection: close")
    wait_for(lambda: exchange(bounded.tcp, ask).startswith(b"HTTP/1.1 200 OK"), "room for bodies")


def test_a_body_in_chunks_counts_as_it_grows(bounded: Target) -> None:
    chunked = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n{bounded.authorization}\r\n"
        "Transfer-Encoding: chunked\r\n\r\n"
    ).encode()
    data = chunked + (b"10000\r\n" + b" " * 65536 + b"\r\n") * 127
    # Once the first body has been handled, there is enough memory for one of the other two.
    with unfinished(bounded, 1, bounded.authorization), contextlib.ExitStack() as stack:
        others = [stack.enter_context(connect(bounded.tcp)) for _ in range(2)]
        for sock in others:
            with contextlib.suppress(OSError):
                sock.sendall(data)
        answered, _, _ = select.select(others, [], [], 60)
        assert len(answered) == 1
        assert read_all(answered[0]).startswith(b"HTTP/1.1 503 ")


def test_the_body_of_a_client_without_a_key_is_refused_unread(bounded: Target) -> None:
    memory = Memory(bounded.running)
    with connect(bounded.tcp) as sock:
        sock.sendall(head(LIMIT))
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 401 ")
    for sender in (connect(bounded.tcp) for _ in range(20)):
        with sender, contextlib.suppress(OSError):
            sender.sendall(head(LIMIT) + b" " * LIMIT)
    assert memory.growth() < 20 * MEGABYTE


@pytest.mark.parametrize(
    "body",
    [b"1\r\n \r\n" * 400_000, b"0\r\n" + b"a: b\r\n" * 400_000, b"1;x=" + b"x" * 2_000_000],
    ids=["chunks of one byte", "trailers", "a chunk's extension"],
)
def test_the_framing_of_chunks_is_bounded(bounded: Target, body: bytes) -> None:
    request = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    with connect(bounded.unix) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(request + body)
        assert read_all(sock).startswith(b"HTTP/1.1 400 ")
    with bounded.running.http() as client:
        small = json.dumps({"model": "demo", "prompt": "hi"}).encode()
        answer = client.post("/tokenize", content=(small[at : at + 1] for at in range(len(small))))
        assert answer.status_code == 200


def test_the_body_of_an_action_is_bounded(bounded: Target) -> None:
    fields = {"name": "x" * 65_536}
    answer = exchange(bounded.admin, post("/actions/tenants.create", fields, "Connection: close"))
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert exchange(
        bounded.admin, post("/actions/tenants.create", {"name": "y"}, "Connection: close")
    ).startswith(b"HTTP/1.1 200 ")


def test_the_unfinished_heads_of_a_user_are_bounded_and_reported(bounded: Target) -> None:
    size = 60_000
    count = MAX_REQUEST_MEMORY_BYTES // size + 100
    memory = Memory(bounded.running)
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(connect(bounded.unix)) for _ in range(count)]
        for sock in sockets:
            sock.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\nX-Filling: " + b"x" * size)
        refused, _, _ = select.select(sockets, [], [], 60)
        answer = read_all(refused[0])
        assert answer.startswith(b"HTTP/1.1 503 ") and b"too_many_header_bytes" in answer
        bounded.wait_for_problem("the headers of unfinished requests use too much memory")
        assert memory.growth() < 2 * MAX_REQUEST_MEMORY_BYTES
    wait_for(bounded.answers_local_users, "an answer")


def test_clients_that_read_no_answers_are_cut_off_and_reported(bounded: Target) -> None:
    # Each of the 128 samples repeats the prompt, so the answer is larger than 1 MB. The first request
    # generates the answer and stores it; the other requests get the stored answer.
    body = {"model": "demo", "prompt": [1000] * 2000, "n": 128, "max_tokens": 1, "return_token_ids": True}
    request = post("/v1/completions", body, "Idempotency-Key: large", "Connection: close")
    size = len(exchange(bounded.unix, request))
    assert size > MEGABYTE
    memory = Memory(bounded.running)
    with contextlib.ExitStack() as stack:
        # The kernel's socket buffers hold part of each answer, so send twice as many requests as the limit.
        count = 2 * MAX_UNSENT_BYTES // size
        sockets = [stack.enter_context(connect(bounded.unix)) for _ in range(count)]
        for sock in sockets:
            sock.sendall(request)
        # The last client reads at once, because its answer is cut off too if it is not read for a minute.
        assert len(read_all(sockets[-1])) >= size
        bounded.wait_for_problem("their clients did not read the responses")
        assert memory.growth() < 2 * MAX_UNSENT_BYTES
        assert min(len(read_all(sock)) for sock in sockets[:-1]) < size
