"""Tests of authentication, and of what responses reveal to unauthenticated clients."""

from __future__ import annotations

import os
import re

import pytest

from appliance.channel.core_messages import Refused
from appliance.front.app import build_app
from appliance.front.app_state import AppState
from appliance.scopes import check_routes
from tests.front.harness import KEY, Harness
from tests.front.raw import ask, chat
from tests.prompts import prompt_of

OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/health/live/", "/health/")


def routes() -> list[tuple[str, str]]:
    """Return the method and path of every route of the application."""
    app, _ = build_app(AppState(lambda message: None, lambda message, descriptors: None))
    table = [
        (method, re.sub(r"\{[^}]*\}", "demo", route.path))
        for route in check_routes(app)
        for method in sorted(route.methods)
    ]
    assert ("POST", "/v1/chat/completions") in table and ("GET", "/openapi.json") in table
    assert ("GET", "/health/live") in table
    return table


NOWHERE = [
    ("GET", "/"),
    ("GET", "/docs"),
    ("GET", "/v1/"),
    ("GET", "/health/"),
    ("GET", "/health/live/"),
    ("GET", "/health/live/x"),
    ("GET", "//health/live"),
]


@pytest.mark.parametrize(("method", "path"), routes() + NOWHERE)
def test_every_route_except_health_requires_an_identity(front: Harness, method: str, path: str) -> None:
    body = b"{}" if method == "POST" else None
    no_key = ask(front, method, path, body, tcp=True)
    bad_key = ask(front, method, path, body, {"Authorization": "Bearer ak-wrong"}, tcp=True)
    basic = ask(front, method, path, body, {"Authorization": "Basic eDp5"}, tcp=True)
    mistyped_on_unix = ask(front, method, path, body, {"Authorization": "Bearer ak-wrong"})
    good_key = ask(front, method, path, body, {"Authorization": f"bearer {KEY}"}, tcp=True)
    if path in OPEN_PATHS:
        assert {answer.status for answer in (no_key, bad_key, basic)} == {200}
        return
    for answer in (no_key, bad_key, basic, mistyped_on_unix):
        assert answer.status == 401
        assert answer.headers["www-authenticate"] == "Bearer"
    if method != "HEAD":
        assert no_key.error["code"] == "missing_api_key"
        assert bad_key.error["code"] == "invalid_api_key"
        assert basic.error["code"] == "unsupported_authorization"
    assert good_key.status not in (401, 500)
    assert ask(front, method, path, body).status == good_key.status


def test_a_unix_peer_is_identified_by_its_uid_unless_it_sends_a_key(front: Harness) -> None:
    ask(front, "POST", "/v1/chat/completions", chat())
    ask(front, "POST", "/v1/chat/completions", chat(), {"Authorization": f"Bearer {KEY}"})
    assert [(admit.identity.tenant, admit.peer) for admit in front.admits] == [
        ("local", f"uid {os.getuid()}"),
        ("acme", f"uid {os.getuid()}"),
    ]


def test_an_unknown_uid_is_refused_unless_any_uid_is_allowed(front: Harness) -> None:
    from appliance.channel.identity import Identity

    try:
        front.identify(uids={})
        front.wait_for(lambda: ask(front, "GET", "/v1/models").status == 401)
        assert ask(front, "GET", "/v1/models").error["code"] == "unknown_uid"
        front.identify(uids={}, any_uid=Identity(tenant="guests"))
        front.wait_for(lambda: ask(front, "GET", "/v1/models").status == 200)
    finally:
        front.identify()
        front.wait_for(lambda: ask(front, "GET", "/v1/models").status == 200)


def test_a_revoked_key_stops_working_at_once(front: Harness) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    assert ask(front, "GET", "/v1/models", headers=headers, tcp=True).status == 200
    try:
        front.identify(keys={})
        front.wait_for(lambda: ask(front, "GET", "/v1/models", headers=headers, tcp=True).status == 401)
    finally:
        front.identify()


def test_the_body_of_an_unauthenticated_request_is_not_read(front: Harness) -> None:
    # The test sends only the head of the request. If the server waited for the body, no response would
    # arrive.
    answer = ask(front, "POST", "/v1/chat/completions", None, {"Content-Length": "1000000"}, tcp=True)
    assert answer.status == 401


