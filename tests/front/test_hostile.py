"""Tests that malformed and malicious input is refused at low cost, and that the front process continues to
serve."""

from __future__ import annotations

import contextlib
import json
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from appliance.channel.front_settings import Limits
from tests.front.harness import KEY, Harness
from tests.front.raw import Answer, ask, chat, connect, head, read_answer, request

MEGABYTE = 1 << 20
MAX_MS = 25_000
"""Time limit in milliseconds. On an idle machine, linear-time processing takes a tenth of a second; anything
slower would take minutes."""


@pytest.fixture
def limit(front: Harness) -> Iterator[Callable[..., None]]:
    """Return a function that changes the front process's limits until the end of the test."""
    yield lambda **limits: front.reconfigure(limits=Limits(**limits))
    front.reconfigure()


@pytest.fixture(autouse=True)
def still_alive(front: Harness) -> Iterator[None]:
    yield
    front.reset()
    assert ask(front, "POST", "/v1/chat/completions", chat()).status == 200


def value(field: str, raw: bytes) -> bytes:
    return b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}], "%b": %b}' % (
        field.encode(),
        raw,
    )


BODIES: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"hello",
    "half": b'{"model": "demo"',
    "list": b"[]",
    "null": b"null",
    "bad UTF-8": b'{"model": "\xff\xfe"}',
    "overlong UTF-8": b'{"model": "\xc0\xaf"}',
    "byte order mark": b"\xef\xbb\xbf{}",
    "UTF-16": json.dumps(chat()).encode("utf-16"),
    "NaN": value("temperature", b"NaN"),
    "Infinity": value("top_p", b"-Infinity"),
    "NaN in an unknown field": value("unknown", b"[NaN]"),
    "NaN as a bias": value("logit_bias", b'{"5": NaN}'),
    "1e999": value("temperature", b"1e999"),
    "lone surrogate": value("stop", b'"\\ud800"'),
    "raw surrogate": value("stop", b'"\xed\xa0\x80"'),
    "deep lists": value("unknown", b"[" * 100_000 + b"]" * 100_000),
    "deep objects": value("unknown", b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "deep messages": b'{"model": "demo", "messages": ' + b"[" * 50_000,
    "huge integer": value("max_tokens", b"9" * 100_000),
    "huge integer where unknown": value("unknown", b"9" * 100_000),
    "integer of 70 bits": value("seed", b"1180591620717411303424"),
    "huge exponent": value("temperature", b"1e" + b"9" * 1000),
    "integer for text": value("user", b"5"),
    "text for integer": value("n", b'"5"'),
    "true for integer": value("n", b"true"),
    "many stops": value("stop", json.dumps(["x"] * 100_000).encode()),
    "long stop": value("stop", b'"' + b"x" * 100_000 + b'"'),
    "many biases": value("logit_bias", json.dumps({str(i): 1 for i in range(100_000)}).encode()),
    "many empty messages": b'{"model": "demo", "messages": [' + b"{}," * 300_000 + b"{}]}",
    "many good messages": json.dumps(chat(messages=[{"role": "user", "content": ""}] * 100_000)).encode(),
    "many parts": json.dumps(
        chat(messages=[{"role": "user", "content": [{"type": "x"}] * 100_000}])
    ).encode(),
    "many values": value("unknown", b"[" + b"1," * 5_000_000 + b"1]"),
    "wrong tokens": json.dumps({"model": "demo", "prompt": [1] * 100_000 + ["x"]}).encode(),
    "many prompts": json.dumps({"model": "demo", "prompt": ["x"] * 100_000}).encode(),
    "empty prompts": b'{"model": "demo", "prompt": []}',
    "prompt of lists of lists": b'{"model": "demo", "prompt": [[[1]]]}',
    "huge token": b'{"model": "demo", "prompt": [%b]}' % (b"9" * 4000),
    "long model name": json.dumps(chat(model="x" * 100_000)).encode(),
    "control characters": b'{"model": "demo\x00"}',
    "zeros": b"\0" * MEGABYTE,
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused_within_a_time_limit(front: Harness, name: str) -> None:
    path = "/v1/completions" if b'"prompt"' in BODIES[name][:40] else "/v1/chat/completions"
    answer = ask(front, "POST", path, BODIES[name])
    assert 400 <= answer.status < 500, answer
    assert answer.error["message"]
    assert answer.ms < MAX_MS
    assert not front.admits


def send_slowly(sock: socket.socket, data: bytes) -> threading.Thread:
    """Send data in a separate thread and ignore errors."""

    def send() -> None:
        with contextlib.suppress(OSError):
            sock.sendall(data)

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    return thread


def test_a_body_of_100_megabytes_is_refused_by_its_length(front: Harness) -> None:
    headers = {"Content-Length": str(100 * MEGABYTE), "Authorization": f"Bearer {KEY}"}
    request = head("POST", "/v1/chat/completions", headers)
    with connect(front, tcp=True) as sock:
        # The response arrives although the rest of the request has not been sent.
        sock.sendall(request + bytes(1000))
        answer = read_answer(sock)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
    with connect(front, tcp=True) as sock:
        thread = send_slowly(sock, request + bytes(100 * MEGABYTE))
        answer = read_answer(sock)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")
        thread.join(30)
        assert not thread.is_alive()


def test_a_chunked_body_is_counted_while_it_is_read(front: Harness) -> None:
    chunk = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    with connect(front) as sock:
        thread = send_slowly(
            sock, head("POST", "/v1/chat/completions", {"Transfer-Encoding": "chunked"}) + chunk * 400
        )
        assert read_answer(sock).status == 413
        sock.shutdown(socket.SHUT_RDWR)
        thread.join(5)


@pytest.mark.parametrize(
    "headers",
    [
        {"Content-Type": "text/plain"},
        {"Content-Type": "application/x-www-form-urlencoded"},
        {"Content-Type": "application/json; charset=latin-1"},
        {"Content-Encoding": "gzip"},
    ],
)
def test_other_media_types_are_refused(front: Harness, headers: dict[str, str]) -> None:
    answer = ask(front, "POST", "/v1/chat/completions", chat(), headers)
    assert answer.status == 415
    assert answer.error["message"]


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n",
        b"POST /v1/models HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 100_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 50_000,
    ],
)
def test_bytes_that_are_not_http_are_refused(front: Harness, data: bytes) -> None:
    with connect(front) as sock:
        with contextlib.suppress(OSError):
            sock.sendall(data)
        answer = read_answer(sock)
    assert answer.status in (400, 404, 413, 431), answer
    assert answer.error["message"]


