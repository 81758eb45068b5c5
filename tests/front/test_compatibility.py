"""Tests of features that are not part of OpenAI's API but that clients of other servers expect: other paths,
other key headers, CORS, and comments in streams while no data is sent."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import openai
import pytest

from appliance.channel.core_messages import Admitted, Refused
from appliance.channel.front_settings import Limits
from tests.front.harness import KEY, MODEL, Harness
from tests.front.raw import ask, chat, connect, read_answer, request

CHAT = "/v1/chat/completions"
ORIGIN = "https://chat.example.com"


@pytest.fixture
def configured(front: Harness) -> Iterator[Any]:
    """Return a function that changes the front process's limits. The change is undone after the test."""

    def configure(**limits: Any) -> None:
        front.reconfigure(limits=msgspec.structs.replace(Limits(), **limits))

    yield configure
    front.reconfigure()


# ── paths ────────────────────────────────────────────────────────────────────────────────────────


def test_a_slash_at_the_end_of_a_path_is_ignored(front: Harness) -> None:
    assert ask(front, "GET", "/v1/models/").json == ask(front, "GET", "/v1/models").json
    assert ask(front, "GET", "/v1/models/demo/").json["id"] == "demo"
    assert ask(front, "POST", CHAT + "/", chat()).status == 200
    assert front.admits[0].endpoint == CHAT
    assert ask(front, "GET", "/").status == 404


@pytest.mark.parametrize("kind", ["chat/completions", "completions"])
@pytest.mark.parametrize("named", [{}, {"model": "something else"}, {"model": ""}])
def test_azures_paths_select_the_model(front: Harness, kind: str, named: dict[str, str]) -> None:
    body = chat(max_tokens=3) if kind.startswith("chat") else {"prompt": "x", "max_tokens": 3}
    body = {name: value for name, value in body.items() if name != "model"} | named
    path = f"/openai/deployments/demo/{kind}?api-version=2024-10-21"
    answer = ask(front, "POST", path, body, {"api-key": KEY}, tcp=True)
    assert (answer.status, answer.json["model"]) == (200, "demo")
    assert (front.admits[0].model, front.admits[0].identity.tenant) == ("demo", "acme")
    path = f"/openai/deployments/other/{kind}"
    assert ask(front, "POST", path, body, {"api-key": KEY}, tcp=True).error["code"] == "model_not_found"


@pytest.mark.usefixtures("restore_models")
def test_an_idempotency_key_of_one_deployment_is_a_different_key_for_another(front: Harness) -> None:
    """The names of the deployments begin with a prefix that is longer than the part of a path that the log
    shows. The front process must still distinguish the deployments."""
    names = ["m" * 150 + end for end in "12"]
    front.models = [front.served(name) for name in names]
    front.reconfigure()
    body = {"messages": chat()["messages"]}
    key = {"Idempotency-Key": "deployments"}
    paths = [f"/openai/deployments/{name}/chat/completions" for name in names]
    first, second = (ask(front, "POST", path, body, key) for path in paths)
    assert [answer.json["model"] for answer in (first, second)] == names


def test_openais_client_for_azure_works(front: Harness) -> None:
    endpoint = f"http://127.0.0.1:{front.port}"
    options: dict[str, Any] = {"api_version": "2024-10-21", "api_key": KEY, "max_retries": 0}
    with openai.AzureOpenAI(azure_endpoint=endpoint, **options) as client:
        answer = client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "hi"}])
        assert answer.choices[0].message.content == front.text()
        stream = client.completions.create(model=MODEL, prompt="x", stream=True, max_tokens=100)
        assert "".join(chunk.choices[0].text for chunk in stream) == front.text()


# ── keys ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("header", ["api-key", "x-api-key", "X-API-Key"])
def test_a_key_may_be_sent_in_other_headers(front: Harness, header: str) -> None:
    assert ask(front, "GET", "/v1/models", headers={header: KEY}, tcp=True).status == 200
    wrong = ask(front, "GET", "/v1/models", headers={header: "ak-wrong"}, tcp=True)
    assert (wrong.status, wrong.error["code"]) == (401, "invalid_api_key")
    assert ask(front, "GET", "/v1/models", headers={header: ""}, tcp=True).error["code"] == "missing_api_key"


def test_the_authorization_header_takes_precedence_over_other_key_headers(front: Harness) -> None:
    both = {"Authorization": "Bearer ak-wrong", "api-key": KEY}
    assert ask(front, "GET", "/v1/models", headers=both, tcp=True).status == 401
    both = {"Authorization": f"Bearer {KEY}", "api-key": "ak-wrong"}
    assert ask(front, "GET", "/v1/models", headers=both, tcp=True).status == 200


# ── CORS ─────────────────────────────────────────────────────────────────────────────────────────


def preflight(front: Harness, origin: str) -> Any:
    headers = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type,x-stainless-lang",
    }
    return ask(front, "OPTIONS", CHAT, headers=headers, tcp=True)


def cors(answer: Any) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("access-control")}


def test_without_the_setting_no_origin_is_allowed(front: Harness) -> None:
    answer = preflight(front, ORIGIN)
    assert (answer.status, cors(answer)) == (401, {})
    answer = ask(front, "POST", CHAT, chat(), {"Origin": ORIGIN})
    assert (answer.status, cors(answer)) == (200, {})


