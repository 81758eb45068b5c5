"""Tests that requests with an Idempotency-Key run once, even if their clients disconnect or retry."""

from __future__ import annotations

import gc
import hashlib
import os
import re
import socket
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from appliance.front.generation import Generation
from appliance.front.request_context import RequestContext
from appliance.messages import Abort, Admitted, Claimed, Identity, Refused, RetryRules, StopFront
from tests.front.harness import KEY, MODEL, Harness
from tests.front.raw import Answer, chat, connect, events, read_answer, request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def front(front: Harness) -> Iterator[Harness]:
    """The shared front, with a tenant that no other test uses, because idempotency keys belong to a
    tenant."""
    tenant = f"tenant-{uuid.uuid4()}"
    front.identify(
        keys={hashlib.sha256(KEY.encode()).hexdigest(): Identity(tenant=tenant, key_id="key_1")},
        uids={os.getuid(): Identity(tenant=tenant)},
    )
    yield front
    front.identify()


def send(
    sock: socket.socket, key: str, body: dict[str, Any] | None = None, path: str = CHAT, **headers: str
) -> None:
    sock.sendall(request(chat() if body is None else body, path, {"Idempotency-Key": key, **headers}))


def ask(front: Harness, key: str, body: dict[str, Any] | None = None, path: str = CHAT) -> Answer:
    with connect(front) as sock:
        send(sock, key, body, path)
        return read_answer(sock)


def text(answer: Answer, index: int = 0) -> str:
    if "text/event-stream" not in answer.headers["content-type"]:
        choice = answer.json["choices"][index]
        return choice["message"]["content"] if "message" in choice else choice["text"]
    pieces = [event["choices"][0] for event in events(answer)[:-1] if event["choices"]]
    return "".join(
        piece["delta"].get("content", "") if "delta" in piece else piece["text"]
        for piece in pieces
        if piece["index"] == index
    )


def own_releases(front: Harness) -> list[bool]:
    """Return the `void` flag of each release of this test's requests."""
    own = {admit.request_id for admit in front.admits}
    return [release.void for release in front.releases if release.request_id in own]


