"""Tests of callers' rights (scopes, models, classes and lengths), and of the responses to requests that
exceed these rights."""

from __future__ import annotations

import hashlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route

from appliance.channel.core_messages import Identities
from appliance.channel.identity import Identity
from appliance.http.peers import peer_of
from appliance.scopes import ScopedRoute, check_routes, granted
from tests.front.harness import KEY, MAX_MODEL_LEN, Harness
from tests.front.raw import Answer, ask, chat, connect, request

SHA256 = hashlib.sha256(KEY.encode()).hexdigest()
BEARER = {"Authorization": f"Bearer {KEY}"}


def limited(front: Harness, **rights: Any) -> None:
    """Give the key these rights, and wait until the front applies them."""
    marked = f"key_{time.monotonic_ns()}"
    front.identify(keys={SHA256: Identity(tenant="acme", key_id=marked, **rights)})
    # The front process reports the key's id for a rejected request. The new id therefore shows that it has
    # applied the new rights.
    front.wait_for(lambda: probe(front) == marked)
    front.rejected.clear()


def probe(front: Harness) -> str:
    before = len(front.rejected)
    ask(front, "GET", "/nowhere", headers=BEARER)
    front.wait_for(lambda: len(front.rejected) > before)
    return front.rejected[-1].identity.key_id


@pytest.fixture
def rights(front: Harness, restore_models: None) -> Iterator[Harness]:
    """The shared front process. The rights of all callers are restored after the test."""
    yield front
    front.identify()
    front.wait_for(lambda: probe(front) == "key_1")


def generate(front: Harness, headers: dict[str, str] | None = None, **fields: Any) -> Answer:
    return ask(front, "POST", "/v1/chat/completions", chat(**fields), BEARER | (headers or {}), tcp=True)


def test_every_path_refuses_a_suspended_tenant_with_the_reason(rights: Harness) -> None:
    limited(rights, suspended=True)
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/chat/completions"), ("GET", "/nowhere")):
        answer = ask(rights, method, path, b"{}" if method == "POST" else None, BEARER, tcp=True)
        assert (answer.status, answer.error["code"]) == (403, "tenant_suspended")
        assert "'acme' is suspended" in answer.error["message"]
    assert not rights.admits
    rights.wait_for(lambda: len(rights.rejected) == 3)
    assert {row.status for row in rights.rejected} == {403}


def test_running_answers_continue_when_their_tenant_is_suspended(rights: Harness) -> None:
    rights.replica.hold = True
    with connect(rights) as stream:
        stream.sendall(request(chat(stream=True), headers=BEARER))
        rights.wait_for(lambda: bool(rights.replica.running))
        for _ in range(5):
            rights.call(rights.replica.step)
        assert stream.recv(1000)
        limited(rights, suspended=True)
        assert not rights.settles
        rights.replica.hold = False
        rest = b""
        while b"[DONE]" not in rest:
            rest += stream.recv(1 << 16)


def test_a_key_without_the_scope_is_refused_with_the_scopes_name(rights: Harness) -> None:
    for scopes in (("admin",), ("read",), ("admin", "read")):
        limited(rights, scopes=scopes)
        answer = generate(rights)
        assert (answer.status, answer.error["code"]) == (403, "insufficient_scope")
        assert "scope 'inference'" in answer.error["message"]
        assert ask(rights, "GET", "/v1/models", headers=BEARER).status == 403
        # The response must not reveal which methods a path accepts.
        assert ask(rights, "GET", "/v1/chat/completions", headers=BEARER).status == 403
    assert not rights.admits


def test_a_key_can_use_and_see_only_its_models(rights: Harness) -> None:
    rights.models = [rights.served("demo"), rights.served("secret")]
    rights.configure()
    rights.wait_for(lambda: len(ask(rights, "GET", "/v1/models").json["data"]) == 2)
    limited(rights, models=("demo",))
    listed = ask(rights, "GET", "/v1/models", headers=BEARER).json["data"]
    assert [model["id"] for model in listed] == ["demo"]
    assert ask(rights, "GET", "/v1/models/demo", headers=BEARER).status == 200
    for name in ("secret", "nothing"):
        refusals = [
            ask(rights, "GET", f"/v1/models/{name}", headers=BEARER),
            generate(rights, model=name),
            ask(rights, "POST", "/v1/completions", {"model": name, "prompt": "x"}, BEARER),
            ask(rights, "POST", "/tokenize", {"model": name, "prompt": "x"}, BEARER),
            ask(rights, "POST", "/detokenize", {"model": name, "tokens": [1]}, BEARER),
        ]
        # The response must be the same whether or not the model exists.
        for answer in refusals:
            assert (answer.status, answer.error["code"]) == (403, "model_not_allowed")
            assert answer.error["param"] == "model"
    assert generate(rights).status == 200


