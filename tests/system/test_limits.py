"""Tests of each quota limit of tenants and of keys, on a real service. Limits are changed while the service
runs. Usage must survive a restart and a crash."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from appliance.actions.parameters import CreateKey, CreateTenant, SetKey, SetTenant
from appliance.client import AdminClient
from appliance.protocol import LimitUsage, NewKey
from store.requests import RequestFilter, RequestReader
from tests.system.service import CALL_TIMEOUT_S, Service, service

pytestmark = pytest.mark.system
SCOPES = ["tenant", "key"]


class Caller:
    """A separate tenant with one key. The limits are set either on the tenant or on the key."""

    made = 0

    def __init__(self, running: Service, scope: str, **limits: Any) -> None:
        Caller.made += 1
        self.running, self.scope, self.name = running, scope, f"{scope}-{Caller.made}"
        with self.admin() as admin:
            own = limits if scope == "tenant" else {}
            default = limits.pop("default_max_tokens", 16)
            admin.act(CreateTenant(name=self.name, default_max_tokens=default, **own))
            own = limits if scope == "key" else {}
            made = admin.act(CreateKey(name="app", tenant=self.name, **own))
        assert isinstance(made, NewKey)
        self.key_id, self.key = made.id, made.key

    def admin(self) -> AdminClient:
        return AdminClient(self.running.run_dir, CALL_TIMEOUT_S)

    def set(self, **limits: Any) -> None:
        with self.admin() as admin:
            if self.scope == "tenant":
                admin.act(SetTenant(name=self.name, **limits))
            else:
                admin.act(SetKey(id=self.key_id, **limits))

    def usage(self) -> dict[str, LimitUsage]:
        with self.admin() as admin:
            if self.scope == "tenant":
                found = next(one.usage for one in admin.tenants() if one.name == self.name)
            else:
                found = next(one.usage for one in list(admin.keys()) if one.id == self.key_id)
        return {usage.limit: usage for usage in found}

    def in_flight(self) -> list[str]:
        """Return the states of the tenant's requests."""
        with self.admin() as admin:
            return sorted(one.state for one in admin.in_flight() if one.tenant == self.name)

    def body(self, prompt: int, max_tokens: int | None, **fields: Any) -> dict[str, Any]:
        asked = {"model": "demo", "prompt": [50] * prompt, "ignore_eos": True, "temperature": 0, **fields}
        return asked if max_tokens is None else {**asked, "max_tokens": max_tokens}

    def ask(self, prompt: int = 5, max_tokens: int | None = 5, **fields: Any) -> httpx.Response:
        """Send one request and return the whole answer."""
        with self.running.http() as http:
            body = self.body(prompt, max_tokens, **fields)
            return http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {self.key}"})

    @contextmanager
    def long_answer(self, prompt: int = 5, max_tokens: int = 1900) -> Iterator[None]:
        """Run a stream during the block. Its client disconnects at the end of the block."""
        with (
            self.running.http() as http,
            http.stream(
                "POST",
                "/v1/completions",
                json=self.body(prompt, max_tokens, stream=True),
                headers={"authorization": f"Bearer {self.key}"},
            ) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            lines = answer.iter_lines()
            next(lines)
            yield

    def wait(self, condition: Callable[[], object], description: str) -> None:
        self.running.wait_until(condition, 60, description)


@pytest.fixture(scope="module")
def running() -> Iterator[Service]:
    with service("--kv-blocks", "200") as started:
        yield started


def refused(answer: httpx.Response, kind: str, code: str = "rate_limit_exceeded") -> dict[str, Any]:
    """Check a 429 response and return its error in OpenAI's format."""
    assert answer.status_code == 429, answer.text
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"], error["param"]) == (kind, code, None)
    return error


def tokens(answer: httpx.Response) -> int:
    """Return the number of generated tokens."""
    assert answer.status_code == 200, answer.text
    return int(answer.json()["usage"]["completion_tokens"])


@pytest.mark.parametrize("scope", SCOPES)
def test_the_limit_on_requests_per_minute_is_enforced(running: Service, scope: str) -> None:
    caller = Caller(running, scope, requests_per_minute=1.0, burst_s=120.0)
    began = time.monotonic()
    first, second, third = caller.ask(), caller.ask(stream=True), caller.ask()
    took_s = time.monotonic() - began
    assert (first.status_code, second.status_code) == (200, 200)
    left = [answer.headers["x-ratelimit-remaining-requests"] for answer in (first, second, third)]
    assert left == ["1", "0", "0"]
    assert first.headers["x-ratelimit-limit-requests"] == "2"
    assert first.headers["x-ratelimit-reset-requests"] == "1m0s"
    assert "x-ratelimit-limit-tokens" not in first.headers
    assert scope in refused(third, "requests")["message"]
    assert 59 - took_s < int(third.headers["retry-after"]) <= 60
    assert 59_000 - 1000 * took_s < int(third.headers["retry-after-ms"]) <= 60_000
    assert "x-should-retry" not in third.headers


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("limit", ["tokens_per_minute", "tokens_per_day"])
def test_the_token_limits_are_enforced(running: Service, scope: str, limit: str) -> None:
    limits = {"tokens_per_day": 60.0} if limit == "tokens_per_day" else {limit: 12.0, "burst_s": 300.0}
    caller = Caller(running, scope, **limits)
    began = time.monotonic()
    assert tokens(caller.ask(10, 20)) == 20
    # The front reports the end of a request to the core only after the client has received the answer.
    running.wait_until(lambda: caller.usage()[limit].held == 0, 60, "the request's end in the core")
    used = caller.usage()[limit]
    # At 12 tokens per minute, one token is refilled in five seconds.
    assert 29 - (time.monotonic() - began) / 5 <= used.used <= 30 and (used.held, used.capacity) == (0, 60)
    answer = caller.ask(10, 40)
    error = refused(answer, "tokens")
    assert f"{limit.replace('_', ' ')} of {scope}" in error["message"] and "requested 50" in error["message"]
    # no client would wait for half a day
    assert answer.headers.get("x-should-retry") == ("false" if limit == "tokens_per_day" else None)
    too_large = caller.ask(10, 51)
    assert "request too large" in refused(too_large, "tokens")["message"]
    assert too_large.headers["x-should-retry"] == "false" and "retry-after" not in too_large.headers
    assert caller.ask(10, 18).status_code == 200


@pytest.mark.parametrize("scope", SCOPES)
def test_concurrent_and_queued_requests_are_limited(running: Service, scope: str) -> None:
    caller = Caller(running, scope, concurrent_requests=1, queued_requests=1)
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(caller.ask()))
    with caller.long_answer():
        waiting.start()
        caller.wait(lambda: caller.in_flight() == ["queued", "running"], "the second to wait")
        refusal = caller.ask()
        assert f"from {scope}" in refused(refusal, "requests", "tenant_queue_full")["message"]
        assert int(refusal.headers["retry-after"]) >= 1
        used = caller.usage()
        assert used["concurrent_requests"].used == used["queued_requests"].used == 1
        caller.set(concurrent_requests=2)
        waiting.join(300)
        assert [answer.status_code for answer in answers] == [200]
        # The front reports the end of a request to the core only after the client has received the answer.
        caller.wait(lambda: caller.in_flight() == ["running"], "the second request's end in the core")


