"""Tests of fallbacks: another model answers a request because the requested model is overloaded or has
failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from appliance.actions.parameters import DrainService, ResumeService
from tests.checkpoints import write_constant_checkpoint
from tests.system.service import Service, service

pytestmark = pytest.mark.system

BIG, SMALL = 200, 100
"""The token that each model generates."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("models")
    table = ""
    for name, token in (("big", BIG), ("small", SMALL)):
        checkpoint = write_constant_checkpoint(folder / name, token)
        table += f'[models.{name}]\nfolder = "{checkpoint}"\nkv_blocks = 100\nthreads = 1\n'
        table += 'fallback = "small"\n' if name == "big" else ""
    (config := folder / "appliance.toml").write_text(table)
    with service("--config", str(config)) as started:
        yield started


@pytest.fixture(scope="module")
def keys(running: Service) -> dict[str, str]:
    """Return API keys by their permissions."""
    options = {
        "allowed": ("--fallback", "allowed"),
        "never": (),
        "only big": ("--fallback", "allowed", "--models", "big"),
    }
    return {
        name: running.command("keys", "create", "--name", name, *more)["key"]
        for name, more in options.items()
    }


def ask(running: Service, key: str, stream: bool = False) -> tuple[int, Any]:
    """Return the status and the answer, or the first chunk of a stream and its tokens."""
    body = {"model": "big", "prompt": "import ", "max_tokens": 4, "temperature": 0, "stream": stream}
    body |= {"ignore_eos": True, "return_token_ids": True}
    with running.http() as http:
        headers = {"authorization": f"Bearer {key}"}
        answer = http.post("/v1/completions", json=body, headers=headers)
    if not stream or answer.status_code != 200:
        return answer.status_code, answer.json()
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    tokens = [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", ())]
    return 200, chunks[0] | {"choices": [{"token_ids": tokens}]}


def row(running: Service, answer: dict[str, Any]) -> dict[str, Any]:
    request_id = answer["id"].removeprefix("cmpl-")
    # The request's row is closed only after the answer has been sent.
    [found] = running.wait_until(
        lambda: running.rows(request_id=request_id, state="ended"), 60.0, "the end of the request's row"
    )
    return dict(found)


def check_fell_back(running: Service, answered: tuple[int, Any]) -> None:
    status, answer = answered
    assert (status, answer["model"]) == (200, "small"), answer
    assert answer["choices"][0]["token_ids"] == [SMALL] * 4
    logged = row(running, answer)
    assert (logged["model"], logged["unit"], logged["fallback_of"]) == ("small", "small", "big")
    assert (logged["state"], logged["status"], logged["double_ends"]) == ("ended", 200, 0)


def test_the_fallback_is_not_used_if_the_model_can_answer(running: Service, keys: dict[str, str]) -> None:
    status, answer = ask(running, keys["allowed"])
    assert (status, answer["model"]) == (200, "big")
    assert {one["name"]: one["fallback"] for one in running.status()["models"]} == {
        "big": "small",
        "small": "",
    }
    assert row(running, answer)["fallback_of"] is None


@pytest.mark.parametrize("stream", [False, True])
def test_the_fallback_of_a_draining_model_answers_keys_that_allow_it(
    running: Service, keys: dict[str, str], stream: bool
) -> None:
    running.act(DrainService(model="big"))
    # A drain is announced before the service refuses requests.
    running.wait_until(lambda: ask(running, keys["never"])[0] == 503, 60, "the model to be drained")
    try:
        check_fell_back(running, ask(running, keys["allowed"], stream))
        for name in ("never", "only big"):
            status, answer = ask(running, keys[name], stream)
            assert (status, answer["error"]["code"]) == (503, "draining"), name
    finally:
        running.act(ResumeService(model="big"))
    status, answer = ask(running, keys["allowed"], stream)
    assert (status, answer["model"], answer["choices"][0]["token_ids"]) == (200, "big", [BIG] * 4)


def test_the_fallback_answers_while_the_replica_of_a_model_is_restarting(
    running: Service, keys: dict[str, str]
) -> None:
    def replica() -> dict[str, Any]:
        [model] = [one for one in running.status()["models"] if one["name"] == "big"]
        return dict(model["replicas"][0])

    [pid] = replica()["pids"]
    psutil.Process(pid).kill()
    running.wait_until(lambda: replica()["pids"] != [pid], 60, "the death to be noticed")
    answered = ask(running, keys["allowed"])
    assert answered[0] == 200, answered
    if answered[1]["model"] == "small":  # if "big" answered, its replica has already restarted
        check_fell_back(running, answered)
    running.wait_until(
        lambda: ask(running, keys["allowed"])[1].get("model") == "big", 120, "the model to return"
    )


def test_the_metrics_count_fallbacks_by_the_requested_model(running: Service) -> None:
    assert 'appliance_fallbacks_total{model="big",outcome="ok"}' in running.metrics()
