"""Tests that a tenant's huge prompts consume only that tenant's share of time, memory and quota."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from appliance.channel.front_settings import Limits
from tests.system.attacks.conftest import Target
from tests.system.attacks.reading import doctor
from tests.system.attacks.wire import cpu_s, serving_pids
from tests.system.service import Service
from tests.system.test_limits import Caller

pytestmark = pytest.mark.system
HUGE = "word " * ((Limits().max_body_bytes - 1000) // 5)
WORD = "some words " * 10 + "x" * (Limits().max_body_bytes - 1000)
MAX_DELAY_CPU_S = 1.0
"""Maximum CPU time, in seconds, that the core and the fronts use during a small request beside the attack.
Unlike a duration, it does not depend on other work of the machine. It is about 0.1 s, and it was up to 5 s if
all tenants' prompts were encoded in the order of their arrival."""


def small_request_cpu_s(running: Service) -> float:
    """Return the CPU time, in seconds, that the core and the fronts use during a request from the local user
    with a prompt of 720 characters: the median of three, because a process may be stopped during one."""
    pids, used = serving_pids(running), []
    message = {"role": "user", "content": "some text " * 72}
    body = {"model": "demo", "messages": [message], "max_tokens": 1}
    with running.http() as http:
        for _ in range(3):
            began = cpu_s(*pids)
            answer = http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200, answer.text
            used.append(cpu_s(*pids) - began)
    print(f"CPU times of small requests: {used}")
    return statistics.median(used)


@contextmanager
def flood(
    caller: Caller, path: str, connections: int, refusals: list[str] | None = None, **body: Any
) -> Iterator[Counter[int]]:
    """Send the body repeatedly on the given number of connections. Yield a counter of status codes. Add the
    messages of 503 responses to `refusals`."""
    statuses: Counter[int] = Counter()
    over = threading.Event()
    headers = {"authorization": f"Bearer {caller.key}"}

    def send() -> None:
        with caller.running.http() as http:
            while not over.is_set():
                answer = http.post(path, json={"model": "demo", **body}, headers=headers, timeout=300)
                statuses[answer.status_code] += 1
                if answer.status_code == 503:
                    assert int(answer.headers["retry-after"]) >= 1
                    if refusals is not None:
                        refusals.append(answer.json()["error"]["message"])
                    time.sleep(0.5)

    with ThreadPoolExecutor(connections) as pool:
        senders = [pool.submit(send) for _ in range(connections)]
        try:
            yield statuses
        finally:
            over.set()
        for sender in senders:
            sender.result()


def front_bytes(running: Service) -> int:
    """Return the resident memory of the fronts in bytes."""
    fronts = [one for one in running.descendants() if "appliance.front" in one.cmdline()]
    assert fronts
    return sum(front.memory_info().rss for front in map(psutil.Process, (one.pid for one in fronts)))


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": HUGE}),
        ("/v1/completions", {"prompt": [HUGE[:2000]] * 1000 + [HUGE[:20_000]]}),
        ("/tokenize", {"prompt": HUGE[:1_000_000]}),
        ("/tokenize", {"messages": [{"role": "user", "content": HUGE[:1_000_000]}]}),
        ("/tokenize", {"prompt": "x" * 500_000}),
    ],
    ids=["a prompt", "many prompts", "tokens of a text", "tokens of a chat", "tokens of a long word"],
)
def test_another_tenants_small_request_is_answered_at_once_beside_huge_prompts(
    attacked: Target, path: str, fields: dict[str, Any]
) -> None:
    hog = Caller(attacked.running, "tenant")
    before = front_bytes(attacked.running)
    with flood(hog, path, 8, **fields) as statuses:
        attacked.running.wait_until(
            lambda: sum(statuses.values()) >= 4, 120, "the first answers to the attack"
        )
        assert small_request_cpu_s(attacked.running) < MAX_DELAY_CPU_S
        grown = front_bytes(attacked.running) - before
    assert grown < 200e6, grown
    assert set(statuses) <= {200, 400, 503}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": ["hi", WORD], "truncate_prompt_tokens": 1}, "prompt[1]"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": WORD}]}, "messages"),
        ("/tokenize", {"prompt": WORD}, "prompt"),
    ],
    ids=["a truncated prompt", "a chat", "tokens of a text"],
)
def test_a_word_that_would_be_encoded_in_one_long_step_is_refused(
    attacked: Target, path: str, fields: dict[str, Any], param: str
) -> None:
    with attacked.running.http() as http:
        answer = http.post(
            path, json={"model": "demo", "max_tokens": 1, "truncate_prompt_tokens": 1} | fields
        )
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "xxxxx'…)" in error["message"] and "insert spaces" in error["message"]


