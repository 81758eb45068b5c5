"""Tests of how much memory the front process uses for the bodies of queued requests."""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Iterator

import msgspec
import psutil
import pytest

from appliance.channel.core_messages import Abort, Admitted
from appliance.channel.front_settings import Limits
from appliance.channel.identity import Identity
from appliance.channel.served_models import Route
from appliance.front.encoding import text_bytes
from appliance.front.schemas import MAX_MESSAGES, ChatMessage, ChatRequest
from appliance.front.tokenization import HIDE_INLINE_CHARACTERS, conversation_size
from appliance.front.validation import parse_struct
from tests.front.harness import Harness
from tests.front.raw import Answer, ask, connect, read_answer, request

COMPLETIONS = "/v1/completions"
LONG = {"model": "demo", "prompt": [300, 301, 302, 303] * 62_000, "truncate_prompt_tokens": 1}


@pytest.fixture
def waiting(front: Harness) -> Iterator[contextlib.ExitStack]:
    """Keep the connections of queued requests open."""
    front.admit = "hold"
    with contextlib.ExitStack() as connections:
        yield connections
    front.admit = "at once"
    front.identify()
    for admit in front.admits:
        front.send(Abort(admit.request_id, "the test is over"))
    front.settled(len(front.admits))


def post(front: Harness, waiting: contextlib.ExitStack, body: object, **headers: str) -> socket.socket:
    """Send a request and keep the connection open."""
    sock = waiting.enter_context(connect(front))
    sock.sendall(request(body, COMPLETIONS, headers))
    return sock


@pytest.mark.parametrize("has_key", [False, True])
def test_a_waiting_request_holds_only_its_tokens(
    front: Harness, waiting: contextlib.ExitStack, has_key: bool
) -> None:
    memory = psutil.Process(front.process.pid).memory_info

    def send(count: int) -> None:
        for _ in range(count):
            sent = len(front.admits)
            headers = {"Idempotency-Key": f"long-{sent}"} if has_key else {}
            post(front, waiting, LONG, **headers)
            front.wait_for(lambda sent=sent: len(front.admits) == sent + 1)

    send(3)
    before = memory().rss
    send(7)
    # Each of these bodies would take 10 MB of memory once parsed.
    front.wait_for(lambda: memory().rss - before < 50e6)
    assert all(admit.prompt_tokens == 1 for admit in front.admits)


def test_messages_without_text_are_not_prepared_on_the_event_loop() -> None:
    characters, memory = conversation_size([ChatMessage(role="user", content="")] * MAX_MESSAGES)
    assert characters > HIDE_INLINE_CHARACTERS
    assert memory >= characters


def test_the_parser_keeps_no_text_of_a_body() -> None:
    body = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "hi"}], "user": "somebody"})
    first, second = (parse_struct(ChatRequest, msgspec.json.decode(body)).user for _ in range(2))
    assert first == second and first is not second


def test_texts_count_by_the_memory_that_they_take() -> None:
    assert 2000 <= text_bytes(["x" * 1000] * 2) < 2500
    assert 4000 <= text_bytes(["x" * 999 + "😀"]) < 4500


@pytest.mark.parametrize("has_key", [False, True])
def test_prompts_that_the_log_policy_keeps_count_as_bodies_until_the_request_ends(
    front: Harness, waiting: contextlib.ExitStack, has_key: bool
) -> None:
    front.identify(uids={os.getuid(): Identity(tenant="local", log_policy="full")})
    front.configure(limits=Limits(max_body_bytes=100_000, max_tenant_body_bytes=250_000))
    body = {"model": "demo", "prompt": "x" * 90_000, "truncate_prompt_tokens": 1}

    def send(number: int) -> socket.socket:
        return post(front, waiting, body, **({"Idempotency-Key": f"kept-{number}"} if has_key else {}))

    held = []
    for number in range(2):
        held.append(send(number))
        front.wait_for(lambda number=number: len(front.admits) == number + 1)
    if has_key:
        # After the client disconnects, the request keeps running for some time, and its prompt stays in
        # memory.
        held[0].close()
    refused: Answer = read_answer(send(2))
    assert (refused.status, refused.error["code"]) == (503, "too_many_body_bytes")
    if not has_key:
        for sock in held:
            sock.close()
        front.settled(2)
        send(3)
        front.wait_for(lambda: len(front.admits) == 3)


def test_a_body_that_is_kept_for_a_fallback_model_counts_until_the_request_is_admitted(
    front: Harness, waiting: contextlib.ExitStack
) -> None:
    front.identify(uids={os.getuid(): Identity(tenant="local", may_fall_back=True)})
    routes = [Route(name="demo", unit="demo", fallback="other"), Route(name="other", unit="demo")]
    front.configure(limits=Limits(max_body_bytes=100_000, max_tenant_body_bytes=150_000), routes=routes)
    front.endless()
    body = {"model": "demo", "prompt": "x" * 90_000, "truncate_prompt_tokens": 1, "max_tokens": -1}
    post(front, waiting, body)
    front.wait_for(lambda: len(front.admits) == 1)
    assert read_answer(post(front, waiting, body)).status == 503
    front.send(Admitted(front.admits[0].request_id, 0, front.replica.name, "salt", 1))
    front.wait_for(lambda: len(front.replica.running) == 1)
    post(front, waiting, body)
    front.wait_for(lambda: len(front.admits) == 2, 10)


@pytest.mark.parametrize("has_key", [False, True])
def test_streams_that_have_ended_take_no_memory(front: Harness, has_key: bool) -> None:
    memory = psutil.Process(front.process.pid).memory_info
    prompts = [[260 + number % 90 for number in range(400)]] * 16
    body = {"model": "demo", "prompt": prompts, "max_tokens": 1, "stream": True}

    def send(count: int) -> None:
        for _ in range(count):
            headers = {"Idempotency-Key": f"ended-{len(front.admits)}"} if has_key else {}
            assert ask(front, "POST", COMPLETIONS, body, headers).status == 200

    send(10)
    before = memory().rss
    send(70)
    # The token ids of each of these requests would take 250 KB of memory.
    front.wait_for(lambda: memory().rss - before < 12e6)
