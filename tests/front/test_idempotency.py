"""Tests that a request with an Idempotency-Key runs only once, even if its client disconnects or retries."""

from __future__ import annotations

import hashlib
import os
import socket
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from appliance.channel.core_messages import Abort, ClientConnection, Refused, StopFront
from appliance.channel.front_settings import RetryRules
from appliance.channel.identity import Identity
from appliance.host.memory_files import new_memory
from tests.front.harness import KEY, MODEL, Harness
from tests.front.raw import Answer, chat, connect, events, read_answer, request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = chat()
BODIES = [
    (CHAT, BODY),
    (CHAT, chat(stream=True, n=3, stream_options={"include_usage": True})),
    (COMPLETIONS, {"model": MODEL, "prompt": ["quick", "brown"], "n": 2, "stream": True}),
]


@pytest.fixture
def front(front: Harness) -> Iterator[Harness]:
    """The shared front process, with a tenant that no other test uses. Idempotency keys belong to a tenant,
    so the keys of other tests cannot interfere."""
    tenant = f"tenant-{uuid.uuid4()}"
    front.identify(
        keys={hashlib.sha256(KEY.encode()).hexdigest(): Identity(tenant=tenant, key_id="key_1")},
        uids={os.getuid(): Identity(tenant=tenant)},
    )
    yield front
    front.identify()


def send(sock: socket.socket, key: str, body: Any = BODY, path: str = CHAT, **headers: str) -> None:
    sock.sendall(request(body, path, {"Idempotency-Key": key, **headers}))


def ask(front: Harness, key: str, body: Any = BODY, path: str = CHAT) -> Answer:
    with connect(front) as sock:
        send(sock, key, body, path)
        return read_answer(sock)


def wait_until_waiting(front: Harness, count: int) -> None:
    """Wait until the front process handles `count` requests that have a client."""
    front.wait_for(lambda: front.report().busy_connections == count)


def text(answer: Answer) -> Any:
    if answer.body.startswith(b"{"):
        return answer.json["choices"][0]["message"]["content"]
    return "".join(event["choices"][0]["delta"].get("content", "") for event in events(answer)[:-1])


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_retry_repeats_the_answer_and_nothing_runs_twice(
    front: Harness, path: str, body: dict[str, Any]
) -> None:
    first, again = ask(front, "repeat-me", body, path), ask(front, "repeat-me", body, path)
    assert (first.status, again.status) == (200, 200)
    assert b"".join(first.body.split()) == b"".join(again.body.split())
    assert len(front.admits) == 1
    (settle,) = front.settled(1)
    front.wait_for(lambda: bool(front.retried))
    (row,) = front.retried
    assert (row.retry, row.retry_of, row.status) == ("repeated", settle.request_id, 200)
    assert row.request_id == again.headers["x-request-id"] != first.headers["x-request-id"]
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-appliance-retry-of"] == settle.request_id == first.headers["x-request-id"]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["x-appliance-class"] == first.headers["x-appliance-class"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_continues_after_its_client_disconnects_and_a_retry_gets_its_answer(
    front: Harness, stream: bool
) -> None:
    front.replica.hold = True
    body = chat(stream=stream)
    with connect(front) as first:
        send(first, "left", body)
        front.wait_for(lambda: len(front.replica.running) == 1)
        for _ in range(5):
            front.call(front.replica.step)
        if stream:
            assert first.recv(1000)
    wait_until_waiting(front, 0)
    assert not front.settles and not front.replica.cancels
    with connect(front) as second:
        send(second, "left", body)
        wait_until_waiting(front, 1)
        front.replica.hold = False
        answer = read_answer(second)
    assert (answer.status, text(answer)) == (200, front.text())
    (settle,) = front.settled(1)
    whole = len(front.sentence_script(front.replica.submits[0], 0))
    assert (settle.status, settle.delivered_tokens) == (200, whole)
    front.wait_for(lambda: bool(front.retried))
    assert front.retried[0].retry == "joined"
    assert len(front.admits) == 1


