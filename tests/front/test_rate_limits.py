"""Tests of the headers that report a client's rate limits, and of the answer length limit set by the core."""

from __future__ import annotations

import time

import msgspec
import pytest

from appliance.channel.core_messages import RateLimits, Refused
from tests.front.harness import MODEL, Harness
from tests.front.raw import Answer, ask, chat, connect, events, read_answer
from tests.front.test_generation_life import send

BOTH = RateLimits(60, 58, 2.0, 9000, 8500, 363.2)
TOKENS = RateLimits(None, None, None, 9000, 0, 0.25)
REFUSED = Refused(
    "", 0, 429, "rate_limit_exceeded", "too many tokens", 7.25, kind="tokens", rate_limits=TOKENS
)


def limits(answer: Answer) -> dict[str, str]:
    return {name: value for name, value in answer.headers.items() if name.startswith("x-ratelimit-")}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_reports_the_remaining_limits(front: Harness, stream: bool) -> None:
    front.turn = {"rate_limits": BOTH}
    answer = ask(front, "POST", "/v1/chat/completions", chat(stream=stream))
    assert answer.status == 200
    assert limits(answer) == {
        "x-ratelimit-limit-requests": "60",
        "x-ratelimit-remaining-requests": "58",
        "x-ratelimit-reset-requests": "2s",
        "x-ratelimit-limit-tokens": "9000",
        "x-ratelimit-remaining-tokens": "8500",
        "x-ratelimit-reset-tokens": "6m4s",
    }


def test_an_answer_without_limits_has_no_rate_limit_headers(front: Harness) -> None:
    assert limits(ask(front, "POST", "/v1/chat/completions", chat())) == {}


@pytest.mark.parametrize(
    ("stream", "kind", "shown"), [(False, "tokens", "tokens"), (True, "", "rate_limit_error")]
)
def test_a_refusal_is_in_openais_shape_and_not_settled(
    front: Harness, stream: bool, kind: str, shown: str
) -> None:
    front.admit, front.refusal = "refuse", msgspec.structs.replace(REFUSED, kind=kind)
    answer = ask(front, "POST", "/v1/chat/completions", chat(stream=stream))
    assert answer.status == 429
    assert answer.error == {
        "message": "too many tokens",
        "type": shown,
        "param": None,
        "code": "rate_limit_exceeded",
    }
    assert (answer.headers["retry-after"], answer.headers["retry-after-ms"]) == ("8", "7250")
    assert "x-should-retry" not in answer.headers
    assert limits(answer) == {
        "x-ratelimit-limit-tokens": "9000",
        "x-ratelimit-remaining-tokens": "0",
        "x-ratelimit-reset-tokens": "250ms",
    }
    time.sleep(0.05)
    assert not front.settles and not front.rejected


def test_the_token_limit_may_be_lowered_only_if_the_request_sets_none(front: Harness) -> None:
    for path, fields in (
        ("/v1/chat/completions", {}),
        ("/v1/chat/completions", {"max_tokens": 7}),
        ("/v1/chat/completions", {"max_completion_tokens": 7}),
        ("/v1/chat/completions", {"min_tokens": 3}),
        ("/v1/completions", {}),
        ("/v1/completions", {"max_tokens": 7}),
    ):
        words = {"messages": chat()["messages"]} if "chat" in path else {"prompt": "hi"}
        assert ask(front, "POST", path, {"model": MODEL, **words, **fields}).status == 200
    assert [admit.may_lower for admit in front.admits] == [True, False, False, False, True, False]


def test_each_sample_produces_no_more_than_the_core_allows(front: Harness) -> None:
    front.turn = {"most_tokens": 4}
    body = {"model": MODEL, "prompt": ["a", "b"], "n": 2}
    answer = ask(front, "POST", "/v1/completions", body)
    assert [choice["finish_reason"] for choice in answer.json["choices"]] == ["length"] * 4
    assert answer.json["usage"]["completion_tokens"] == 16
    (settle,) = front.settled(1)
    assert settle.delivered_tokens == 16


def test_tokens_delivered_before_a_refused_resubmission_are_billed(front: Harness) -> None:
    front.endless()
    front.turn = {"rate_limits": BOTH}
    with connect(front) as sock:
        send(front, sock, stream=True)
        front.wait_for(lambda: len(front.replica.running) == 1 and front.replica.running[0].position > 3)
        front.admit = "refuse"
        front.refusal = Refused("", 0, 503, "model_failed", "its files are gone", 30.0)
        front.call(front.replica.die)
        answer = read_answer(sock)
    *tokens, error = events(answer)
    assert answer.status == 200 and error["error"]["code"] == "model_failed"
    (settle,) = front.settled(1)
    assert (settle.status, settle.submitted, front.admits[-1].attempt) == (503, False, 1)
    assert settle.delivered_tokens >= 4
    assert len([event for event in tokens if event["choices"][0]["delta"].get("content")]) > 0
