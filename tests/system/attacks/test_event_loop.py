"""Tests that no request blocks a front's event loop, even while the request is being parsed. To add an
attack, add a line to `ATTACKS`."""

from __future__ import annotations

import json
import mmap
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from appliance.channel.front_settings import Limits
from appliance.channel.served_models import ServedModel
from tests.front.harness import MODEL, Harness, write_model
from tests.system.attacks.watched_front import MEASUREMENTS

MAX_BLOCKED = 6.0
"""Maximum CPU time for which the loop may be blocked, as a multiple of the CPU time for decoding `REFERENCE`,
which takes 8 to 10 ms. Their ratio depends neither on the speed of the machine nor on its load."""
REFERENCE = b"[" + b"1," * 200_000 + b"1]"
TRIES = 15
"""Number of attempts. Only the best one counts, because the loop may also do other work between the two
heartbeats around a request, and a busy machine may interrupt the loop while another thread of the front
runs."""
BODY = Limits().max_body_bytes

Measurements = mmap.mmap


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Harness, Measurements]]:
    runtime = tmp_path_factory.mktemp("watched")
    path = runtime / "blocked"
    path.write_bytes(bytes(MEASUREMENTS.size))
    folder = write_model(runtime / "model")
    harness = Harness(folder, runtime)
    harness.module = "tests.system.attacks.watched_front"
    harness.environment = {"BLOCKED_FILE": str(path)}
    harness.models = [
        ServedModel(
            name=MODEL,
            folder=str(folder),
            version="v1",
            created=0,
            max_model_len=1 << 20,
            vocab_size=harness.vocab_size,
        )
    ]
    with open(path, "r+b") as file:
        measurements = mmap.mmap(file.fileno(), MEASUREMENTS.size)
    harness.start()
    yield harness, measurements
    harness.close()


def blocked(measurements: Measurements) -> float:
    """Return the longest CPU time for which the loop was blocked, as a multiple of the CPU time for decoding
    `REFERENCE`: the lowest of three measurements, because other processes slow them down."""
    longest_s, reference_s = max(MEASUREMENTS.unpack_from(measurements)), float("inf")
    for _ in range(3):
        began = time.thread_time()
        json.loads(REFERENCE)
        reference_s = min(reference_s, time.thread_time() - began)
    return longest_s / reference_s


def raw(field: str, value: bytes) -> bytes:
    """Return a chat request with one additional field."""
    head = b'{"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "%b": '
    return head % field.encode() + value + b"}"


def filled(begin: bytes, unit: bytes, end: bytes, size: int = BODY - 1000) -> bytes:
    return begin + unit * ((size - len(begin) - len(end)) // len(unit)) + end


def chat(**fields: Any) -> bytes:
    message = {"role": "user", "content": "hi"}
    return json.dumps({"model": MODEL, "messages": [message], "max_tokens": 1} | fields).encode()


def completion(**fields: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "hi", "max_tokens": 1} | fields).encode()


