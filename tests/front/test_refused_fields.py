"""Tests that unsupported fields and values are refused, with the right error messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from appliance.front.refused_fields import (
    REFUSED,
    REFUSED_IN_CHATS,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_MESSAGES,
)
from tests.front.harness import Harness
from tests.front.raw import chat, post
from tests.prompts import prompt_of

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"

WRONG: dict[str, Any] = {"do_sample": 0, "suffix": "secret end", "add_special_tokens": 7}
"""For some fields, a value that must be refused. The default example, 3, would be accepted or ambiguous for
these fields."""

FIELDS_OF_OTHER_SERVERS = """
guided_json guided_regex guided_choice guided_grammar structured_outputs json_schema regex grammar ebnf
typical_p top_a tfs_z mirostat mirostat_tau mirostat_eta xtc_probability xtc_threshold
dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
repeat_penalty no_repeat_ngram_size min_new_tokens max_new_tokens n_predict
use_beam_search num_beams length_penalty stop_regex logits_processors
"""
"""Fields of vLLM, SGLang, TGI and llama.cpp that change the answer. The product has the same list. The copy
makes a test fail if a field is removed from the product's list."""


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_every_field_that_would_change_the_answer_is_refused_with_value_and_remedy(
    front: Harness, path: str
) -> None:
    fields = REFUSED + (REFUSED_IN_CHATS if path == CHAT else REFUSED_IN_COMPLETIONS)
    others = "best_of echo chat_template documents tools functions" if path == CHAT else "suffix"
    assert {*FIELDS_OF_OTHER_SERVERS.split(), *others.split()} <= {field.name for field in fields}
    for field in fields:
        body = chat() if path == CHAT else {"model": "demo", "prompt": "x"}
        answer = post(front, path, body | {field.name: WRONG.get(field.name, 3)})
        assert (answer.status, answer.error["param"]) == (400, field.name)
        assert answer.error["code"] == "unsupported_parameter"
        shown = "this value" if field.is_content else repr(WRONG.get(field.name, 3))
        assert (
            f"{field.name}: {shown} is not supported by this server; {field.remedy}"
            == answer.error["message"]
        )
    assert not front.admits


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_fields_that_change_no_answer_are_ignored(front: Harness, path: str) -> None:
    body = chat(max_tokens=2) if path == CHAT else {"model": "demo", "prompt": "x"}
    expected = post(front, path, body).body
    ignored = {
        "prediction": {"type": "content", "content": "x"},
        "store": True,
        "metadata": {"a": "b"},
        "user": "somebody",
        "something_new": [1],
    }
    answer = post(front, path, body | ignored)
    assert answer.status == 200
    assert json.loads(answer.body)["choices"] == json.loads(expected)["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_refused_fields_are_accepted_with_neutral_values(front: Harness, path: str) -> None:
    fields = REFUSED + (REFUSED_IN_CHATS if path == CHAT else REFUSED_IN_COMPLETIONS)
    body = chat(max_tokens=2) if path == CHAT else {"model": "demo", "prompt": "x"}
    most = max(len(field.neutral) for field in fields)
    for number in range(-3, most):
        values = {
            field.name: (None, False, "")[number] if number < 0 else field.neutral[number]
            for field in fields
            if number < len(field.neutral)
        }
        answer = post(front, path, body | values)
        assert answer.status == 200, answer.body


def test_a_long_value_of_a_refused_field_is_shortened_in_the_error(front: Harness) -> None:
    for value, shown in (
        ("x" * 100_000, f"'{'x' * 40}…'"),
        (10**4000, "a very large number"),
        ({"a": 1}, "an object"),
        ([1], "a list"),
        (True, "True"),
        ("{message}", "'{message}'"),
    ):
        message = post(front, CHAT, chat(mirostat=value)).error["message"]
        assert message.startswith(f"mirostat: {shown} is not supported")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"temperature": 3}, "temperature: must be a number from 0 to 2, not 3"),
        ({"temperature": "1"}, "temperature: must be a number from 0 to 2, not '1'"),
        ({"n": 1.5}, "n: must be an integer from 1 to 128, not 1.5"),
        ({"min_tokens": -1}, "min_tokens: must be an integer of at least 0, not -1"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be a number above 0 and of at most 100, not 0"),
        ({"stream": 1}, "stream: must be true or false, not 1"),
        ({"model": ""}, "model: must not be empty"),
        ({"service_tier": 5}, "service_tier: must be 'auto' or"),
        ({"stop_token_ids": [7, None]}, "stop_token_ids[1]: must be an integer of at least 0, not null"),
        ({"stream_options": {"include_usage": []}}, "stream_options.include_usage: must be true or false"),
        ({"messages": [{"role": "user"}]}, "messages[0].content: is required"),
        ({"messages": "my secret"}, "messages: must be a list, not a string"),
        ({"messages": ["my secret"]}, "messages[0]: must be an object, not a string"),
        (
            {"chat_template_kwargs": {"a": json.loads("[" * 300 + "]" * 300)}},
            "chat_template_kwargs: is nested",
        ),
    ],
)
def test_an_error_names_the_field_the_value_and_what_is_allowed(
    front: Harness, fields: dict[str, Any], message: str
) -> None:
    error = post(front, CHAT, chat(**fields)).error
    assert error["message"].startswith(message)
    assert error["param"] == message.partition(":")[0]