def test_only_pages_of_the_configured_origins_may_call_the_api(front: Harness, configured: Any) -> None:
    configured(cors_origins=(ORIGIN, "http://localhost:3000"))
    answer = preflight(front, ORIGIN)
    assert answer.status == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert {"authorization", "content-type", "x-stainless-lang"} <= set(
        re.split(", ?", answer.headers["access-control-allow-headers"])
    )
    assert "POST" in answer.headers["access-control-allow-methods"]
    for body in (chat(), chat(stream=True)):
        answer = ask(
            front, "POST", CHAT, body, {"Origin": ORIGIN, "Authorization": f"Bearer {KEY}"}, tcp=True
        )
        assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, ORIGIN)
        assert "x-request-id" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers
    # The response must allow a web page to read why its request was refused. A successful preflight request
    # does not replace the key.
    answer = ask(front, "POST", CHAT, chat(), {"Origin": ORIGIN}, tcp=True)
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (401, ORIGIN)
    for other in ("https://evil.example", "null", ORIGIN + ".evil.example", ORIGIN.upper()):
        assert (preflight(front, other).status, cors(preflight(front, other))) == (401, {})
        answer = ask(front, "POST", CHAT, chat(), {"Origin": other})
        assert (answer.status, cors(answer)) == (200, {})
    assert cors(ask(front, "POST", CHAT, chat())) == {}


def test_a_star_allows_every_origin(front: Harness, configured: Any) -> None:
    configured(cors_origins=("*",))
    assert preflight(front, "https://any.example").headers["access-control-allow-origin"] == "*"
    answer = ask(front, "GET", "/v1/models", headers={"Origin": "https://any.example"})
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")


# ── streams that wait for data ───────────────────────────────────────────────────────────────────


def waiting(front: Harness, sock: Any, stop: bytes) -> bytes:
    """Start a stream whose request stays in the queue. Read the stream until `stop` has arrived."""
    front.admit = "hold"
    sock.sendall(request(chat(stream=True)))
    return read_until(sock, stop)


def read_until(sock: Any, stop: bytes) -> bytes:
    data = b""
    while stop not in data:
        piece = sock.recv(1 << 16)
        assert piece, data
        data += piece
    return data


def test_a_queued_stream_gets_headers_at_once_and_comments(front: Harness, configured: Any) -> None:
    configured(stream_comment_interval_s=0.05)
    with connect(front) as sock:
        data = waiting(front, sock, b": waiting\n\n\r\n")
        assert data.startswith(b"HTTP/1.1 200") and b"text/event-stream" in data and b"data:" not in data
        read_until(sock, b": waiting")
        front.send(Admitted(front.admits[0].request_id, 0, front.replica.name, "salt", 1))
        assert b"data:" in read_until(sock, b"[DONE]")
    assert front.settled(1)[0].status == 200


def test_a_stream_that_is_silent_after_its_first_token_gets_comments(front: Harness, configured: Any) -> None:
    configured(stream_comment_interval_s=0.3)
    front.endless()
    with connect(front) as sock:
        sock.sendall(request(chat(stream=True)))
        read_until(sock, b'"content":"')
        front.replica.hold = True
        read_until(sock, b": waiting")
        read_until(sock, b": waiting")
        front.replica.hold = False
        read_until(sock, b"data:")


def test_openais_client_ignores_comments(front: Harness, configured: Any, client: openai.OpenAI) -> None:
    configured(stream_comment_interval_s=0.02)
    front.replica.hold = True
    stream = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    # The client has already received the headers, so comments are sent while the stream waits for data.
    front.wait_for(lambda: bool(front.replica.submits))
    time.sleep(0.2)
    front.replica.hold = False
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == front.text()


def test_a_refusal_after_the_headers_were_sent_is_an_error_event(front: Harness, configured: Any) -> None:
    configured(stream_comment_interval_s=0.05)
    with connect(front) as sock:
        waiting(front, sock, b": waiting")
        request_id = front.admits[0].request_id
        front.refused.add(request_id)
        refusal = Refused(request_id, 0, 503, "queue_timeout", "waited too long", retry_after_s=1.0)
        front.call(lambda: front.channel.send(refusal))
        rest = read_until(sock, b"\r\n0\r\n\r\n")
    assert b'"code": "queue_timeout"' in rest and b"[DONE]" not in rest
    assert not front.settles


def test_a_client_that_leaves_a_queued_stream_withdraws_its_request(front: Harness, configured: Any) -> None:
    configured(stream_comment_interval_s=0.05)
    with connect(front) as sock:
        waiting(front, sock, b": waiting")
    (settle,) = front.settled(1)
    assert (settle.status, settle.submitted) == (499, False)


def test_complete_answers_and_streams_without_the_setting_get_no_comments(
    front: Harness, configured: Any
) -> None:
    front.admit = "hold"
    configured(stream_comment_interval_s=0.0)
    for body in (chat(stream=True), chat()):
        if not body.get("stream"):
            configured(stream_comment_interval_s=0.05)
        before = len(front.admits)
        with connect(front) as sock:
            sock.sendall(request(body))
            front.wait_for(lambda: len(front.admits) > before)  # noqa: B023
            # Wait for many comment intervals, and thus long past the time at which the headers would have
            # been sent.
            time.sleep(0.8)
            request_id = front.admits[-1].request_id
            front.refused.add(request_id)
            refusal = Refused(request_id, 0, 503, "queue_timeout", "waited too long", retry_after_s=1.0)
            front.call(lambda: front.channel.send(refusal))  # noqa: B023
            assert read_answer(sock).status == 503
