"""Tests of the commands for models on a running service with real engines."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import write_constant_checkpoint
from tests.system.service import APPLIANCE, Service, service

pytestmark = pytest.mark.system

TOKENS = (100, 200)
SMALL = ("--set", "kv_blocks=100", "--set", "threads=1", "--set", "max_num_seqs=64")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return [write_constant_checkpoint(folder / f"chat-{token}", token) for token in TOKENS]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = tmp_path_factory.mktemp("settings") / "appliance.toml"
    config.write_text("fronts = 2\n[models]\n")
    with service("--config", str(config)) as started:
        yield started


def models(running: Service, *words: str) -> Any:
    return running.command("models", *words)


def refused(running: Service, *words: str) -> str:
    done = subprocess.run(
        [APPLIANCE, "models", *words, "--run-dir", str(running.run_dir), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0, done.stdout
    return done.stderr


def states(running: Service, name: str) -> dict[int, str]:
    [model] = [one for one in models(running, "list") if one["name"] == name]
    return {version["version"]: version["state"] for version in model["versions"]}


def ask(running: Service, model: str, max_tokens: int = 4) -> tuple[int, Any]:
    with running.http() as http:
        body = {"model": model, "prompt": "import ", "max_tokens": max_tokens, "temperature": 0}
        answer = http.post("/v1/completions", json=body | {"ignore_eos": True, "return_token_ids": True})
    return answer.status_code, answer.json()


def served(running: Service) -> list[str]:
    with running.http() as http:
        return [model["id"] for model in http.get("/v1/models").json()["data"]]


def test_a_model_is_added_loaded_and_answers_without_a_restart(running: Service, folders: list[Path]) -> None:
    assert models(running, "list") == [] and served(running) == []
    added = models(running, "add", f"chat={folders[0]}", *SMALL)
    assert added == {"name": "chat", "version": 1}
    assert states(running, "chat") == {1: "available"} and served(running) == []
    assert ask(running, "chat")[0] == 404
    models(running, "load", "chat", "--wait")
    assert states(running, "chat") == {1: "ready"} and served(running) == ["chat"]
    status, answer = ask(running, "chat")
    assert status == 200, answer
    assert answer["model"] == "chat" and answer["choices"][0]["token_ids"] == [TOKENS[0]] * 4
    print(json.dumps(models(running, "ps")))
