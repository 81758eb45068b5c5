"""Tests that a malicious chat template in a checkpoint affects only the users of that model."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import httpx
import psutil
import pytest

from appliance.settings import demo_model_folder
from appliance.text.template_process import MAX_TEMPLATE_MEMORY_BYTES
from tests.system.attacks.reading import doctor
from tests.system.service import Service, renders_templates, service

pytestmark = pytest.mark.system
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
HUNGRY = (
    "{% set ns = namespace(text='x' * 1000) %}"
    "{% for i in range(40) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
)
TEMPLATE = (
    "{% set asked = messages[0].content %}"
    "{% if asked == 'endless' %}"
    + ENDLESS
    + "{% elif asked == 'hungry' %}"
    + HUNGRY
    + "{% elif asked == 'large' %}"
    "{{ 'x ' * 4000000 }}{% else %}"
    "{{ asked }}{% endif %}"
)


def hostile_model_flags(folder: Path) -> list[str]:
    """Write a checkpoint with a hostile template to `folder`. Return the options of `appliance serve` that
    serve it as `hostile`, next to the demo model."""
    shutil.copytree(demo_model_folder(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return ["--model", f"demo={demo_model_folder()}", "--model", f"hostile={folder}"]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    flags = hostile_model_flags(tmp_path_factory.mktemp("checkpoint") / "model")
    with service(*flags, "--kv-blocks", "100") as running:
        yield running


def chat(http: httpx.Client, model: str, content: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return http.post("/v1/chat/completions", json=body)


def workers(running: Service) -> list[psutil.Process]:
    """Return the processes that render templates."""
    children = psutil.Process(running.process.pid).children(recursive=True)
    return [one for one in children if renders_templates(one)]


def memory(process: psutil.Process) -> int:
    """Return the resident memory of a process in bytes, or 0 if the process has exited."""
    try:
        return process.memory_info().rss
    except psutil.NoSuchProcess:
        return 0


@pytest.mark.parametrize(
    ("content", "conversations", "message"), [("endless", 1, "CPU time"), ("hungry", 2, "memory")]
)
def test_a_template_that_exceeds_a_bound_is_refused_and_delays_nobody_else(
    hostile: Service, content: str, conversations: int, message: str
) -> None:
    most = answered = 0
    with hostile.http() as http, hostile.http() as other, ThreadPoolExecutor(conversations) as threads:
        # Two conversations are rendered one after the other.
        asked = [threads.submit(chat, other, "hostile", content) for _ in range(conversations)]
        while not answered or not all(one.done() for one in asked):
            assert chat(http, "demo", "hi").status_code == 200
            answered += 1
            most = max(most, *map(memory, workers(hostile)), 0)
            wait(asked, 0.1 if content == "endless" else 0.0)
        for answer in (one.result() for one in asked):
            if answer.status_code == 503:
                # On a busy machine, the limit on the time that a conversation waits can be exceeded first.
                assert answer.json()["error"]["code"] == "too_many_prompts", answer.text
                continue
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "chat_template_bound"
            assert message in answer.json()["error"]["message"]
        assert chat(http, "hostile", "something else").status_code == 200
    assert 0 < most < MAX_TEMPLATE_MEMORY_BYTES + (64 << 20)
    # A process that renders a template is killed immediately if it uses too much memory.
    assert answered > 3 or content == "hungry"

    def shown() -> bool:
        return any(
            "'hostile'" in problem["description"] and message in problem["description"]
            for problem in hostile.status()["problems"]
        )

    hostile.wait_until(shown, 60, "the problem to appear in the status")
    assert any("'hostile'" in text and message in text for text in doctor(hostile, "warning"))
    hostile.wait_until(hostile.ready, 60, "the service to be ready")


def test_rendered_text_counts_against_the_bound_on_waiting_text(hostile: Service) -> None:
    answers: list[httpx.Response] = []
    deadline = time.monotonic() + 120

    def tokenize(_: int) -> None:
        body = {"model": "hostile", "messages": [{"role": "user", "content": "large"}]}
        with hostile.http() as http:
            while not any(answer.status_code == 503 for answer in answers) and time.monotonic() < deadline:
                answers.append(http.post("/tokenize", json=body))

    with ThreadPoolExecutor(12) as threads:
        list(threads.map(tokenize, range(12)))
    codes = {(answer.status_code, answer.json()["error"]["code"]) for answer in answers}
    assert (503, "too_many_prompts") in codes and any(status == 400 for status, _ in codes), codes
    assert any("waiting to be tokenized" in answer.text for answer in answers)