def test_a_whole_number_may_be_written_with_a_decimal_point(front: Harness) -> None:
    assert post(front, CHAT, chat(n=2.0, max_tokens=3.0, stop_token_ids=[7.0])).status == 200
    assert (front.replica.submits[-1].n, front.replica.submits[-1].sampling.max_tokens) == (2, 3)


def test_tool_calls_in_messages_and_formats_are_refused_by_name(front: Harness) -> None:
    for field in REFUSED_IN_MESSAGES:
        body = {"model": "demo", "messages": [{"role": "user", "content": "x", field.name: {"a": 1}}]}
        assert post(front, CHAT, body).error["param"] == f"messages[0].{field.name}"
    for body in (chat(response_format={"type": "json_schema"}), chat(response_format="json")):
        error = post(front, CHAT, body).error
        assert (error["param"], error["code"]) == ("response_format", "unsupported_parameter")
        assert "json" in error["message"]


@pytest.mark.parametrize("fields", [{"content": None}, {}])
def test_an_assistants_message_may_have_no_content_and_others_may_not(
    front: Harness, fields: dict[str, Any]
) -> None:
    user = {"role": "user", "content": "hi"}
    messages = [user, {"role": "assistant", **fields}, user]
    assert post(front, CHAT, {"model": "demo", "messages": messages}).status == 200
    text = front.tokenizer.decode(prompt_of(front.replica.submits[-1]), skip_special_tokens=False)
    assert "<|assistant|></s><|user|>" in text
    error = post(front, CHAT, {"model": "demo", "messages": [{"role": "user", **fields}]}).error
    assert (error["param"], error["code"]) == ("messages[0].content", "missing_required_parameter")


def test_the_field_user_is_logged_for_run_and_refused_requests(front: Harness) -> None:
    assert post(front, CHAT, chat(user="somebody")).status == 200
    assert post(front, CHAT, chat(user="s" * 512) | {"model": "no"}).status == 404
    front.wait_for(lambda: bool(front.rejected))
    assert (front.admits[0].user, front.rejected[0].user) == ("somebody", "s" * 512)
    key = {"Idempotency-Key": "k"}
    for _ in range(2):
        assert post(front, CHAT, chat(user="somebody"), **key).status == 200
    front.wait_for(lambda: bool(front.retried))
    assert front.retried[0].user == "somebody"


@pytest.mark.parametrize(
    ("path", "body", "tokens"),
    [
        ("/v1/completions", {"prompt": "x" * 2000, "truncate_prompt_tokens": 10}, 1991),
        ("/v1/completions", {"prompt": [300] * 2000, "truncate_prompt_tokens": 10}, 1990),
        ("/tokenize", {"prompt": "x" * 2000}, 2001),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 2000}]}, 2004),
        ("/detokenize", {"tokens": [300] * 2000}, 2000),
    ],
    ids=["truncated text", "truncated tokens", "tokens of a text", "tokens of a chat", "text of tokens"],
)
def test_tokens_encoded_outside_of_a_generation_are_charged(
    front: Harness, path: str, body: dict[str, Any], tokens: int
) -> None:
    assert post(front, path, {"model": "demo", "max_tokens": 1, **body}).status == 200
    front.wait_for(lambda: bool(front.worked))
    (worked,) = front.worked
    assert (worked.identity.tenant, worked.tokens) == ("local", tokens)


def test_a_field_user_that_is_too_long_is_refused(front: Harness) -> None:
    error = post(front, CHAT, chat(user="s" * 513)).error
    assert (error["param"], error["code"]) == ("user", "invalid_value")
    assert "has 513 characters; at most 512 are allowed" in error["message"]
