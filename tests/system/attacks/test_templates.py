"""A hostile checkpoint's chat template harms nobody but those who use that model."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator

import httpx
import psutil
import pytest

from appliance.settings import demo_model_folder
from appliance.text.template_process import MAX_RENDER_S, MAX_TEMPLATE_MEMORY_BYTES
from tests.system.attacks.reading import doctor
from tests.system.service import Service, service

pytestmark = pytest.mark.system
ENDLESS = "{% for i in range(99999) %}" * 3 + "{% endfor %}" * 3
HUNGRY = (
    "{% set ns = namespace(text='x' * 1000) %}"
    "{% for i in range(40) %}{% set ns.text = ns.text ~ ns.text %}{% endfor %}"
)
TEMPLATE = (
    "{% set asked = messages[0].content %}"
    "{% if asked == 'endless' %}" + ENDLESS + "{% elif asked == 'hungry' %}" + HUNGRY + "{% else %}"
    "{{ asked }}{% endif %}"
)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose model has a hostile template, and the demo model beside it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    shutil.copytree(demo_model_folder(), folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    flags = ["--model", f"hostile={folder}", "--model", f"demo={demo_model_folder()}"]
    with service(*flags, "--kv-blocks", "100") as running:
        yield running


def chat(http: httpx.Client, model: str, content: str) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    return http.post("/v1/chat/completions", json=body)


def workers() -> list[psutil.Process]:
    """Processes that render templates, of any service."""
    return [
        one
        for one in psutil.process_iter(["cmdline"])
        if "appliance.text.template_worker" in (one.info["cmdline"] or ())
    ]


@pytest.mark.parametrize(("content", "message"), [("endless", "takes longer"), ("hungry", "memory")])
def test_a_template_that_exceeds_a_bound_is_refused_and_shown_to_the_operator(
    hostile: Service, content: str, message: str
) -> None:
    most = 0
    over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not over.is_set():
            for one in workers():
                try:
                    most = max(most, one.memory_info().rss)
                except psutil.NoSuchProcess:
                    continue
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with hostile.http() as http:
            began = time.monotonic()
            answer = chat(http, "hostile", content)
            assert time.monotonic() - began < 6 * MAX_RENDER_S
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "chat_template_bound"
            assert message in answer.json()["error"]["message"]
            assert chat(http, "hostile", "something else").status_code == 200
    finally:
        over.set()
        watcher.join()
    assert 0 < most < MAX_TEMPLATE_MEMORY_BYTES + (64 << 20)

    def shown() -> bool:
        return any(
            "'hostile'" in problem["what"] and message in problem["what"]
            for problem in hostile.status()["problems"]
        )

    hostile.wait_until(shown, 30, "the problem in the status")
    assert any("'hostile'" in text and message in text for text in doctor(hostile, "warning"))
    assert hostile.ready()


def test_other_models_and_the_event_loop_go_on_while_a_template_runs(hostile: Service) -> None:
    with hostile.http() as http, hostile.http() as other:
        slow = threading.Thread(target=chat, args=(other, "hostile", "endless"))
        slow.start()
        latencies = []
        while slow.is_alive():
            began = time.monotonic()
            assert chat(http, "demo", "hi").status_code == 200
            latencies.append(time.monotonic() - began)
        slow.join()
    assert len(latencies) > 3 and max(latencies) < 2.0, latencies