def test_prompts_over_the_bound_on_waiting_text_are_refused_for_their_tenant_alone(attacked: Target) -> None:
    hog = Caller(attacked.running, "tenant")
    refusals: list[str] = []
    with flood(hog, "/tokenize", 30, refusals, prompt=HUGE) as statuses:
        attacked.running.wait_until(
            lambda: any(f"tenant {hog.name!r} has" in one and "prompts waiting" in one for one in refusals),
            120,
            "a prompt to be refused because its tenant has too many waiting",
        )
        assert small_request_cpu_s(attacked.running) < MAX_DELAY_CPU_S
    assert set(statuses) <= {200, 503}
    told = "too many prompts in progress"
    attacked.running.wait_until(
        lambda: any(told in problem["description"] for problem in attacked.running.status()["problems"]),
        60,
        "the problem",
    )
    assert any(told in finding for finding in doctor(attacked.running, "warning"))


@pytest.mark.parametrize(
    "fields",
    [{"prompt": HUGE}, {"prompt": ["hi", 5], "suffix": HUGE}],
    ids=["a prompt that is too long", "a body that is not valid"],
)
def test_refused_work_counts_against_the_senders_limits(attacked: Target, fields: dict[str, Any]) -> None:
    # The limits permit 20 requests and 300,000 tokens at once. They recover so slowly that the usage is still
    # visible on a busy machine.
    tenant = Caller(attacked.running, "tenant", requests_per_minute=1, tokens_per_minute=15_000, burst_s=1200)
    headers = {"authorization": f"Bearer {tenant.key}"}
    body = {"model": "demo", **fields}
    with attacked.running.http() as http:
        for _ in range(2):
            assert http.post("/v1/completions", json=body, headers=headers).status_code == 400
    tenant.wait(lambda: tenant.usage()["tokens_per_minute"].used > 290_000, "the charge")
    assert tenant.usage()["requests_per_minute"].used >= 1
    assert tenant.ask(prompt=100, max_tokens=10).status_code in (200, 429)
    with attacked.running.http() as http:
        for _ in range(2):
            http.post("/v1/completions", json=body, headers=headers)
    tenant.wait(
        lambda: tenant.ask(prompt=1000, max_tokens=1000).status_code == 429, "a limit that is reached"
    )


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": HUGE, "truncate_prompt_tokens": 1, "max_tokens": 1}),
        ("/tokenize", {"prompt": HUGE[:1_000_000]}),
        ("/detokenize", {"tokens": [100] * 250_000}),
    ],
    ids=["a truncated prompt", "tokens of a text", "text of tokens"],
)
def test_work_that_is_not_part_of_a_request_counts_against_the_senders_limits(
    attacked: Target, path: str, fields: dict[str, Any]
) -> None:
    tenant = Caller(attacked.running, "tenant", requests_per_minute=3, tokens_per_minute=15_000, burst_s=1200)
    headers = {"authorization": f"Bearer {tenant.key}"}
    with attacked.running.http() as http:
        answer = http.post(path, json={"model": "demo", **fields}, headers=headers)
        assert answer.status_code == 200, answer.text
    tenant.wait(lambda: tenant.usage()["tokens_per_minute"].used > 100_000, "the charge")


def test_a_front_keeps_nothing_of_the_prompts_that_it_refuses(attacked: Target) -> None:
    hog = Caller(attacked.running, "tenant")
    headers = {"authorization": f"Bearer {hog.key}"}
    body = {"model": "demo", "prompt": HUGE, "max_tokens": 1}

    def send(times: int) -> None:
        for number in range(times):
            extra = {"idempotency-key": f"{hog.name}-{times}-{number}"} if number % 2 else {}
            with attacked.running.http() as http:
                assert http.post("/v1/completions", json=body, headers=headers | extra).status_code == 400

    send(10)
    before = front_bytes(attacked.running)
    send(60)
    # Each prompt is 2 MB long. The front must not keep these prompts in memory.
    attacked.running.wait_until(
        lambda: front_bytes(attacked.running) - before < 60e6, 120, "the memory to be free"
    )


def test_a_request_with_a_small_error_uses_no_quota(attacked: Target) -> None:
    tenant = Caller(attacked.running, "tenant", requests_per_minute=60, tokens_per_minute=300_000)
    headers = {"authorization": f"Bearer {tenant.key}"}
    with attacked.running.http() as http:
        assert http.post("/v1/completions", json={"model": "demo"}, headers=headers).status_code == 400
    rows = lambda: attacked.running.rows(tenant=tenant.name)  # noqa: E731
    tenant.wait(rows, "its row")
    assert tenant.usage()["requests_per_minute"].used == 0