@pytest.mark.parametrize(
    ("highest", "default", "asked", "tier", "got"),
    [
        (1, 1, None, None, "P1"),
        (1, 2, None, None, "P2"),
        (0, 1, "p0", None, "P0"),
        (1, 1, "P0", None, "P1"),
        (2, 2, None, "priority", "P2"),
        (0, 1, None, "flex", "P2"),
        (0, 1, "P3", "priority", "P3"),
    ],
)
def test_the_answer_names_the_requests_class(
    rights: Harness, highest: int, default: int, asked: str | None, tier: str | None, got: str
) -> None:
    limited(rights, highest_class=highest, default_class=default)
    headers = {"X-Appliance-Class": asked} if asked else {}
    for stream in (False, True):
        answer = generate(rights, headers, service_tier=tier, stream=stream)
        assert (answer.status, answer.headers["x-appliance-class"]) == (200, got)
    # The core decides on the class. The front process therefore forwards the requested class unchanged.
    assert {admit.asked_class for admit in rights.admits} == {
        (asked or tier or "").upper() if asked else tier or ""
    }


def test_an_unknown_class_is_refused_with_the_headers_name(front: Harness) -> None:
    wrong = generate(front, {"X-Appliance-Class": "P9"})
    assert (wrong.status, wrong.error["param"]) == (400, "x-appliance-class")


def test_answers_of_other_routes_name_no_class(rights: Harness) -> None:
    assert "x-appliance-class" not in ask(rights, "GET", "/v1/models").headers


def test_a_tenants_context_limit_applies_if_it_is_below_the_models(rights: Harness) -> None:
    limited(rights, context_tokens=20)
    prompt = [9] * 12
    body = {"model": "demo", "prompt": prompt}
    assert ask(rights, "POST", "/v1/completions", body, BEARER).status == 200
    assert rights.admits[-1].max_tokens == 8
    for wrong in ({"prompt": [9] * 20}, {"max_tokens": 9}):
        answer = ask(rights, "POST", "/v1/completions", body | wrong, BEARER)
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert "tenant 'acme''s maximum context length is 20 tokens" in answer.error["message"]
    limited(rights, context_tokens=10 * MAX_MODEL_LEN)
    answer = ask(rights, "POST", "/v1/completions", body | {"max_tokens": MAX_MODEL_LEN}, BEARER)
    assert "this model's maximum context length" in answer.error["message"]


def test_a_request_without_max_tokens_gets_its_tenants_default(rights: Harness) -> None:
    limited(rights, default_max_tokens=5)
    generate(rights)
    generate(rights, max_tokens=9)
    limited(rights, default_max_tokens=100 * MAX_MODEL_LEN)
    generate(rights)
    assert [admit.max_tokens for admit in rights.admits][:2] == [5, 9]
    assert rights.admits[2].max_tokens == MAX_MODEL_LEN - rights.admits[2].prompt_tokens


def test_a_prompt_is_truncated_to_its_tenants_context(rights: Harness) -> None:
    limited(rights, context_tokens=50)
    body = {"model": "demo", "prompt": [5] * 200, "max_tokens": 10, "truncate_prompt_tokens": -1}
    assert ask(rights, "POST", "/v1/completions", body, BEARER).status == 200
    assert (rights.admits[0].prompt_tokens, rights.admits[0].max_tokens) == (40, 10)
    error = ask(rights, "POST", "/v1/completions", body | {"truncate_prompt_tokens": 45}, BEARER).error
    assert (error["param"], error["code"]) == ("max_tokens", "context_length_exceeded")


def test_a_tenants_default_length_takes_precedence_over_that_of_completions(rights: Harness) -> None:
    limited(rights, default_max_tokens=40)
    for fields in ({}, {"max_tokens": -1}):
        answer = ask(rights, "POST", "/v1/completions", {"model": "demo", "prompt": "x", **fields}, BEARER)
        assert answer.status == 200
    assert [admit.max_tokens for admit in rights.admits] == [
        40,
        MAX_MODEL_LEN - rights.admits[1].prompt_tokens,
    ]