def test_an_upgrade_is_answered_as_a_plain_request(front: Harness) -> None:
    headers = {
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Key": "x",
        "Sec-WebSocket-Version": "13",
    }
    assert ask(front, "GET", "/v1/models", headers=headers).status in (200, 400)


def test_encoded_slashes_and_dots_in_paths_do_not_bypass_authentication(front: Harness) -> None:
    for path in (
        "/health/live/../../v1/models",
        "/health/live%2f",
        "/v1/models/%2e%2e/x",
        "//health/live",
        "/health/live;x",
    ):
        assert ask(front, "GET", path, tcp=True).status == 401


def test_slow_headers_slow_bodies_and_idle_connections_time_out(
    front: Harness, limit: Callable[..., None]
) -> None:
    limit(header_timeout_s=10.0, body_timeout_s=1.0, idle_timeout_s=10.0)
    with connect(front) as idle, connect(front) as silent, connect(front) as headers, connect(front) as body:
        idle.sendall(head("GET", "/v1/models"))
        assert read_answer(idle).status == 200
        headers.sendall(b"GET /v1/models HTTP/1.1\r\nHost")
        body.sendall(head("POST", "/v1/completions", {"Content-Length": "10000"}) + b"{")
        # Single bytes must not extend the time limit. Keep sending them until both connections have received
        # a response.
        deadline = time.monotonic() + 60
        drops = {headers: b"a", body: b" "}
        while drops:
            assert time.monotonic() < deadline
            for sock, drop in drops.items():
                with contextlib.suppress(OSError):
                    sock.sendall(drop)
            for sock in select.select([*drops], [], [], 0.05)[0]:
                del drops[sock]
        assert (read_answer(headers).status, read_answer(body).status) == (408, 408)
        assert silent.recv(10) == b""
        assert idle.recv(10) == b""
    front.wait_for(lambda: front.reports[-1].connections == 0)


def test_the_log_shows_the_status_with_which_an_unfinished_request_was_refused(
    front: Harness, limit: Callable[..., None]
) -> None:
    limit(body_timeout_s=0.2)
    path, headers = "/v1/completions", {"Content-Length": "10000"}
    chunked = head("POST", path, {"Transfer-Encoding": "chunked"}) + b"x\r\n"
    for data, status in ((head("POST", path, headers) + b"{", 408), (chunked, 400)):
        with connect(front) as sock:
            sock.sendall(data)
            answer = read_answer(sock)
        front.wait_for(lambda: bool(front.rejected))
        rejected = front.rejected.pop()
        assert (answer.status, rejected.status) == (status, status)
        assert rejected.error == answer.error["message"]


