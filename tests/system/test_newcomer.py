"""Tests of the way of a new user: from a service without models to an answer."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write_constant_checkpoint
from tests.hub.server import HubServer
from tests.system.service import APPLIANCE, Service, service

pytestmark = pytest.mark.system

_TOKEN_ID = 300


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    server = HubServer()
    server.add("org/tiny", write_constant_checkpoint(tmp_path_factory.mktemp("tiny"), _TOKEN_ID))
    yield server
    server.close()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = tmp_path_factory.mktemp("settings") / "appliance.toml"
    config.write_text("[models]\n")
    with service("--config", str(config)) as started:
        yield started


def command(running: Service, hub: HubServer, *words: str) -> str:
    """Return the output of a command as a new user runs it."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_HOME", "HF_HUB_CACHE", "HF_TOKEN")
    }
    done = subprocess.run(
        [APPLIANCE, *words, "--run-dir", str(running.run_dir)],
        env=environ | {"HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1", "HOME": str(running.folder)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_three_commands_lead_from_no_model_to_an_answer(running: Service, hub: HubServer) -> None:
    pid = running.process.pid
    pulled = command(running, hub, "models", "pull", "org/tiny")
    assert "added tiny version 1; load it with: appliance models load tiny@1" in pulled
    assert f"{running.state_dir}/hub/models--org--tiny/snapshots/" in pulled
    assert "tiny version 1 is ready" in command(running, hub, "models", "load", "tiny", "--wait")
    answer = command(running, hub, "chat", "Hello", "--max-tokens", "4")
    assert answer.strip()
    assert running.process.pid == pid and running.process.poll() is None


def test_a_repeated_pull_adds_no_second_version(running: Service, hub: HubServer) -> None:
    words = ("models", "pull", "org/tiny", "--name", "again", "--json")
    first, second = (json.loads(command(running, hub, *words)) for _ in range(2))
    assert (first["name"], first["version"], second["version"]) == ("again", 1, 1)
    assert second["received_bytes"] == 0


def test_a_name_that_is_in_use_is_refused_before_the_download(running: Service, hub: HubServer) -> None:
    command(running, hub, "models", "pull", "org/tiny")
    command(running, hub, "models", "alias", "nickname", "tiny")
    hub.requests.clear()
    with pytest.raises(AssertionError, match="'nickname' is an alias of 'tiny': choose another name"):
        command(running, hub, "models", "pull", "org/tiny", "--name", "nickname")
    assert not hub.requests


def test_without_a_service_nothing_is_downloaded(hub: HubServer, tmp_path: Path) -> None:
    hub.requests.clear()
    done = subprocess.run(
        [APPLIANCE, "models", "pull", "org/tiny", "--run-dir", str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "start a service" in done.stderr
    assert not hub.requests