def test_a_front_refuses_an_expired_key_without_a_message_of_the_core(rights: Harness) -> None:
    expires_at = time.time() + 2.0
    rights.identify(keys={SHA256: Identity(tenant="acme", key_id="key_1", expires_at=expires_at)})
    rights.wait_for(lambda: ask(rights, "GET", "/v1/models", headers=BEARER).status == 401, 60)
    assert time.time() >= expires_at
    assert ask(rights, "GET", "/v1/models", headers=BEARER).error["code"] == "invalid_api_key"


def test_a_uid_takes_precedence_over_groups_and_groups_over_any_uid(rights: Harness) -> None:
    uid, gid = os.getuid(), os.getgid()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"uids": {uid: Identity(tenant="by-uid")}, "gids": {gid: Identity(tenant="by-gid")}}, "by-uid"),
        ({"uids": {}, "gids": {gid: Identity(tenant="by-gid")}}, "by-gid"),
        ({"gids": {gid: Identity(tenant="by-gid")}, "uids": {}, "any_uid": Identity(tenant="any")}, "by-gid"),
        ({"gids": {gid + 1: Identity(tenant="x")}, "uids": {}, "any_uid": Identity(tenant="any")}, "any"),
    ]
    for table, tenant in cases:
        rights.identify(**table)

        def known(tenant: str = tenant) -> bool:
            ask(rights, "POST", "/v1/chat/completions", chat())
            return rights.admits[-1].identity.tenant == tenant

        rights.wait_for(known)


def test_a_change_of_some_identities_keeps_the_others(rights: Harness) -> None:
    def status(key: str) -> int:
        return ask(rights, "GET", "/v1/models", headers={"Authorization": f"Bearer {key}"}).status

    other = hashlib.sha256(b"ak-other").hexdigest()
    table: dict[str, Any] = {"uids": {os.getuid(): Identity(tenant="local")}, "whole": False}
    rights.call(lambda: rights.channel.send(Identities(keys={other: Identity(tenant="b")}, **table)))
    rights.wait_for(lambda: status("ak-other") == 200)
    assert status(KEY) == 200
    rights.call(lambda: rights.channel.send(Identities(keys={other: None, "00": None}, **table)))
    rights.wait_for(lambda: status("ak-other") == 401)
    assert status(KEY) == 200


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change its uid")
def test_a_unix_peer_is_known_by_all_its_groups() -> None:
    source = """
import os, socket, sys
os.setgroups([4242, 17, 99]); os.setgid(99); os.setuid(12345)
sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1]); sock.recv(1)
"""
    with tempfile.TemporaryDirectory(prefix="peer-") as folder, socket.socket(socket.AF_UNIX) as listener:
        Path(folder).chmod(0o755)
        listener.bind(f"{folder}/s")
        os.chmod(f"{folder}/s", 0o666)
        listener.listen()
        process = subprocess.Popen([sys.executable, "-I", "-S", "-c", source, f"{folder}/s"])
        try:
            accepted, _ = listener.accept()
            with accepted:
                peer = peer_of(accepted)
        finally:
            process.wait(60)
    assert (peer.kind, peer.uid, peer.gids) == ("unix", 12345, (99, 17, 4242))


def test_an_application_with_a_route_without_scope_cannot_be_built() -> None:
    async def endpoint(request: Request) -> Response:
        return Response()

    closed = ScopedRoute("GET", "/closed", endpoint, wanted="inference")
    (found,) = check_routes(Starlette(routes=[closed]))
    assert (found.path, found.wanted) == ("/closed", "inference")
    for other in (Route("/plain", endpoint), Mount("/mounted", Starlette())):
        with pytest.raises(TypeError, match="does not declare a scope"):
            check_routes(Starlette(routes=[closed, other]))
    with pytest.raises(ValueError, match="not a scope"):
        ScopedRoute("GET", "/closed", endpoint, wanted="everything")


def test_the_scope_admin_includes_read_and_nothing_else() -> None:
    assert granted(("admin",)) == {"admin", "read"}
    assert granted(("inference",)) == {"inference"}
    assert granted(()) == frozenset()