@pytest.mark.parametrize(("n", "cut_off"), [(32, 0), (128, 1)])
def test_a_run_continues_although_its_client_reads_too_slowly(front: Harness, n: int, cut_off: int) -> None:
    """The client reads nothing. With 128 samples, it is disconnected before the run ends."""
    steps, before = front.replica.steps, front.report().cut_off_connections
    front.script = front.replica.script = lambda submit, sample: [50]
    body = {"model": MODEL, "prompt": "quick", "stream": True, "n": n, "logprobs": 5, "max_tokens": 80}
    with connect(front) as first:
        send(first, "unread", body, COMPLETIONS)
        front.wait_for(lambda: front.replica.steps == steps + 80)
        front.wait_for(lambda: front.report().cut_off_connections == before + cut_off)
    again = ask(front, "unread", body, COMPLETIONS)
    assert "idempotent-replayed" in again.headers
    assert again.body == ask(front, "unread", body, COMPLETIONS).body
    assert len(again.body) > 150_000 and events(again)[-1] == "[DONE]"
    assert [settle.status for settle in front.settled(1)] == [200]


def test_a_key_is_bound_to_one_body_and_endpoint_and_caller(front: Harness) -> None:
    ask(front, "k")
    answer = ask(front, "k", chat(stream=True))
    assert (answer.status, answer.error["code"]) == (422, "idempotency_key_reused")
    assert answer.error["param"] == "Idempotency-Key"
    ask(front, "k2")
    ask(front, "k", {"model": MODEL, "prompt": "quick"}, COMPLETIONS)
    with connect(front, tcp=True) as sock:
        send(sock, "k", Authorization=f"Bearer {KEY}")
        assert "idempotent-replayed" not in read_answer(sock).headers
    front.identify(uids={os.getuid(): Identity(tenant=f"other-{uuid.uuid4()}")})
    ask(front, "k")
    assert len(front.admits) == len({claim.scope for claim in front.claimed}) == 5


@pytest.mark.parametrize("keys", [[""], ["two words"], ["x" * 256], ["ümlaut"], ["a", "b"]])
def test_an_invalid_key_is_refused(front: Harness, keys: list[str]) -> None:
    with connect(front) as sock:
        names = ("Idempotency-Key", "idempotency-key")
        sock.sendall(request(chat(), CHAT, dict(zip(names, keys, strict=False))))
        answer = read_answer(sock)
    assert (answer.status, answer.error["param"]) == (400, "Idempotency-Key")


def test_a_retry_of_a_refused_request_runs_again(front: Harness) -> None:
    for _ in range(2):
        assert ask(front, "again", chat(max_tokens=100_000)).error["code"] == "context_length_exceeded"
    front.refusal = Refused("", 0, 429, "rate_limit_exceeded", "the quota is used up", 1.5)
    front.admit = "refuse"
    assert ask(front, "again").status == 429
    front.admit = "at once"
    answer = ask(front, "again")
    assert (answer.status, text(answer)) == (200, front.text())
    first, second = front.admits
    assert first.retry_of == front.rejected[1].request_id and second.retry_of == first.request_id
    assert [release.scope for release in front.releases] == [front.claimed[0].scope] * 3
    assert not front.retried


def test_retries_that_waited_for_a_failing_run_get_its_error_and_later_ones_run_again(front: Harness) -> None:
    front.endless()
    body = chat(stream=True)
    with connect(front) as first, connect(front) as second:
        send(first, "aborted", body)
        assert first.recv(1, socket.MSG_PEEK)
        send(second, "aborted", body)
        wait_until_waiting(front, 2)
        front.send(Abort(front.admits[0].request_id, "an operator ended it"))
        assert events(read_answer(first))[-1]["error"]["message"] == "an operator ended it"
        waited = read_answer(second)
    assert (waited.status, waited.error["code"], waited.headers["retry-after"]) == (503, "aborted", "1")
    front.wait_for(lambda: [(row.retry, row.status) for row in front.retried] == [("joined", 503)])
    front.script = front.replica.script = front.sentence_script
    front.step_s = front.replica.step_s = 0.001
    assert text(ask(front, "aborted", body)) == front.text()
    assert len(front.admits) == 2


# ── memory ──


