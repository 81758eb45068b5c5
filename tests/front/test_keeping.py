"""Tests that the front process keeps only the prompts and answers that the tenant's log policy allows."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator

import httpx
import openai
import pytest

from appliance.channel.front_settings import KeepRules
from appliance.channel.identity import Identity
from appliance.front.keeping import MAX_WAITING_CHARS, Keeper, Transcript
from store.structs import KeptText
from tests.front.harness import MODEL, Harness

KEY = "ak-42Wz8WexrvPVbzgyANeDeA367WMYIg4REgNL5PcR8Ik"
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": f'My key is {KEY}, and {{"password": "hunter2hunter2"}}.'},
]
CONVERSATION = (
    '[{"role":"system","content":"Be brief."},{"role":"user","content":"My key is %s, and '
    '{\\"password\\": \\"%s\\"}."}]'
)


@pytest.fixture
def policy(front: Harness) -> Iterator[Harness]:
    yield front
    front.identify()


def keeps(front: Harness, log_policy: str) -> None:
    front.identify(uids={os.getuid(): Identity(tenant="local", log_policy=log_policy)})


def kept(front: Harness, count: int = 1) -> list[KeptText]:
    """Return the texts that were kept for the only request of the test."""
    front.wait_for(lambda: len(front.kept) == count)
    return front.kept[front.settled(1)[-1].request_id]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def chat(client: openai.OpenAI, stream: bool = False) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=100,
        n=2,
        stream=stream,  # type: ignore[call-overload]
    )
    for _ in answer if stream else ():
        pass


def test_the_log_policy_metadata_keeps_no_texts(policy: Harness, client: openai.OpenAI) -> None:
    chat(client)
    keeps(policy, "hashes")
    chat(client)
    kept(policy)
    assert len(policy.settles) == 2 and [*policy.kept] == [policy.settles[1].request_id]


@pytest.mark.parametrize("stream", [False, True])
def test_hashes_cover_the_whole_texts(policy: Harness, client: openai.OpenAI, stream: bool) -> None:
    keeps(policy, "hashes")
    chat(client, stream)
    prompt, *answers = kept(policy)
    assert prompt == KeptText("prompt", 0, sha256(CONVERSATION % (KEY, "hunter2hunter2")), prompt.bytes)
    assert [(one.part, one.number, one.sha256, one.text) for one in answers] == [
        ("answer", number, sha256(policy.text(number)), None) for number in range(2)
    ]


@pytest.mark.parametrize("stream", [False, True])
def test_kept_texts_are_redacted(policy: Harness, client: openai.OpenAI, stream: bool) -> None:
    keeps(policy, "full")
    chat(client, stream)
    prompt, *answers = kept(policy)
    assert prompt.text == CONVERSATION % ("[key redacted]", "[password redacted]")
    assert prompt.redactions == 2 and prompt.bytes == len(CONVERSATION % (KEY, "hunter2hunter2"))
    assert [one.text for one in answers] == [policy.text(0), policy.text(1)]
    for part in (prompt, *answers):
        assert part.sha256 == sha256(part.text or ""), "a hash of the original could reveal a short password"


def test_token_ids_are_kept_as_text(policy: Harness, client: openai.OpenAI) -> None:
    keeps(policy, "full")
    ids = policy.tokenizer.encode_blocking(f"Bearer {KEY} ", False)
    client.completions.create(model=MODEL, prompt=[ids, [5, 6]], max_tokens=3)
    first, second, *answers = kept(policy)
    assert first.text == "Bearer [token redacted] " and first.sha256 == sha256(first.text)
    assert second.text == policy.tokenizer.decode([5, 6], skip_special_tokens=False)
    assert len(answers) == 2 and all(answer.text for answer in answers)


def test_only_the_beginning_of_a_long_text_is_kept_without_parts_of_secrets(
    policy: Harness, client: openai.OpenAI
) -> None:
    keeps(policy, "full")
    policy.configure(keeping=KeepRules(max_text_chars=40, secret_prefixes=("acme_",)))
    # The limit cuts the key in two. The first part alone would not be recognised as a secret.
    prompt = "acme_12345 " + "x" * 20 + " " + KEY
    client.completions.create(model=MODEL, prompt=prompt, max_tokens=100)
    asked, answered = kept(policy)
    assert asked.text == ("[secret redacted] " + "x" * 20 + " [key redacted]")[:40]
    assert asked.truncated and asked.redactions == 2 and asked.bytes == len(prompt)
    assert answered.text == policy.text(0)[:40] and answered.truncated


def test_a_cancelled_answer_is_kept_up_to_its_end(policy: Harness, client: openai.OpenAI) -> None:
    keeps(policy, "full")
    policy.replica.step_s = 0.01
    with httpx.Client(transport=httpx.HTTPTransport(uds=policy.api_sock), timeout=600) as http:
        body = {"model": MODEL, "prompt": "a", "max_tokens": 100, "stream": True}
        with http.stream("POST", "http://server/v1/completions", json=body) as response:
            next(response.iter_bytes())
    prompt, answer = kept(policy)
    assert prompt.text == "a" and answer.text and policy.text(0).startswith(answer.text)


async def drop_one() -> Keeper:
    keeper = Keeper(lambda keep, descriptors: None)
    large = "x" * (MAX_WAITING_CHARS // 2)
    for number in range(3):
        keeper.keep(
            Transcript(
                f"req-{number}", Identity(tenant="t", log_policy="hashes"), 1.0, [large], [], lambda ids: ""
            )
        )
    await keeper.flush()
    return keeper


def test_dropped_texts_are_counted() -> None:
    assert asyncio.run(drop_one()).dropped == 1


def test_a_refused_request_is_not_kept(policy: Harness, client: openai.OpenAI) -> None:
    keeps(policy, "full")
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model=MODEL, prompt=KEY, max_tokens=100_000)
    client.completions.create(model=MODEL, prompt="fine", max_tokens=3)
    assert kept(policy)[0].text == "fine" and len(policy.kept) == 1
