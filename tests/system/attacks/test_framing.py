"""Tests that each request with unusual framing is either answered once or refused, and cannot smuggle in
another request."""

from __future__ import annotations

import json
import re
import select
import shutil
import socket
import subprocess
import time

import pytest

from tests.system.attacks.conftest import Target, limited
from tests.system.attacks.wire import chat, connect, exchange, post, read_all

pytestmark = pytest.mark.system
HIDDEN = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
AMBIGUOUS_HEADERS = [
    "Content-Length: 6\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nContent-Length: 6",
    "Content-Length: 6\r\nContent-Length: 5",
    "Content-Length: 6, 6",
    "Content-Length: +6",
    "Content-Length: 0x6",
    "Transfer-Encoding: xchunked",
    "Transfer-Encoding : chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity",
    "Transfer-Encoding: identity\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: gzip, chunked",
    "Transfer-Encoding:\r\n chunked",
    "A: b\r\n c: d",
    "A: b\rContent-Length: 6",
    "Host: y",
]
"""Headers with which a request could be framed in two different ways."""


def statuses(answer: bytes) -> list[int]:
    """Return the statuses of all responses in `answer`."""
    return [int(status) for status in re.findall(rb"HTTP/1.1 (\d{3}) ", answer)]


def chunked(path: str, body: bytes, *headers: str) -> bytes:
    """Return a POST request with this body in one chunk."""
    lines = [f"POST {path} HTTP/1.1", "Host: x", "Transfer-Encoding: chunked", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)


def ambiguous(headers: str) -> bytes:
    """Return a request with these headers and a body that contains another request."""
    return f"POST /v1/models HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n0\r\n\r\nx".encode() + HIDDEN


@pytest.mark.parametrize("upgrade", ["h2c", "websocket", "foo/2"])
@pytest.mark.parametrize("framing", ["sized", "chunked"])
def test_a_body_behind_an_upgrade_header_stays_a_body(attacked: Target, upgrade: str, framing: str) -> None:
    options = [
        "Connection: Upgrade, HTTP2-Settings, close",
        f"Upgrade: {upgrade}",
        "HTTP2-Settings: AAMAAABk",
    ]
    if framing == "sized":
        request = post("/v1/chat/completions", chat(), *options)
        hiding = post("/v1/chat/completions", {}, *options)[:-2].replace(
            b"Content-Length: 2", b"Content-Length: %d" % len(HIDDEN)
        )
        hiding += HIDDEN
    else:
        request, hiding = (
            chunked("/v1/chat/completions", body, *options) for body in (json.dumps(chat()).encode(), HIDDEN)
        )
    assert statuses(exchange(attacked.unix, request)) == [200]
    assert statuses(exchange(attacked.unix, hiding)) == [400]


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
@pytest.mark.parametrize("option", ["--http2", "--http1.1", "--http1.0", "--head", "--expect100-timeout=600"])
def test_curl_gets_its_answer(attacked: Target, option: str) -> None:
    command = ["curl", "-sS", "--unix-socket", str(attacked.unix), "http://server/v1/chat/completions"]
    if option == "--head":
        command[-1] = "http://server/v1/models"
        done = subprocess.run([*command, "--head"], capture_output=True, timeout=600, check=True)
        assert done.stdout.startswith(b"HTTP/1.1 200 OK") and b"content-length: " in done.stdout
        return
    expects = ["-H", "Expect: 100-continue"] if "expect" in option else []
    done = subprocess.run(
        [
            *command,
            *option.split("="),
            *expects,
            "--json",
            '{"model": "demo", "messages": [], "stream": false}',
        ],
        capture_output=True,
        timeout=600,
        check=True,
    )
    # the error concerns the empty conversation, so the service has received the body
    assert b"messages" in done.stdout


@pytest.mark.parametrize("headers", AMBIGUOUS_HEADERS)
def test_a_request_that_could_be_framed_in_two_ways_is_refused_and_hides_nothing(
    attacked: Target, headers: str
) -> None:
    assert statuses(exchange(attacked.unix, ambiguous(headers))) == [400]