def test_answers_are_kept_within_bounds_on_time_and_memory(front: Harness) -> None:
    front.configure(retries=RetryRules(keep_s=0.2))
    ask(front, "short-lived")
    front.wait_for(lambda: bool(front.releases))
    ask(front, "short-lived")
    assert len(front.admits) == 2

    front.configure(retries=RetryRules(max_bytes=20_000))
    for number in range(20):
        ask(front, f"many-{number}", chat(stream=True, n=2))
    front.wait_for(lambda: front.reports[-1].kept_answers < 3 and front.reports[-1].kept_bytes <= 20_000)
    again = ask(front, "many-19", chat(stream=True, n=2))
    assert "idempotent-replayed" in again.headers
    assert "idempotent-replayed" not in ask(front, "many-0", chat(stream=True, n=2)).headers


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_too_long_to_be_kept_reaches_its_client_and_a_retry_runs_afterwards(
    front: Harness, stream: bool
) -> None:
    front.configure(retries=RetryRules(max_bytes=3000))
    front.replica.hold = True
    body = chat(stream=stream, n=8)
    with connect(front) as first, connect(front) as second:
        send(first, "too-big", body)
        front.wait_for(lambda: len(front.replica.running) == 8)
        for _ in range(5):
            front.call(front.replica.step)
        send(second, "too-big", body)
        wait_until_waiting(front, 2)
        assert len(front.admits) == 1
        front.replica.hold = False
        answers = [read_answer(first), read_answer(second)]
    assert all(b"[DONE]" in answer.body or answer.json["choices"] for answer in answers)
    assert len(front.settled(2)) == len(front.admits) == 2 and not front.retried
    assert front.report().kept_bytes == 0


@pytest.mark.parametrize("leaves_early", [False, True])
def test_a_run_whose_answer_is_too_long_to_be_kept_ends_without_its_client(
    front: Harness, leaves_early: bool
) -> None:
    front.configure(retries=RetryRules(max_bytes=3000))
    front.script = front.replica.script = lambda submit, sample: [50]
    front.replica.hold = leaves_early
    with connect(front) as sock:
        send(sock, "too-big", chat(stream=True, n=8))
        front.wait_for(lambda: len(front.replica.running) == 8)
        received = 0
        while not leaves_early and received < 5000:
            received += len(sock.recv(1 << 16))
    wait_until_waiting(front, 0)
    front.replica.hold = False
    (settle,) = front.settled(1)
    assert (settle.status, settle.finish_reason) == (499, "cancelled")
    front.wait_for(lambda: len(front.releases) == 1 and not front.replica.running)


# ── another front process, and a stopping one ──


@pytest.mark.parametrize(("tcp", "size"), [(False, 300_000), (True, 1)])
def test_a_connection_moves_to_the_front_that_has_the_run(front: Harness, tcp: bool, size: int) -> None:
    front.is_elsewhere = True
    body = chat() | {"metadata": {"name": "x" * size}}
    headers = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": "moving"}
    with connect(front, tcp=tcp) as sock:
        again = request(body, CHAT, headers)
        # The front process may read the beginning of the next request together with this request. If so, it
        # must hand over those bytes too.
        sock.sendall(again + again[:50])
        front.wait_for(lambda: len(front.moved) == 1)
        # The receiving front process has no record of a run with this key, so it runs the request.
        front.is_elsewhere = False
        moved = front.give_back()
        sock.sendall(again[50:])
        assert bool(moved.peer) == tcp
        buffer = bytearray()
        answer = read_answer(sock, buffer)
        assert (answer.status, text(answer)) == (200, front.text())
        # The connection stays with the front process to which it was handed over.
        assert "idempotent-replayed" in read_answer(sock, buffer).headers
    assert len(front.admits) == 1 and not front.rejected
    if tcp:
        assert front.admits[0].peer == moved.peer
    assert front.admits[0].identity.key_id == "key_1"


def test_a_stopping_front_finishes_a_run_without_a_client_and_answers_its_retry(
    own_front: Callable[..., Harness],
) -> None:
    front = own_front()
    front.replica.hold = True
    with connect(front) as first:
        send(first, "left")
        front.wait_for(lambda: len(front.replica.running) == 1)
    wait_until_waiting(front, 0)
    front.send(StopFront(120.0))
    moved = ClientConnection("", has_request=True)
    retry, accepted = socket.socketpair()
    data = request(BODY, CHAT, {"Idempotency-Key": "left"})
    with retry, accepted, open(new_memory("request", data), "rb") as memory:
        front.call(lambda: front.channel.send(moved, (accepted.fileno(), memory.fileno())))
        accepted.close()
        wait_until_waiting(front, 1)
        front.replica.hold = False
        assert text(read_answer(retry)) == front.text()
    assert front.process.wait(60) == 0
    assert [settle.status for settle in front.settles] == [200]