BODIES = [
    (CHAT, chat()),
    (CHAT, chat(stream=True, n=3, stream_options={"include_usage": True})),
    (CHAT, chat(stream=True, logprobs=True, top_logprobs=2)),
    (COMPLETIONS, {"model": MODEL, "prompt": "quick", "echo": True, "logprobs": 1}),
    (COMPLETIONS, {"model": MODEL, "prompt": ["quick", "brown"], "n": 2, "stream": True}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_a_retry_repeats_the_answer_and_nothing_runs_twice(
    front: Harness, path: str, body: dict[str, Any]
) -> None:
    first, again = ask(front, "repeat-me", body, path), ask(front, "repeat-me", body, path)
    assert (first.status, again.status) == (200, 200)
    assert b"".join(first.body.split()) == b"".join(again.body.split())
    assert len(front.admits) == 1
    (settle,) = front.settled(1)
    front.wait_for(lambda: len(front.retried) == 1)
    row = front.retried[0]
    assert (row.retry, row.retry_of, row.status) == ("repeated", settle.request_id, 200)
    assert row.request_id == again.headers["x-request-id"] != first.headers["x-request-id"]
    assert again.headers["idempotent-replayed"] == "true"
    assert again.headers["x-appliance-retry-of"] == settle.request_id == first.headers["x-request-id"]
    assert "idempotent-replayed" not in first.headers
    assert again.headers["x-appliance-class"] == first.headers["x-appliance-class"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_continues_after_its_client_disconnects_and_a_retry_joins_it(
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
    time.sleep(0.05)
    assert not front.settles and not front.replica.cancels
    with connect(front) as second:
        send(second, "left", body)
        time.sleep(0.02)
        front.replica.hold = False
        answer = read_answer(second)
    assert (answer.status, text(answer)) == (200, front.text())
    (settle,) = front.settled(1)
    whole = len(front.sentence_script(front.replica.submits[0], 0))
    assert (settle.status, settle.delivered_tokens) == (200, whole)
    assert len(front.admits) == 1


def test_a_run_without_clients_is_cancelled_after_the_grace_period(front: Harness) -> None:
    letter = front.tokenizer.encode_blocking("a", False)
    assert len(letter) == 1
    front.endless(*letter)
    front.configure(retries=RetryRules(grace_s=0.2))

    def handed() -> int:
        return sum(len(letters) for letters in re.findall(rb'"content":"(a+)"', received))

    with connect(front) as sock:
        send(sock, "gone", chat(stream=True))
        front.wait_for(lambda: len(front.replica.running) == 1)
        received = b""
        while handed() < 5:
            received += sock.recv(1 << 16)
        front.replica.hold = True
        made = front.call(lambda: front.replica.running[0].position)
        while handed() < made:
            received += sock.recv(1 << 16)
    front.replica.hold = False
    (settle,) = front.settled(1)
    front.wait_for(lambda: not front.replica.running)
    assert (settle.status, settle.finish_reason) == (499, "cancelled")
    # Only delivered tokens are billed. Tokens generated after the client disconnected are not.
    assert settle.delivered_tokens == handed() < front.reports[-1].tokens
    assert own_releases(front) == [True]
    ask(front, "gone", chat(max_tokens=1))
    assert len(front.admits) == 2


def test_the_same_key_with_another_body_is_refused(front: Harness) -> None:
    ask(front, "mine", chat())
    answer = ask(front, "mine", chat(stream=True))
    assert answer.status == 422
    assert answer.error["code"] == "idempotency_key_reused"
    assert answer.error["param"] == "Idempotency-Key"
    front.wait_for(lambda: len(front.rejected) == 1)
    assert len(front.admits) == 1


def test_a_key_is_separate_for_each_endpoint_and_caller(front: Harness) -> None:
    ask(front, "k", chat())
    ask(front, "k2", chat())
    ask(front, "k", {"model": MODEL, "prompt": "quick"}, COMPLETIONS)
    with connect(front, tcp=True) as sock:
        send(sock, "k", chat(), Authorization=f"Bearer {KEY}")
        assert "idempotent-replayed" not in read_answer(sock).headers
    assert len(front.admits) == len({claim.scope for claim in front.claimed}) == 4


def test_a_caller_that_moves_to_another_tenant_gets_no_answers_of_the_former_one(front: Harness) -> None:
    for tenant in ("one", "other"):
        front.identify(uids={os.getuid(): Identity(tenant=f"{tenant}-{uuid.uuid4()}")})
        assert "idempotent-replayed" not in ask(front, "same", chat()).headers
        assert ask(front, "same", chat(seed=7)).status == 422
    assert len(front.admits) == 2


@pytest.mark.parametrize("key", ["", "two words", "x" * 256, "ümlaut"])
def test_an_invalid_key_is_refused(front: Harness, key: str) -> None:
    answer = ask(front, key)
    assert (answer.status, answer.error["param"]) == (400, "Idempotency-Key")


def test_two_keys_are_refused(front: Harness) -> None:
    with connect(front) as sock:
        send(sock, "a", **{"idempotency-key": "b"})
        assert read_answer(sock).status == 400


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_of_a_failed_run_runs_anew(front: Harness, stream: bool) -> None:
    front.refusal = Refused("", 0, 429, "quota_exceeded", "the quota is used up", 1.5)
    front.admit = "refuse"
    assert ask(front, "again", chat(stream=stream)).status == 429
    front.admit = "at once"
    front.claims = lambda claim: Claimed(claim.scope, False, "the first one")
    answer = ask(front, "again", chat(stream=stream))
    assert (answer.status, text(answer)) == (200, front.text())
    assert [admit.retry_of for admit in front.admits] == ["", "the first one"]
    (release,) = front.releases
    assert release.void


def test_retries_that_joined_a_failing_run_get_its_error(front: Harness) -> None:
    front.admit = "hold"
    socks = [connect(front) for _ in range(3)]
    for sock in socks:
        send(sock, "doomed")
    front.wait_for(lambda: len(front.admits) == 1)
    request_id = front.admits[0].request_id
    front.refused.add(request_id)
    front.call(lambda: front.channel.send(Refused(request_id, 0, 503, "queue_timeout", "full", 2.0)))
    answers = [read_answer(sock) for sock in socks]
    for sock in socks:
        sock.close()
    assert [answer.status for answer in answers] == [503] * 3
    assert {answer.headers["retry-after"] for answer in answers} == {"2"}
    front.wait_for(lambda: len(front.retried) == 2)
    assert {row.status for row in front.retried} == {503}


def test_an_invalid_body_is_refused_each_time(front: Harness) -> None:
    body = chat(max_tokens=100_000)
    for _ in range(2):
        answer = ask(front, "too-long", body)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    front.wait_for(lambda: len(front.rejected) == 2)
    assert not front.admits and not front.retried


def test_a_retry_of_an_aborted_stream_runs_anew(front: Harness) -> None:
    front.endless()
    with connect(front) as sock:
        send(sock, "aborted", chat(stream=True))
        front.wait_for(lambda: len(front.replica.running) == 1)
        assert sock.recv(1, socket.MSG_PEEK)
        front.send(Abort(front.admits[0].request_id, "the operator ended it"))
        assert events(read_answer(sock))[-1]["error"]["message"] == "the operator ended it"
    front.wait_for(lambda: len(front.releases) == 1)
    front.script = front.replica.script = front.sentence_script
    assert text(ask(front, "aborted", chat(stream=True))) == front.text()
    assert len(front.admits) == 2


# ── memory ──


def test_answers_are_kept_within_bounds_on_time_and_memory(front: Harness) -> None:
    front.configure(retries=RetryRules(keep_s=0.2))
    ask(front, "short-lived")
    front.wait_for(lambda: bool(own_releases(front)))
    assert own_releases(front) == [False]
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
def test_only_the_answer_of_a_run_is_kept(front: Harness, stream: bool) -> None:
    """The prompt may be a thousand times as long as the answer. It does not count towards the memory limit
    for answers."""
    with connect(front) as sock:
        send(sock, "one", chat(stream=stream))
        read_answer(sock)
    front.settled(1)

    def kept() -> list[object]:
        gc.collect()
        ran = front.admits[0].request_id
        alive = gc.get_objects()
        runs = [one for one in alive if type(one) is Generation and one.context.request_id == ran]
        calls = [one for one in alive if type(one) is RequestContext and one.request_id == ran]
        return [*runs, *calls]

    front.wait_for(lambda: not kept())
    assert "idempotent-replayed" in ask(front, "one", chat(stream=stream)).headers


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_wait_get_an_answer_that_is_too_long_to_be_kept(front: Harness, stream: bool) -> None:
    front.configure(retries=RetryRules(max_bytes=3000))
    body = chat(stream=stream, n=8)
    front.admit = "hold"
    with connect(front) as first, connect(front) as second:
        for sock in (first, second):
            send(sock, "too-big", body)
        front.wait_for(lambda: len(front.admits) == 1)
        front.send(Admitted(front.admits[0].request_id, 0, front.replica.name, "salt", 1))
        answers = [read_answer(first), read_answer(second)]
    for answer in answers:
        assert [text(answer, sample) for sample in range(8)] == [front.text(sample) for sample in range(8)]
    front.admit = "at once"
    front.settled(1)
    assert own_releases(front) == [True]
    ask(front, "too-big", body)
    assert len(front.admits) == 2


def test_a_late_follower_of_a_long_answer_gets_all_of_it(front: Harness) -> None:
    body = {"model": MODEL, "prompt": "quick", "stream": True, "n": 64, "logprobs": 5, "max_tokens": -1}
    first = ask(front, "long", body, COMPLETIONS)
    again = ask(front, "long", body, COMPLETIONS)
    # The answer is longer than two of the pieces in which stored answers are written.
    assert len(first.body) > 150_000
    assert first.body == again.body


# ── another front has the run ──


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("size", [1, 300_000])
def test_a_connection_moves_to_the_front_that_has_the_run(front: Harness, tcp: bool, size: int) -> None:
    front.claims = lambda claim: Claimed(claim.scope, True)
    body = chat() | {"metadata": {"name": "x" * size}}
    headers = {"Authorization": f"Bearer {KEY}", "X-Request-Id": "mine"}
    with connect(front, tcp=tcp) as sock:
        send(sock, "moving", body, **headers)
        front.wait_for(lambda: len(front.moved) == 1)
        # The other front has no record of the run, so the request runs here.
        front.claims = lambda claim: Claimed(claim.scope, False)
        moved = front.give_back()
        assert moved.kind == ("tcp" if tcp else "unix") and bool(moved.peer) == tcp
        answer = read_answer(sock)
        assert (answer.status, text(answer)) == (200, front.text())
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-appliance-request-id"].startswith("mine.")
        # The connection stays in the front that holds it now.
        send(sock, "moving", body, **headers)
        assert "idempotent-replayed" in read_answer(sock).headers
    assert len(front.admits) == 1 and not front.rejected
    if tcp:
        assert front.admits[0].peer == moved.peer
    assert front.admits[0].identity.key_id == "key_1"


def test_a_connection_with_further_requests_on_it_does_not_move(front: Harness) -> None:
    front.claims = lambda claim: None
    with connect(front) as sock:
        # Both requests are sent in one packet, so the front has read both when it asks the core about the
        # first.
        sock.sendall(request(chat(), CHAT, {"Idempotency-Key": "pipelined"}) + request(chat()))
        front.wait_for(lambda: len(front.claimed) == 1)
        front.send(Claimed(front.claimed[0].scope, True))
        answer = read_answer(sock)
        assert (answer.status, answer.error["code"]) == (409, "idempotency_key_in_use")
        assert answer.headers["connection"] == "close"
    assert not front.moved


def test_openais_client_with_its_own_idempotency_header(front: Harness, client: openai.OpenAI) -> None:
    # The client's `idempotency_key` option needs the name of a header, and for this API the client has no
    # default name.
    client._idempotency_header = "Idempotency-Key"
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
    assert len(front.claimed) == 1


def test_a_stopping_front_ends_runs_without_clients(own_front: Callable[..., Harness]) -> None:
    front = own_front()
    front.endless()
    with connect(front) as sock:
        send(sock, "orphan", chat(stream=True))
        front.wait_for(lambda: len(front.replica.running) == 1)
    time.sleep(0.05)
    assert not front.settles
    front.send(StopFront(30.0))
    (settle,) = front.settled(1)
    assert settle.status == 499
    assert front.core_closed.wait(30)