def test_a_request_needs_a_host_and_connect_is_refused(attacked: Target) -> None:
    assert statuses(exchange(attacked.unix, b"GET /v1/models HTTP/1.1\r\n\r\n" + HIDDEN)) == [400]
    answer = exchange(attacked.unix, b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n" + HIDDEN)
    assert statuses(answer) == [400] and b"CONNECT is not supported" in answer
    assert b" 200 OK" in exchange(attacked.unix, b"GET /v1/models HTTP/1.0\r\n\r\n")


def test_http_1_0_has_no_chunks(attacked: Target) -> None:
    head = b"POST /v1/models HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert statuses(exchange(attacked.unix, head + b"0\r\n\r\n" + HIDDEN)) == [400]


def test_http_1_0_gets_an_answer_that_ends_with_the_connection(attacked: Target) -> None:
    for stream in (False, True):
        answer = exchange(attacked.unix, post("/v1/chat/completions", chat(stream=stream), version="1.0"))
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and b"connection: close" in head.lower()
        assert body.startswith(b"data: {" if stream else b"{")
        assert body.endswith(b"data: [DONE]\n\n" if stream else b"}")


def test_http_1_0_gets_a_long_answer_to_its_end(attacked: Target) -> None:
    request = post("/tokenize", {"model": "demo", "prompt": "a b " * 80_000}, version="1.0")
    with connect(attacked.unix) as sock:
        sock.sendall(request)
        select.select([sock], [], [], 60)
        time.sleep(0.2)  # the service fills the kernel's buffer and must keep the rest until the client reads
        head, _, body = read_all(sock).partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower()
    assert len(body) > 500_000, "a shorter answer would fit the kernel's buffer"
    assert len(json.loads(body)["tokens"]) > 100_000


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_half_closed_client_gets_its_answer(attacked: Target, kind: str, stream: bool) -> None:
    with connect(getattr(attacked, kind)) as sock:
        sock.sendall(post("/v1/chat/completions", chat(stream=stream, max_tokens=20), attacked.authorization))
        sock.shutdown(socket.SHUT_WR)
        answer = read_all(sock)
    assert b" 200 OK" in answer
    assert answer.rstrip().endswith(b"0" if stream else b"}")


@pytest.mark.parametrize("kind", ["unix", "tcp"])
def test_a_client_that_closes_is_still_noticed(attacked: Target, kind: str) -> None:
    def running() -> int:
        return attacked.running.status()["queue"]["running"]

    attacked.running.wait_until(lambda: not running(), 60, "the requests of earlier tests to end")
    # The request must still run when its connection is closed, so it is long.
    body = chat(max_tokens=1900, ignore_eos=True, n=32, user=f"closes {kind}")
    sock = connect(getattr(attacked, kind))
    sock.sendall(post("/v1/chat/completions", body, attacked.authorization))
    attacked.running.wait_until(running, 60, "the request to run")
    sock.close()
    attacked.running.wait_until(lambda: not running(), 60, "the request to end")
    (row,) = attacked.running.wait_until(
        lambda: [row for row in attacked.running.rows(state="ended") if row["user"] == body["user"]],
        60,
        "its row",
    )
    assert (row["status"], row["finish_reason"]) == (499, "cancelled"), row


def test_expect_continue_is_answered_before_the_body(attacked: Target) -> None:
    request = post("/v1/chat/completions", chat(), "Expect: 100-continue", "Connection: close")
    head, _, body = request.partition(b"\r\n\r\n")
    with connect(attacked.unix) as sock:
        sock.sendall(head + b"\r\n\r\n")
        assert sock.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        sock.sendall(body)
        assert statuses(read_all(sock)) == [200]


def test_the_clients_request_id_is_echoed_exactly(attacked: Target) -> None:
    request = post("/v1/chat/completions", chat(), "X-Request-Id: my id; {1}", "Connection: close")
    head = exchange(attacked.unix, request).partition(b"\r\n\r\n")[0]
    assert b"\r\nx-request-id: my id; {1}" in head
    logged = head.partition(b"x-appliance-request-id: ")[2].partition(b"\r\n")[0].decode()
    attacked.running.wait_until(
        lambda: any(row["request_id"] == logged for row in attacked.running.rows()), 60, "the row"
    )


@pytest.mark.parametrize("framing", ["sized", "chunked"])
def test_a_request_may_come_byte_by_byte(attacked: Target, framing: str) -> None:
    if framing == "sized":
        request = post("/v1/chat/completions", chat())
    else:
        request = chunked("/v1/chat/completions", json.dumps(chat()).encode())
    patient = limited(attacked, "header_timeout_s = 600\nbody_timeout_s = 600")
    with patient, connect(attacked.unix) as sock:
        for byte in request[:-1]:
            sock.sendall(bytes([byte]))
            time.sleep(0.002)
        # The last byte of the body and the next request arrive together.
        sock.sendall(request[-1:] + b"GET /v1/nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        assert statuses(read_all(sock)) == [200, 404]
