"""Tests that every load ends within its bound, with the cause, and leaves no process and no model behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from appliance.settings import demo_model_folder
from tests.system.service import APPLIANCE, Service, service

pytestmark = pytest.mark.system
SHARD = "model-00002-of-00002.safetensors"
BOUND_S = 60
"""Far more than any of these loads takes, and less than `load_timeout_s`."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = tmp_path_factory.mktemp("settings") / "appliance.toml"
    config.write_text(f'[models.demo]\nfolder = "{demo_model_folder()}"\nkv_blocks = 50\n')
    with service("--config", str(config)) as started:
        yield started


@pytest.fixture
def added(running: Service, tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a registered model, which has the folder's name "other"."""
    folder = tmp_path / "other"
    shutil.copytree(demo_model_folder(), folder)
    running.command("models", "add", str(folder), "--set", "kv_blocks=50", "--set", "threads=1")
    yield folder
    running.command("models", "remove", "other", "--yes")
    shutil.rmtree(folder)


def models(running: Service, *words: str) -> subprocess.CompletedProcess[str]:
    command = [APPLIANCE, "models", *words, "--run-dir", str(running.run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def ranks(running: Service) -> dict[int, psutil.Process]:
    found = psutil.Process(running.process.pid).children()
    return {rank.pid: rank for rank in found if "engine.replica" in " ".join(rank.cmdline())}


def assert_only_the_demo_runs(running: Service, before: set[int]) -> None:
    running.wait_until(lambda: set(ranks(running)) == before, BOUND_S, "the end of every other rank")
    loaded = [model["name"] for model in running.status()["models"]]
    assert loaded == ["demo"]
    with running.http() as http:
        body = {"model": "demo", "prompt": "hi", "max_tokens": 1}
        assert http.post("/v1/completions", json=body).status_code == 200


@pytest.mark.parametrize("change", ["truncated", "changed"])
def test_a_file_that_changed_after_the_model_was_added_is_named(
    running: Service, added: Path, change: str
) -> None:
    before = set(ranks(running))
    with (added / SHARD).open("r+b") as file:
        if change == "truncated":
            file.truncate(1 << 20)
        else:
            file.seek(1 << 20)
            file.write(b"other weights")
    began = time.monotonic()
    done = models(running, "load", "other", "--wait")
    assert done.returncode == 1 and SHARD in done.stderr, done.stderr
    assert time.monotonic() - began < BOUND_S
    assert_only_the_demo_runs(running, before)


def test_a_load_that_hangs_is_cancelled_by_unloading_the_model(running: Service, added: Path) -> None:
    """The rank is stopped by a signal, so it neither progresses nor reads messages."""
    before = set(ranks(running))
    models(running, "load", "other")
    (pid,) = running.wait_until(lambda: set(ranks(running)) - before, BOUND_S, "the new rank")
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    done = models(running, "unload", "other", "--wait", "--yes")
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - began < BOUND_S
    assert_only_the_demo_runs(running, before)


def test_a_stopped_rank_of_several_is_killed_while_it_loads() -> None:
    flags = "--tensor-parallel-size", "2", "--kv-blocks", "50"
    stopped: list[int] = []

    class StoppedAtStart(Service):
        def ready(self) -> bool:
            if not stopped and len(found := sorted(ranks(self))) == 2:
                os.kill(found[1], signal.SIGSTOP)
                stopped.append(found[1])
            return super().ready()

    def replica(running: Service) -> Any:
        return running.status()["models"][0]["replicas"][0]

    with service(*flags, kind=StoppedAtStart) as running:
        assert stopped and stopped[0] not in ranks(running)
        found = replica(running)
        assert found["restarts"] == 1 and found["state"] == "ready"
        assert f"(pid {stopped[0]}) was stopped by a signal" in found["last_error"]