def test_unauthenticated_requests_are_counted_and_not_logged(front: Harness) -> None:
    before = front.report().unauthenticated
    for _ in range(3):
        ask(front, "GET", "/v1/models", tcp=True)
    front.wait_for(lambda: front.reports[-1].unauthenticated >= before + 3)
    assert not front.rejected


def test_errors_of_the_router_have_openais_format(front: Harness) -> None:
    missing = ask(front, "GET", "/v1/nothing")
    assert (missing.status, missing.error["code"]) == (404, "not_found")
    assert (
        missing.error["message"] == "the path '/v1/nothing' does not exist; GET /openapi.json lists all paths"
    )
    wrong = ask(front, "GET", "/v1/chat/completions")
    assert (wrong.status, wrong.error["code"], wrong.headers["allow"]) == (405, "method_not_allowed", "POST")
    assert wrong.error["message"] == "'/v1/chat/completions' does not support GET; use POST"
    front.wait_for(lambda: len(front.rejected) == 2)
    assert [row.endpoint for row in front.rejected] == ["/v1/nothing", "/v1/chat/completions"]


def test_long_names_are_cut_off_in_errors_and_in_the_log(front: Harness) -> None:
    path, name = "/" + "p" * 999, "m" * 1000
    assert repr(path[:100]) in ask(front, "GET", path).error["message"]
    assert path[:101] not in ask(front, "GET", path).body.decode()
    front.wait_for(lambda: len(front.rejected) == 2)
    assert front.rejected[0].endpoint == path[:100]
    answer = ask(front, "GET", f"/health/ready?model={name}", headers={"Authorization": f"Bearer {KEY}"})
    assert answer.status == 404
    assert repr(name[:80]) in answer.body.decode() and name[:81] not in answer.body.decode()


def test_every_answer_has_the_request_id_of_the_log(front: Harness) -> None:
    answer = ask(front, "POST", "/v1/chat/completions", chat())
    assert answer.headers["x-request-id"] == front.settled(1)[0].request_id
    assert answer.json["id"].endswith(answer.headers["x-request-id"])
    for path in ("/health/live", "/v1/models", "/nowhere"):
        assert ask(front, "GET", path).headers["x-request-id"]


def test_a_clients_request_id_is_echoed_exactly_and_the_logged_one_never_collides(front: Harness) -> None:
    answers = [
        ask(front, "POST", "/v1/chat/completions", chat(), {"X-Request-Id": "trace-7"}) for _ in range(2)
    ]
    assert [answer.headers["x-request-id"] for answer in answers] == ["trace-7", "trace-7"]
    logged = [answer.headers["x-appliance-request-id"] for answer in answers]
    assert logged == [settle.request_id for settle in front.settled(2)]
    assert all(request_id.startswith("trace-7.") for request_id in logged)
    assert logged[0] != logged[1]
    odd = ask(front, "GET", "/v1/models", headers={"X-Request-Id": 'a b"{ü' * 10})
    assert odd.headers["x-request-id"] == 'a b"{ü' * 10
    assert odd.headers["x-appliance-request-id"].startswith("req-")


def test_a_request_id_of_more_than_1024_bytes_is_not_echoed(front: Harness) -> None:
    answers = [
        ask(front, "GET", "/v1/models", headers={"X-Request-Id": "i" * length}) for length in (1024, 1025)
    ]
    assert answers[0].headers["x-request-id"] == "i" * 1024
    assert answers[1].headers["x-request-id"].startswith("req-")


def test_only_authenticated_clients_learn_why_a_service_is_not_ready(front: Harness) -> None:
    key = {"Authorization": f"Bearer {KEY}"}
    assert ask(front, "GET", "/health/ready", tcp=True).json == {"status": "ready", "reason": None}
    front.configure(ready=False, reason="demo loads: 40%")
    front.wait_for(lambda: ask(front, "GET", "/health/ready").status == 503)
    for answer in (
        ask(front, "GET", "/health/ready", headers=key, tcp=True),
        ask(front, "GET", "/health/ready"),
    ):
        assert answer.json == {"status": "not_ready", "reason": "demo loads: 40%"}
        assert int(answer.headers["retry-after"]) > 0
    for path in ("/health/ready", "/health", "/health?model=demo"):
        unknown = ask(front, "GET", path, tcp=True)
        assert unknown.status == 503 and b"demo" not in unknown.body
    assert ask(front, "GET", "/health/live", tcp=True).json["status"] == "live"


