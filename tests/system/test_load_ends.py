"""Tests that every load ends in time, reports the cause of a failure, and leaves no process and no partly
loaded model behind."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from appliance.actions.parameters import ReloadConfig
from appliance.models.gpus import find_gpus
from appliance.settings import demo_model_folder
from tests.system.commands import TIMEOUT_S, run_appliance
from tests.system.model_swaps import is_rank
from tests.system.service import Service, service

pytestmark = pytest.mark.system
SHARD = "model-00002-of-00002.safetensors"
BOUND_S = TIMEOUT_S
"""Time limit for a load, in seconds: that of the commands, which raise if a load takes longer. It is far more
than any of these loads takes, and less than `load_timeout_s`."""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    config = tmp_path_factory.mktemp("settings") / "appliance.toml"
    config.write_text(f'[models.demo]\nfolder = "{demo_model_folder()}"\nkv_blocks = 50\n')
    # A forked rank could be ready before a test changes or stops it.
    with service("--config", str(config), kind=Service) as started:
        yield started


@pytest.fixture
def added(running: Service, tmp_path: Path) -> Iterator[Path]:
    """Return the folder of a registered model. Both the folder and the model are named "other"."""
    folder = tmp_path / "other"
    shutil.copytree(demo_model_folder(), folder)
    running.command("models", "add", str(folder), "--set", "kv_blocks=50", "--set", "threads=1")
    yield folder
    running.command("models", "remove", "other", "--yes")
    shutil.rmtree(folder)


def ranks(running: Service) -> dict[int, psutil.Process]:
    found = psutil.Process(running.process.pid).children()
    return {rank.pid: rank for rank in found if is_rank(rank)}


def assert_only_the_demo_runs(running: Service, before: set[int]) -> None:
    running.wait_until(lambda: set(ranks(running)) == before, BOUND_S, "the end of every other rank")
    loaded = [model["name"] for model in running.status()["models"]]
    assert loaded == ["demo"]
    assert running.complete().status_code == 200


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
    done = running.run("models", "load", "other", "--wait")
    assert done.returncode == 1 and SHARD in done.stderr, done.stderr
    assert_only_the_demo_runs(running, before)


def test_a_replica_whose_files_have_changed_is_not_restarted_after_it_was_killed(
    running: Service, added: Path
) -> None:
    before = set(ranks(running))
    assert running.run("models", "load", "other", "--wait").returncode == 0
    original = (added / SHARD).read_bytes()
    (added / SHARD).write_bytes(bytes(len(original)))
    [rank] = set(ranks(running)) - before
    os.kill(rank, signal.SIGKILL)

    def failed() -> Any:
        [shown] = running.command("models", "show", "other")["versions"]
        return shown["detail"] if shown["state"] == "failed" else ""

    detail = running.wait_until(failed, BOUND_S, "the failed model")
    assert f"{added / SHARD} has changed since this version was added: restore the file" in detail
    done = running.run("models", "load", "other", "--wait")
    assert done.returncode == 1 and f"{SHARD} has changed" in done.stderr, done.stderr
    assert_only_the_demo_runs(running, before)
    (added / SHARD).write_bytes(original)
    assert running.run("models", "load", "other", "--wait").returncode == 0
    assert running.run("models", "unload", "other", "--wait", "--yes").returncode == 0
    assert_only_the_demo_runs(running, before)


@pytest.mark.parametrize("hangs", [False, True], ids=["loading", "stopped by a signal"])
def test_a_load_is_cancelled_by_unloading_the_model(running: Service, added: Path, hangs: bool) -> None:
    """The rank is stopped by a signal, so it neither makes progress nor reads messages."""
    before = set(ranks(running))
    assert running.command("models", "load", "other")["state"] == "loading"
    (pid,) = running.wait_until(lambda: set(ranks(running)) - before, BOUND_S, "the new rank")
    if hangs:
        os.kill(pid, signal.SIGSTOP)
    done = running.run("models", "unload", "other", "--wait", "--yes")
    assert done.returncode == 0, done.stderr
    assert_only_the_demo_runs(running, before)


class EveryNewRank(threading.Thread):
    """Applies an operation to every new rank of a service for the duration of a `with` block."""

    def __init__(self, running: Service, act: Callable[[int], object]) -> None:
        super().__init__(daemon=True)
        self.seen = set(ranks(running))
        self._running, self._act = running, act
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            for pid in set(ranks(self._running)) - self.seen:
                self.seen.add(pid)
                with suppress(ProcessLookupError):
                    self._act(pid)

    def __enter__(self) -> EveryNewRank:
        self.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._ended.set()
        self.join()


def test_a_load_whose_rank_hangs_ends_after_load_timeout_s(running: Service, added: Path) -> None:
    before = set(ranks(running))
    config = Path(running.flags[1])
    settings = config.read_text()
    config.write_text("load_timeout_s = 3\n" + settings)
    running.act(ReloadConfig())
    try:
        with EveryNewRank(running, lambda pid: os.kill(pid, signal.SIGSTOP)):
            done = running.run("models", "load", "other", "--wait")
    finally:
        config.write_text(settings)
        running.act(ReloadConfig())
    assert done.returncode == 1 and "no progress for" in done.stderr, done.stderr
    assert "raise load_timeout_s" in done.stderr
    assert_only_the_demo_runs(running, before)


def test_a_load_without_enough_host_memory_fails_with_the_reason_and_affects_no_other_model(
    running: Service, added: Path
) -> None:
    """Each new rank may use only slightly more address space than the running rank. A KV cache of 3 GB does
    not fit."""
    before = set(ranks(running))
    (demo,) = ranks(running).values()
    limit = demo.memory_info().vms + (200 << 20)

    def leave_little_memory(pid: int) -> None:
        resource.prlimit(pid, resource.RLIMIT_AS, (limit, limit))

    running.command("models", "remove", "other", "--yes")
    running.command("models", "add", str(added), "--set", "kv_blocks=5000", "--set", "threads=1")
    with EveryNewRank(running, leave_little_memory):
        done = running.run("models", "load", "other", "--wait")
    assert done.returncode == 1, done.stdout
    assert "cannot map" in done.stderr and "lower kv_blocks" in done.stderr, done.stderr
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


@pytest.mark.skipif(bool(find_gpus().gpus), reason="needs a machine without a GPU")
def test_a_model_without_its_gpu_runs_on_the_cpu_only_if_that_is_configured(tmp_path: Path) -> None:
    config = tmp_path / "appliance.toml"
    model = f'[models.demo]\nfolder = "{demo_model_folder()}"\nkv_blocks = 50\ndevice = "cuda"\n'
    config.write_text(f"{model}cpu_fallback = true\n")
    with service("--config", str(config)) as running:
        replica = running.replica()
        assert replica["state"] == "ready" and replica["devices"] == ["cpu"]
        [degraded] = replica["degraded"]
        assert degraded["description"].startswith("runs on the CPU instead of a GPU: ")
        assert "needs 1 CUDA device" in degraded["description"] and "models retry demo" in degraded["remedy"]
        assert running.status()["state"] == "degraded"
        running.wait_until(
            lambda: [one["where"] for one in running.status()["current_problems"]] == ["demo-0"],
            60,
            "the only problem",
        )
        assert running.run("models", "retry", "demo").returncode == 0
        running.wait_until(
            lambda: running.replica()["restarts"] > replica["restarts"] and running.ready(), 120, "the return"
        )
        assert running.replica()["degraded"]
        config.write_text(model)
        refused = run_appliance("config", "check", config)
        assert refused.returncode != 0 and "needs one GPU" in refused.stdout + refused.stderr