@pytest.mark.parametrize("scope", SCOPES)
def test_the_limit_on_context_length_is_enforced(running: Service, scope: str) -> None:
    caller = Caller(running, scope, context_tokens=20)
    assert tokens(caller.ask(15, None)) == 5
    answer = caller.ask(15, 6)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    caller.set(context_tokens=21)
    assert tokens(caller.ask(15, 6)) == 6


@pytest.mark.parametrize("scope", SCOPES)
def test_the_limit_on_the_share_of_kv_blocks_is_enforced(running: Service, scope: str) -> None:
    caller = Caller(running, scope, kv_share=0.15)  # 15% of 200 blocks, which is 1,920 tokens
    answers: list[httpx.Response] = []
    waiting = threading.Thread(target=lambda: answers.append(caller.ask()))
    with caller.long_answer(5, 1800):
        waiting.start()
        caller.wait(lambda: caller.in_flight() == ["queued", "running"], "the second to wait")
        used = caller.usage()["kv_share"]
        assert (used.used, used.capacity) == (5 + 1800 + 64, 1920)
    waiting.join(300)
    assert [answer.status_code for answer in answers] == [200]


def test_without_max_tokens_an_answer_has_its_tenants_default_and_at_most_the_remaining_quota(
    running: Service,
) -> None:
    caller = Caller(running, "key", tokens_per_day=100.0, default_max_tokens=40)
    assert tokens(caller.ask(10, None)) == 40
    answer = caller.ask(10, None)
    assert tokens(answer) == 40
    assert answer.headers["x-ratelimit-remaining-tokens"] == "0"
    # The core would count a request that is still open against the new quota.
    caller.wait(lambda: caller.in_flight() == [], "the request's end in the core")
    caller.set(tokens_per_day=None)
    caller.set(tokens_per_day=45.0)
    answer = caller.ask(10, None)
    assert (tokens(answer), answer.json()["choices"][0]["finish_reason"]) == (35, "length")
    refused(caller.ask(10, None), "tokens")