def test_health_reveals_nothing_about_models_without_a_key(front: Harness) -> None:
    answers = [
        ask(front, "GET", f"/health/ready?{query}", tcp=True)
        for query in ("model=gone", "model=demo", "%6dodel=demo", "x=1&model=demo")
    ]
    assert {answer.status for answer in answers} == {401}
    assert len({answer.body for answer in answers}) == 1
    unknown = ask(front, "GET", "/health/ready?model=gone")
    assert (unknown.status, unknown.json["reason"]) == (
        404,
        "there is no model 'gone'; GET /v1/models lists the available models",
    )
    assert ask(front, "GET", "/health/ready?model=demo").status == 200


def test_every_host_header_is_accepted(front: Harness) -> None:
    for host in ("x", "evil.example:1", "[::1]", "*"):
        assert ask(front, "GET", "/v1/models", headers={"Host": host}).status in (200, 400)
    assert ask(front, "GET", "/v1/models").status == 200


@pytest.mark.usefixtures("restore_models")
def test_requests_for_a_model_with_a_broken_tokenizer_get_the_reason(front: Harness) -> None:
    front.models = [front.served(), front.served("bad", folder="/nowhere")]
    front.configure()
    front.wait_for(lambda: ask(front, "GET", "/health/ready").status == 503)
    assert "/nowhere" in ask(front, "GET", "/health/ready").json["reason"]
    answer = ask(front, "POST", "/v1/completions", {"model": "bad", "prompt": "x"})
    assert (answer.status, answer.error["code"]) == (503, "model_broken")
    assert ask(front, "POST", "/v1/completions", {"model": "demo", "prompt": "x"}).status == 200


@pytest.mark.usefixtures("restore_models")
def test_unknown_properties_of_a_model_do_not_refuse_requests(front: Harness) -> None:
    """A model's properties are unknown if, for example, its config.json is unreadable. The core can then
    explain why the model cannot be served, so the front process leaves the refusal to the core."""
    front.models = [front.served(max_model_len=0, vocab_size=0)]
    front.configure()
    front.wait_for(lambda: ask(front, "GET", "/v1/models/demo").json["max_model_len"] is None)
    front.admit, front.refusal = "refuse", Refused("", 0, 503, "model_failed", "config.json is not JSON")
    body = {"model": "demo", "prompt": [5, 6], "logit_bias": {"7": 1.0}, "stop_token_ids": [9]}
    for answer in (
        ask(front, "POST", "/v1/chat/completions", chat(max_tokens=3)),
        ask(front, "POST", "/v1/completions", body),
    ):
        assert answer.status == 503, answer.body
        assert answer.error["message"] == "config.json is not JSON"
    assert front.admits[0].max_tokens == 3


def test_tokenize_and_detokenize_are_inverse(front: Harness) -> None:
    made = ask(
        front, "POST", "/tokenize", {"model": "demo", "prompt": "naïve 😀", "return_token_strs": True}
    ).json
    assert made["tokens"][0] == 0 and made["token_strs"][0] == "<s>"
    assert made["count"] == len(made["tokens"]) == len(made["token_strs"])
    back = ask(front, "POST", "/detokenize", {"model": "demo", "tokens": made["tokens"]}).json
    assert back == {"prompt": "<s>naïve 😀"}
    messages = [{"role": "user", "content": "hi"}]
    chatted = ask(front, "POST", "/tokenize", {"model": "demo", "messages": messages}).json
    ask(front, "POST", "/v1/chat/completions", chat())
    assert chatted["tokens"] == prompt_of(front.replica.submits[0])
    assert ask(front, "POST", "/tokenize", {"model": "demo"}).status == 400
    unknown = ask(front, "POST", "/detokenize", {"model": "demo", "tokens": [1 << 80]})
    assert (unknown.status, unknown.error["param"]) == (400, "tokens")