def says(content: str) -> bytes:
    return chat(messages=[{"role": "user", "content": content}])


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAMES = {f"a{n}": n for n in range(65_000)}
LETTERS = "x " * (BODY // 2 - 1000)

ATTACKS: dict[str, tuple[str, Callable[[], bytes]]] = {
    "many numbers": (CHAT, lambda: filled(raw("x", b"[")[:-1], b"1,", b"1]}", BODY // 8)),
    "too many numbers": (CHAT, lambda: filled(raw("x", b"[")[:-1], b"1,", b"1]}")),
    "many lists": (CHAT, lambda: filled(raw("x", b"[")[:-1], b"[],", b"1]}", BODY // 50)),
    "many long numbers": (CHAT, lambda: filled(raw("x", b"[")[:-1], b"1.2345678e9,", b"1]}")),
    "very small numbers": (CHAT, lambda: filled(raw("x", b"[")[:-1], b"1e-308,", b"1]}", BODY // 128 * 7)),
    "too many small numbers": (CHAT, lambda: filled(raw("x", b"[")[:-1], b"1e-308,", b"1]}", BODY // 2)),
    "many texts": (CHAT, lambda: filled(raw("x", b"[")[:-1], b'"abcdefg",', b"1]}")),
    "many names": (CHAT, lambda: chat(x=NAMES)),
    "too many names": (CHAT, lambda: chat(x={str(n): 1 for n in range(150_000)})),
    "a long number": (CHAT, lambda: raw("x", b"9" * (BODY - 1000))),
    "a long fraction": (CHAT, lambda: raw("x", b"0." + b"1" * (BODY - 1000))),
    "escapes": (CHAT, lambda: filled(raw("user", b'"')[:-1], b"\\u00e9", b'"}')),
    "deep lists": (CHAT, lambda: raw("x", b"[" * 15_000 + b"]" * 15_000)),
    "spaces": (CHAT, lambda: raw("x", b" " * (BODY - 1000) + b"1")),
    "wrong modalities": (CHAT, lambda: chat(modalities=["x"] * 150_000)),
    "wrong stop tokens": (CHAT, lambda: chat(stop_token_ids=["x"] * 150_000)),
    "many biases": (CHAT, lambda: chat(logit_bias={str(n): 1 for n in range(65_000)})),
    "many stop strings": (CHAT, lambda: chat(stop=["x"] * 200_000)),
    "long stop strings": (CHAT, lambda: chat(stop=[chr(97 + n) * 4096 for n in range(16)])),
    "allowed stop strings": (CHAT, lambda: chat(stop=[chr(97 + n) * 255 + "b" for n in range(16)])),
    "template variables": (CHAT, lambda: chat(chat_template_kwargs=NAMES)),
    "nested template variables": (CHAT, lambda: chat(chat_template_kwargs={"a": [[]] * 15_000})),
    "numbers as template variables": (CHAT, lambda: chat(chat_template_kwargs={"a": [1] * 262_000})),
    "fractions as template variables": (CHAT, lambda: chat(chat_template_kwargs={"a": [0.1] * 16_000})),
    "text as template variable": (CHAT, lambda: chat(chat_template_kwargs={"a": LETTERS})),
    "a list as response format": (CHAT, lambda: chat(response_format={"type": [0] * 262_000})),
    "many allowed tokens": (CHAT, lambda: chat(allowed_token_ids=list(range(300)) * 800)),
    "many bad words": (CHAT, lambda: chat(bad_words=["x " * 50] * 16_000)),
    "allowed bad words": (CHAT, lambda: chat(bad_words=["x " * 10] * 128)),
    "many messages": (CHAT, lambda: chat(messages=[{"role": "user", "content": "x" * 400}] * 4096)),
    "too many messages": (CHAT, lambda: chat(messages=[{"role": "user", "content": ""}] * 16_000)),
    "many parts": (CHAT, lambda: says([{"type": "text", "text": "x"}] * 16_000)),  # type: ignore[arg-type]
    "a list as type": (CHAT, lambda: says([{"type": [[]] * 16_000, "text": ""}])),  # type: ignore[arg-type]
    "a long message": (CHAT, lambda: says(LETTERS)),
    "beginnings of control tokens": (CHAT, lambda: says("<|" * (BODY // 2 - 1000))),
    "control tokens": (CHAT, lambda: says("</s>" * (BODY // 4 - 1000))),
    "a long word": (CHAT, lambda: says("x" * (BODY // 2))),
    "many samples": (CHAT, lambda: chat(n=62, max_tokens=200, logprobs=True, top_logprobs=20)),
    "too many samples": (CHAT, lambda: chat(n=128, max_tokens=200, logprobs=True, top_logprobs=20)),
    "many streamed samples": (
        CHAT,
        lambda: chat(n=128, max_tokens=200, logprobs=True, top_logprobs=20, stream=True),
    ),
    "token counts in every event": (
        COMPLETIONS,
        lambda: completion(
            prompt=[[100]] * 1024,
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        ),
    ),
    "a long prompt": (COMPLETIONS, lambda: completion(prompt=LETTERS)),
    "many prompts": (COMPLETIONS, lambda: completion(prompt=["x " * 900] * 1024)),
    "a long prompt of tokens": (COMPLETIONS, lambda: completion(prompt=[100] * 250_000)),
    "fractions as a prompt of tokens": (COMPLETIONS, lambda: completion(prompt=[100.0] * 16_000)),
    "an unknown token": (COMPLETIONS, lambda: completion(prompt=[100] * 250_000 + [1 << 40])),
    "echo": (COMPLETIONS, lambda: completion(prompt=[100] * 130_000, echo=True)),
    "echo many times": (COMPLETIONS, lambda: completion(prompt=[100] * 1000, echo=True, n=128)),
    "echo with log probabilities": (
        COMPLETIONS,
        lambda: completion(prompt=[100] * 6200, echo=True, logprobs=20),
    ),
    "streamed echo with log probabilities": (
        COMPLETIONS,
        lambda: completion(prompt=[100] * 6200, echo=True, logprobs=20, stream=True),
    ),
    "many prompts with echo and log probabilities": (
        COMPLETIONS,
        lambda: completion(prompt=[[100] * 6] * 1024, echo=True, logprobs=20),
    ),
    "prompt log probabilities": (COMPLETIONS, lambda: completion(prompt=[100] * 6200, prompt_logprobs=20)),
    "token ids in the answer": (
        COMPLETIONS,
        lambda: completion(prompt=[100] * 250_000, n=4, return_token_ids=True),
    ),
    "too much echo": (COMPLETIONS, lambda: completion(prompt=[[100] * 200] * 1024, echo=True, logprobs=20)),
    "many prompts with biases": (
        COMPLETIONS,
        lambda: completion(prompt=[[100]] * 1024, logit_bias={str(n): 1 for n in range(300)}),
    ),
    "allowed prompts with biases": (
        COMPLETIONS,
        lambda: completion(prompt=[[100]] * 1024, logit_bias={str(n): 1 for n in range(64)}),
    ),
    "tokens": ("/tokenize", lambda: completion(prompt="x " * 250_000, return_token_strs=True)),
    "too many tokens": (
        "/tokenize",
        lambda: completion(prompt=LETTERS, return_token_strs=True),
    ),
    "text of tokens": ("/detokenize", lambda: completion(tokens=[300] * 250_000)),
    "replays of a long answer": (
        COMPLETIONS,
        lambda: completion(prompt=[100] * 6200, echo=True, logprobs=20),
    ),
    "long headers": (CHAT, chat),
    "a long model name": (CHAT, lambda: chat(model="x" * (BODY - 1000))),
}

HEADERS: dict[str, dict[str, str]] = {
    "replays of a long answer": {"idempotency-key": "key"},
    "long headers": {"x-request-id": "x" * 20_000, "x-appliance-deadline-ms": "9" * 20_000},
}


REFUSED: dict[str, tuple[int, str]] = {
    "too many numbers": (413, "more than 262144 values"),
    "too many names": (413, "more than 65536 names"),
    "many long numbers": (413, "more than 16384 numbers with a fraction"),
    "too many small numbers": (413, "more than 16384 numbers with a fraction"),
    "a long number": (400, "out of range"),
    "escapes": (400, "at most 512 are allowed"),
    "deep lists": (400, "nested too deeply"),
    "wrong modalities": (400, "modalities[0]: must be"),
    "wrong stop tokens": (400, "at most 64 are allowed"),
    "many biases": (400, "at most 1024 are allowed"),
    "many stop strings": (400, "at most 16 are allowed"),
    "long stop strings": (400, "at most 4096 are allowed"),
    "template variables": (400, "at most 32 are allowed"),
    "numbers as template variables": (400, "more than 32768 values"),
    "fractions as template variables": (400, "at most 65536 are allowed"),
    "a list as response format": (400, "type a list is not supported"),
    "many bad words": (400, "at most 128 are allowed"),
    "text as template variable": (400, "at most 65536 are allowed"),
    "many messages": (400, "can have at most 524288 bytes"),
    "too many messages": (400, "at most 4096 are allowed"),
    "a list as type": (400, "supports only text parts"),
    "a long message": (400, "more than 1048575 tokens"),
    "beginnings of control tokens": (400, "can have at most 524288 bytes"),
    "control tokens": (400, "exceed the limit of 8388608 characters"),
    "a long word": (400, "can have at most 524288 bytes"),
    "too many samples": (400, "at most 262144 are allowed"),
    "a long prompt": (400, "more than 1048575 tokens"),
    "an unknown token": (400, "token id 1099511627776 is not valid"),
    "too much echo": (400, "it may be at most 131072"),
    "many prompts with biases": (400, "must be at most 65536"),
    "too many tokens": (400, "more than 524288 tokens"),
    "long headers": (400, "at most 86400000"),
    "a long model name": (404, "is not served"),
}
"""Status and a part of the message for each attack that is refused. The message shows which bound the attack
reached. All attacks that are not listed are answered."""


@pytest.mark.parametrize("name", ATTACKS)
def test_no_request_blocks_the_event_loop(watched: tuple[Harness, Measurements], name: str) -> None:
    front, measurements = watched
    path, make = ATTACKS[name]
    body = make()
    assert len(body) <= BODY
    status, message = REFUSED.get(name, (200, ""))
    best = float("inf")
    with httpx.Client(transport=httpx.HTTPTransport(uds=front.api_sock, verify=False), timeout=600) as client:
        for _ in range(TRIES):
            MEASUREMENTS.pack_into(measurements, 0, 0.0, 0.0)
            headers = {"content-type": "application/json", **HEADERS.get(name, {})}
            answer = client.post("http://front" + path, content=body, headers=headers)
            assert answer.status_code == status and message in answer.text, answer.text[:300]
            best = min(best, blocked(measurements))
            if best < MAX_BLOCKED:
                break
    print(f"{name}: {answer.status_code}, blocked for {best:.1f} × the reference")
    assert best < MAX_BLOCKED


def test_the_death_of_a_replica_blocks_no_event_loop(watched: tuple[Harness, Measurements]) -> None:
    front, measurements = watched
    samples, tries, best = 128, 6, float("inf")
    body = completion(prompt=[300] * 250_000, n=samples, max_tokens=1000, stream=True, ignore_eos=True)
    front.step_s = front.replica.step_s = 0.5
    with httpx.Client(transport=httpx.HTTPTransport(uds=front.api_sock, verify=False), timeout=600) as client:
        headers = {"content-type": "application/json"}
        with client.stream("POST", "http://front" + COMPLETIONS, content=body, headers=headers) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            next(lines)
            for number in range(tries):
                dying, survivor = front.replica, front.attach(f"survivor-{number}")
                MEASUREMENTS.pack_into(measurements, 0, 0.0, 0.0)
                front.call(dying.die)
                front.wait_for(lambda: len(survivor.submits) == samples, 120)  # noqa: B023
                assert {submit.first_sample for submit in survivor.submits} == set(range(samples))
                best = min(best, blocked(measurements))
                if best < MAX_BLOCKED:
                    break
    assert best < MAX_BLOCKED


def test_the_watch_notices_a_blocked_loop(watched: tuple[Harness, Measurements]) -> None:
    front, measurements = watched
    MEASUREMENTS.pack_into(measurements, 0, 0.0, 0.0)
    body = completion(prompt=[100] * 250_000)
    with httpx.Client(transport=httpx.HTTPTransport(uds=front.api_sock, verify=False), timeout=600) as client:
        client.post("http://front" + COMPLETIONS, content=body, headers={"content-type": "application/json"})
    # On any machine, creating a quarter of a million Python objects takes the front at least this long.
    assert min(MEASUREMENTS.unpack_from(measurements)) > 0.002
