"""Tests of the real service with the `openai` client, over the Unix socket and over TCP."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

import appliance
from tests.ports import free_port
from tests.system.service import Service, service

pytestmark = pytest.mark.system

QUESTION = [{"role": "user", "content": "What does textwrap.dedent do?"}]
PURPOSE = "Remove any common leading whitespace from every line in `text`."


@pytest.fixture(scope="module")
def key(demo: Service) -> str:
    return demo.key("tests")


@pytest.fixture(params=["unix", "tcp"])
def client(request: pytest.FixtureRequest, demo: Service, key: str) -> Iterator[openai.OpenAI]:
    if request.param == "unix":
        made = demo.client()
    else:
        made = openai.OpenAI(base_url=f"http://{demo.flags[1]}/v1", api_key=key, max_retries=0)
    with made:
        yield made


def test_a_question_about_the_library_is_answered_with_the_documented_purpose(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    assert PURPOSE in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_has_the_same_text_and_ends_with_usage(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)
    chunks = list(
        client.chat.completions.create(
            model="demo",
            messages=QUESTION,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_three_samples_are_three_answers_and_the_same_seed_gives_them_again(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str]:
        answer = client.completions.create(
            model="demo", prompt="def ", n=3, temperature=1.0, seed=seed, max_tokens=24
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.text for choice in answer.choices]

    assert len(set(texts(5))) == 3
    assert texts(5) == texts(5)
    assert texts(5) != texts(6)


def test_log_probabilities_have_the_shapes_of_both_endpoints(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, max_tokens=5, logprobs=True, top_logprobs=3
    )
    content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
    assert content is not None
    assert len(content) == 5
    for entry in content:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == entry.top_logprobs[0].logprob <= 0
    plain = client.completions.create(
        model="demo", prompt="import os\n", temperature=0, max_tokens=4, logprobs=2, echo=True
    )
    logprobs = plain.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.token_logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.token_logprobs[0] is None
    assert "".join(logprobs.tokens[1:]) == plain.choices[0].text  # the first token is the begin-of-text token
    assert plain.choices[0].text.startswith("import os\n")


def test_a_disconnect_from_a_stream_releases_its_blocks_and_slots(
    client: openai.OpenAI, demo: Service
) -> None:
    demo.wait_until(lambda: demo.replica()["running"] == 0, 60, "an idle replica")
    stream = client.completions.create(
        model="demo",
        prompt="class ",
        temperature=1.0,
        max_tokens=1500,
        stream=True,
        n=4,
        extra_body={"ignore_eos": True},
    )
    for _ in itertools.islice(stream, 8):
        pass
    demo.wait_until(lambda: demo.replica()["running"] == 4, 60, "the replica's report of four samples")
    stream.response.close()
    demo.wait_until(lambda: demo.replica()["running"] == 0, 60, "the samples to be cancelled")

    def all_returned() -> bool:
        replica = demo.replica()
        return replica["blocks_used"] == 0 and replica["credit_seqs"] == replica["max_num_seqs"]

    # The step that was running still used the blocks, so only a later report may show them as free.
    demo.wait_until(all_returned, 60, "the blocks and slots to be free")
    row = demo.wait_until(
        lambda: next((r for r in demo.rows()[-3:] if r["finish_reason"] == "cancelled"), None), 60, "its row"
    )
    assert row["status"] == 499
    assert 0 < row["billed_tokens"] <= row["generated_tokens"]


def test_twenty_of_the_frozen_questions_are_answered_as_documented(demo: Service) -> None:
    lines = (Path(appliance.__file__).parent / "demo_model" / "questions.jsonl").read_text().splitlines()
    questions = [json.loads(line) for line in lines][::10]
    assert len(questions) == 20

    def is_right(entry: dict[str, str]) -> bool:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": entry["question"]}],
            temperature=0,
            max_tokens=120,
        )
        return (answer.choices[0].message.content or "").startswith(entry["expected"])

    with demo.client() as client, ThreadPoolExecutor(len(questions)) as threads:
        right = list(threads.map(is_right, questions))
    assert sum(right) >= 17


def test_64_streams_are_spread_over_both_fronts(demo: Service) -> None:
    # Fronts report every half second. The second report from now is the first that is sure to cover all
    # earlier work.
    for _ in range(2):
        seen = {front["cpu_seconds"] for front in demo.status()["fronts"]}
        demo.wait_until(
            lambda seen=seen: seen.isdisjoint(one["cpu_seconds"] for one in demo.status()["fronts"]),
            60,
            "reports",
        )
    before = {front["name"]: front["requests"] for front in demo.status()["fronts"]}
    with demo.client() as client:
        streams = [
            client.completions.create(
                model="demo", prompt="x = ", max_tokens=16, stream=True, extra_body={"ignore_eos": True}
            )
            for _ in range(64)
        ]
        counts = [sum(1 for chunk in stream if chunk.choices[0].text) for stream in streams]
    assert min(counts) > 0

    def reported() -> dict[str, int] | None:
        taken = {
            front["name"]: front["requests"] - before[front["name"]] for front in demo.status()["fronts"]
        }
        return taken if sum(taken.values()) >= 64 else None

    taken = demo.wait_until(reported, 60, "the fronts' reports of 64 requests")
    assert len(taken) == 2
    assert sum(taken.values()) == 64
    assert min(taken.values()) >= 24


@pytest.mark.timeout(2000)
def test_generated_requests_never_meet_a_server_error(tmp_path: Path) -> None:
    with service("--listen", f"127.0.0.1:{free_port()}", "--max-model-len", "192") as running:
        key = running.key("schemathesis")
        done = subprocess.run(
            [
                str(Path(sys.executable).with_name("schemathesis")),
                "run",
                f"http://{running.flags[1]}/openapi.json",
                f"--header=Authorization: Bearer {key}",
                "--checks=not_a_server_error",
                "--phases=coverage,fuzzing",
                "--max-examples=13",
                "--seed=1",
                "--workers=1",  # in CPython 3.11, all threads share one recursion counter in ast.parse
                "--request-timeout=120",
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={
                **os.environ,
                "SCHEMATHESIS_HOOKS": "tests.system.schemathesis_hooks",
                "PYTHONPATH": str(Path(__file__).parents[2]),
            },
            timeout=1800,
            check=False,
        )
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        running.wait_until(lambda: running.replica()["running"] == 0, 60, "an idle replica")
        running.wait_until(lambda: running.replica()["blocks_used"] == 0, 60, "the blocks to be free")
        running.wait_until(lambda: not running.rows(state="open"), 60, "all rows to end")
        assert len([row for row in running.rows() if row["status"] == 200]) >= 10
        assert not [row for row in running.rows() if (row["status"] or 0) >= 500]