def test_the_time_limits_of_requests_do_not_end_a_stream(front: Harness, limit: Callable[..., None]) -> None:
    limit(header_timeout_s=5.0, body_timeout_s=5.0, idle_timeout_s=5.0)
    front.replica.step_s = 0.25
    answer = ask(front, "POST", "/v1/chat/completions", chat(stream=True))
    assert answer.body.endswith(b"data: [DONE]\n\n") and answer.ms > 5000


def test_at_the_limit_the_longest_idle_connection_is_closed(
    front: Harness, limit: Callable[..., None]
) -> None:
    front.wait_for(lambda: front.report().connections == 0)
    refused_before = front.reports[-1].refused_connections
    limit(max_connections=3)
    front.endless()
    waiting = connect(front)
    front.wait_for(lambda: front.reports[-1].connections == 1)
    streaming = [connect(front) for _ in range(2)]
    for sock in streaming:
        sock.sendall(request(chat(stream=True)))
    front.wait_for(lambda: front.reports[-1].busy_connections == 2)
    with connect(front) as third:
        assert waiting.recv(10) == b""
        third.sendall(request(chat(stream=True)))
        front.wait_for(lambda: front.reports[-1].busy_connections == 3)
        refused = ask(front, "GET", "/v1/models")
        assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
        assert refused.headers["retry-after"] == "1"
    front.wait_for(lambda: front.reports[-1].refused_connections == refused_before + 1)
    for sock in (waiting, *streaming):
        sock.close()
    front.wait_for(lambda: ask(front, "GET", "/v1/models").status == 200)


def test_one_tenant_cannot_take_all_places_of_a_front(front: Harness, limit: Callable[..., None]) -> None:
    limit(max_connections=8)
    front.endless()
    streams = [connect(front) for _ in range(7)]
    for sock in streams:
        sock.sendall(request(chat(stream=True)))
    front.wait_for(lambda: front.reports[-1].busy_connections == 7)
    refused = ask(front, "GET", "/v1/models")
    assert (refused.status, refused.error["code"]) == (503, "too_many_connections")
    assert ask(front, "GET", "/v1/models", headers={"Authorization": f"Bearer {KEY}"}).status == 200
    for sock in streams:
        sock.close()


def test_idle_connections_of_a_local_user_close_no_connection_of_a_tenant(
    front: Harness, limit: Callable[..., None]
) -> None:
    limit(max_connections=8)
    with contextlib.ExitStack() as opened:
        tenant = opened.enter_context(connect(front, tcp=True))
        for _ in range(2):
            tenant.sendall(head("GET", "/v1/models", {"Authorization": f"Bearer {KEY}"}))
            assert read_answer(tenant).status == 200
            idle = [opened.enter_context(connect(front)) for _ in range(20)]
            # The oldest of the connections have been closed to make room for newer ones.
            assert idle[0].recv(1) == b""


def test_a_request_is_dropped_if_its_client_leaves_while_sending(front: Harness) -> None:
    with connect(front) as sock:
        sock.sendall(head("POST", "/v1/completions", {"Content-Length": "100"}) + b"{")
    front.wait_for(lambda: bool(front.rejected))
    assert front.rejected[0].status == 499
    assert not front.admits


def test_no_100_continue_is_sent_for_a_body_that_is_refused(front: Harness) -> None:
    headers = {"Expect": "100-continue", "Content-Length": str(100 * MEGABYTE)}
    answer: Answer = ask(front, "POST", "/v1/completions", None, headers)
    assert answer.status == 413


@pytest.mark.parametrize(
    ("prompt", "least"),
    [("fox " * 20_000, 1808), ([5] * 60_000, 60_000), ("fox " * 600, 600), ([], 0)],
    ids=["bytes decide", "token ids", "encoded", "small"],
)
def test_refused_prompts_are_reported_with_the_work_that_they_caused(
    front: Harness, prompt: object, least: int
) -> None:
    answer = ask(front, "POST", "/v1/completions", {"model": "demo", "prompt": prompt})
    assert answer.status == 400
    front.wait_for(lambda: front.rejected)
    assert least <= front.rejected[0].work_tokens <= 1.5 * least