@pytest.mark.parametrize("scope", SCOPES)
def test_a_limit_is_changed_and_removed_immediately(running: Service, scope: str) -> None:
    caller = Caller(running, scope, tokens_per_day=30.0)
    assert caller.ask(5, 20).status_code == 200
    refused(caller.ask(5, 5), "tokens")
    caller.set(tokens_per_day=1000.0)
    refused(caller.ask(5, 20), "tokens")  # raising the limit does not refill the quota immediately
    caller.set(tokens_per_day=None)
    answer = caller.ask(5, 30)
    assert tokens(answer) == 30 and not [name for name in answer.headers if "ratelimit" in name]


def test_usage_survives_a_restart_and_the_death_of_the_core(running: Service) -> None:
    callers = [Caller(running, scope, tokens_per_day=1000.0) for scope in SCOPES]
    for caller in callers:
        assert tokens(caller.ask(100, 20)) == 20
    running.stop()
    running.start()
    for caller in callers:
        used = caller.usage()["tokens_per_day"]
        assert used.used in (118, 119, 120) and used.held == 0
        refused(caller.ask(100, 850), "tokens")
        assert tokens(caller.ask(80, 20)) == 20
    # When the core is killed, each caller has finished requests and one running request. The log has rows for
    # all of them.
    streams = [threading.Thread(target=stream_until_cut, args=(caller,)) for caller in callers]
    for thread in streams:
        thread.start()
    running.wait_until(lambda: states(callers) == ["ended"] * 4 + ["open"] * 2, 60, "rows of what runs")
    running.process.kill()
    running.process.wait()
    for thread in streams:
        thread.join(300)
    running.start()
    for caller in callers:
        used = caller.usage()["tokens_per_day"]
        # The core counts the stream's whole reservation as used, because it does not know how many tokens
        # were generated.
        assert used.used in (918, 919, 920) and used.held == 0
        refused(caller.ask(40, 50), "tokens")
        assert tokens(caller.ask(40, 20)) == 20


def states(callers: list[Caller]) -> list[str]:
    """Return the states of the rows of admitted requests."""
    rows = RequestReader(callers[0].running.state_dir / "history.db").query(RequestFilter(), 100)
    names = {caller.name for caller in callers}
    return sorted(row.state for row in rows if row.quota_tokens and row.tenant in names)


def stream_until_cut(caller: Caller) -> None:
    try:
        body = json.dumps(caller.body(50, 650, stream=True))
        with caller.running.http() as http:
            http.post("/v1/completions", content=body, headers={"authorization": f"Bearer {caller.key}"})
    except httpx.TransportError:
        pass
