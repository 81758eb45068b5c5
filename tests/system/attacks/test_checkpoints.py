"""Tests that a checkpoint with unreadable files makes only its own model unavailable."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.client import ServiceNotRunningError
from appliance.settings import demo_model_folder
from tests.checkpoints import write_constant_checkpoint
from tests.system.attacks.reading import doctor, no_problem, problem
from tests.system.service import Service, service

pytestmark = pytest.mark.system
BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "deep": (
        {"chat_template": "{{ " + "(" * 100_000 + "1" + ")" * 100_000 + " }}"},
        "restore the model's original",
    ),
    "surrogate": ({"chat_template": "\ud800"}, "lone surrogate"),
    "unreadable": ({"bos_token": "\ud800"}, "the model's files cannot be read"),
}
"""Defects of a checkpoint. Each has the content of `tokenizer_config.json` and the cause that the service
must report."""


def has_started(running: Service) -> bool:
    """Return whether the service answers requests on its admin socket."""
    try:
        return bool(running.status())
    except ServiceNotRunningError:
        return False


def status_of(running: Service, model: str) -> tuple[int, str]:
    """Send a request to the model, and return the status code and text of the response."""
    answer = running.complete(model)
    return answer.status_code, answer.text


def test_models_with_bad_files_are_reported_and_the_others_keep_serving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = ["--model", f"demo={demo_model_folder()}", "--kv-blocks", "50"]
    good = (Path(demo_model_folder()) / "tokenizer_config.json").read_text()
    for name, (change, _) in BROKEN.items():
        write_constant_checkpoint(tmp_path / name, token_id=100)
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(json.loads(good) | change))
        flags += ["--model", f"{name}={tmp_path / name}"]
    # The service as a whole never becomes ready, because some of its models cannot be served.
    monkeypatch.setattr(Service, "ready", has_started)
    with service(*flags, "--fronts", "1") as running:
        for name, (_, cause) in BROKEN.items():
            assert name in problem(running, "front-0", cause, 120)["description"]
        found = "\n".join(doctor(running))
        assert all(cause in found for _, cause in BROKEN.values()), found
        running.wait_until(lambda: status_of(running, "demo")[0] == 200, 120, "the good model")
        for name, (_, cause) in BROKEN.items():
            code, text = status_of(running, name)
            assert code == 503 and cause in text, text
        with running.http() as http:
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["demo"]
        # The front must still apply later configurations, and then serve the repaired models.
        for name in BROKEN:
            (tmp_path / name / "tokenizer_config.json").write_text(good)
        no_problem(running, 120)
        assert all(status_of(running, name)[0] == 200 for name in ("demo", *BROKEN))
