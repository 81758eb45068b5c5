"""Tests of a new user's first steps: from a service without models to an answer."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoints import write_constant_checkpoint
from tests.hub.server import HubServer
from tests.system.commands import run_appliance, run_as
from tests.system.service import Service, service

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


def command(running: Service, *words: str) -> str:
    """Run a command, and return its output."""
    done = running.run(*words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def pull(running: Service, hub: HubServer, *words: str) -> str:
    """Run `appliance models pull` as a new user, and return its output."""
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN")
    }
    environ |= {"HF_ENDPOINT": hub.url, "NO_PROXY": "127.0.0.1", "HOME": str(running.folder)}
    done = run_as(None, environ, "models", "pull", *words, "--run-dir", running.run_dir)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_three_commands_lead_from_no_model_to_an_answer(running: Service, hub: HubServer) -> None:
    pid = running.process.pid
    pulled = pull(running, hub, "org/tiny")
    assert "added tiny version 1; load it with: appliance models load tiny@1" in pulled
    assert f"{running.state_dir}/hub/models--org--tiny/snapshots/" in pulled
    assert "tiny version 1 is ready" in command(running, "models", "load", "tiny", "--wait")
    answer = command(running, "chat", "Hello", "--max-tokens", "4")
    assert answer.strip()
    assert running.process.pid == pid and running.process.poll() is None


def test_a_repeated_pull_adds_no_second_version(running: Service, hub: HubServer) -> None:
    words = ("org/tiny", "--name", "again", "--json")
    first, second = (json.loads(pull(running, hub, *words)) for _ in range(2))
    assert (first["name"], first["version"], second["version"]) == ("again", 1, 1)
    assert second["received_bytes"] == 0


def test_a_name_that_is_in_use_is_refused_before_the_download(running: Service, hub: HubServer) -> None:
    pull(running, hub, "org/tiny")
    command(running, "models", "alias", "nickname", "tiny")
    hub.requests.clear()
    with pytest.raises(AssertionError, match="'nickname' is an alias of 'tiny': choose another name"):
        pull(running, hub, "org/tiny", "--name", "nickname")
    assert not hub.requests


def test_without_a_service_nothing_is_downloaded(hub: HubServer, tmp_path: Path) -> None:
    hub.requests.clear()
    done = run_appliance("models", "pull", "org/tiny", "--run-dir", tmp_path)
    assert done.returncode == 1 and "start a service" in done.stderr
    assert not hub.requests


def test_a_removed_model_keeps_its_files_unless_they_are_to_be_deleted(
    running: Service, hub: HubServer
) -> None:
    hub.add("org/spare", hub.repositories["org/tiny"].files)
    pulled = json.loads(pull(running, hub, "org/spare", "--json"))
    command(running, "models", "remove", "spare", "--yes")
    assert (Path(pulled["folder"]) / "model.safetensors").is_file()
    pulled = json.loads(pull(running, hub, "org/spare", "--json"))
    assert (pulled["version"], pulled["received_bytes"]) == (1, 0)
    removed = json.loads(command(running, "models", "remove", "spare", "--files", "--yes", "--json"))
    assert [one["folder"] for one in removed["deleted"]] == [pulled["folder"]]
    assert not Path(pulled["folder"]).exists()


def test_files_that_another_model_uses_are_not_deleted(running: Service, hub: HubServer) -> None:
    pulled = json.loads(pull(running, hub, "org/tiny", "--name", "copy", "--json"))
    pull(running, hub, "org/tiny")
    removed = json.loads(command(running, "models", "remove", "copy", "--files", "--yes", "--json"))
    assert removed["deleted"] == [] and Path(pulled["folder"]).exists()


def test_files_that_were_not_downloaded_are_never_deleted(running: Service, tmp_path: Path) -> None:
    folder = write_constant_checkpoint(tmp_path / "own", _TOKEN_ID)
    command(running, "models", "add", str(folder))
    with pytest.raises(AssertionError, match="was not downloaded with models pull"):
        command(running, "models", "remove", "own", "--files", "--yes")
    assert "own" in command(running, "models", "list") and folder.exists()


def test_prune_removes_the_versions_that_nothing_refers_to(running: Service, hub: HubServer) -> None:
    repository = hub.add("org/many", dict(hub.repositories["org/tiny"].files))
    folders = []
    for version in range(1, 5):
        repository.revisions["main"] = str(version) * 40
        pulled = json.loads(pull(running, hub, "org/many", "--json"))
        assert pulled["version"] == version
        folders.append(pulled["folder"])
    command(running, "models", "default", "many@2")  # the rollback returns to version 1
    command(running, "models", "alias", "newest", "many@4")
    listed = json.loads(command(running, "models", "prune", "--dry-run", "--json"))
    assert [(one["name"], one["version"]) for one in listed["versions"]] == [("many", 3)]
    pruned = json.loads(command(running, "models", "prune", "--files", "--yes", "--json"))
    assert [one["folder"] for one in pruned["deleted"]] == [folders[2]]
    assert [Path(folder).exists() for folder in folders] == [True, True, False, True]
    assert "nothing to remove: no version is unused" in command(running, "models", "prune", "--yes")
