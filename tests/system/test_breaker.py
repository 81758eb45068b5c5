"""Tests of the circuit breaker in a running service. A replica with a real engine is killed repeatedly."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from appliance.settings import demo_model_folder
from tests.checkpoints import write_constant_checkpoint
from tests.system.attacks.reading import no_problem
from tests.system.service import service

pytestmark = pytest.mark.system

WITHIN_S = 120.0
DEATHS = 3
TOKEN = 100
"""The token that the model `chat` generates."""
SETTINGS = f"""
[restarts]
max_deaths = {DEATHS}
window_s = 3600
retry_s = 3600

[models.other]
folder = "{demo_model_folder()}"
kv_blocks = 50
threads = 1
"""


def test_the_breaker_opens_after_repeated_kills_says_why_and_closes_on_command(tmp_path: Path) -> None:
    config = tmp_path / "appliance.toml"
    config.write_text(SETTINGS)
    with service("--config", str(config), "--device", "cpu") as running:
        checkpoint = write_constant_checkpoint(tmp_path / "chat", TOKEN)
        running.command("models", "add", f"chat={checkpoint}", "--set", "kv_blocks=50", "--set", "threads=1")
        running.command("models", "load", "chat", "--wait")

        def model() -> Any:
            return next(one for one in running.status()["models"] if one["name"] == "chat@1")

        def replica() -> Any:
            return model()["replicas"][0]

        def kill() -> None:
            """Kill the replica when it is ready, and wait until the service has noticed."""
            running.wait_until(lambda: replica()["state"] == "ready", WITHIN_S, "a ready replica")
            before = replica()
            os.kill(before["pids"][0], signal.SIGKILL)
            running.wait_until(lambda: replica()["restarts"] > before["restarts"], WITHIN_S, "the death")

        for deaths in range(1, DEATHS):
            kill()
            assert (replica()["breaker"], replica()["deaths"]) == ("closed", deaths)
        kill()

        failed = model()
        assert (failed["state"], failed["replicas"][0]["breaker"]) == ("failed", "open")
        reason = (
            f"the replica exited {DEATHS} times within 3600 s of service and will not be restarted for now"
        )
        assert reason in failed["detail"] and "was killed by SIGKILL" in failed["detail"]
        status = running.status()
        [problem] = [one for one in status["current_problems"] if one["where"] == "model chat@1"]
        assert status["state"] == "degraded" and reason in problem["description"]
        assert "appliance models retry chat@1" in problem["remedy"]
        [listed] = [one for one in running.command("models", "list") if one["name"] == "chat"]
        assert listed["state"] == "failed" and reason in listed["versions"][0]["detail"]
        refused = running.complete("chat")
        assert refused.status_code == 503 and reason in refused.json()["error"]["message"]
        assert running.complete("other").status_code == 200

        running.command("models", "retry", "chat")
        running.wait_until(lambda: replica()["state"] == "ready", WITHIN_S, "the replica after the retry")
        assert (replica()["breaker"], replica()["deaths"]) == ("closed", 0)
        assert running.complete("chat").status_code == 200
        no_problem(running)
