"""Tests that a model with damaged files is reported with the cause and remedy, and that other models are
served."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from appliance.client import ServiceNotRunningError
from appliance.settings import demo_model_folder
from tests.system.commands import run_appliance
from tests.system.service import APPLIANCE, Service, service

pytestmark = pytest.mark.system
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def broken(tmp_path: Path) -> Iterator[Path]:
    """Return a copy of the shipped model without its second shard."""
    folder = tmp_path / "broken"
    shutil.copytree(demo_model_folder(), folder)
    (folder / SHARD).unlink()
    yield folder
    shutil.rmtree(folder)


def answers(running: Service) -> bool:
    """Return whether the service answers on its admin socket."""
    try:
        return bool(running.status())
    except ServiceNotRunningError:
        return False


def test_config_check_names_the_missing_shard_and_its_line(broken: Path, tmp_path: Path) -> None:
    config = tmp_path / "appliance.toml"
    config.write_text(f'[models.chat]\nfolder = "{broken}"\n')
    done = run_appliance("config", "check", config)
    assert done.returncode == 1
    assert done.stdout.startswith(f"{config}:2: model 'chat': {broken / SHARD} does not exist, but ")
    assert done.stdout.rstrip().endswith("copy or download the checkpoint again, with all of its files")
    (fault,) = json.loads(run_appliance("config", "check", config, "--json").stdout)["faults"]
    assert fault["field"] == "models.chat.folder" and SHARD in fault["description"]


def test_config_check_names_a_fallback_that_does_not_exist(tmp_path: Path) -> None:
    config, folder = tmp_path / "appliance.toml", demo_model_folder()
    text = f'state_dir = "{tmp_path}/state"\n[models.chat]\nfolder = "{folder}"\nfallback = "chta"\n'
    config.write_text(text)
    done = run_appliance("config", "check", config)
    assert done.returncode == 1
    said = "models.chat.fallback = 'chta' does not name another model or alias: remove it"
    assert done.stdout.rstrip() == f"{config}:4: {said}"
    # If the registry cannot be read, it may contain a model with this name.
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "control.db").write_bytes(b"no database" * 400)
    done = run_appliance("config", "check", config)
    assert done.returncode == 0
    assert f"warning: {config}:4: {said}, unless the registry contains the fallback (" in done.stdout


def test_config_check_warns_about_a_model_without_a_template(broken: Path, tmp_path: Path) -> None:
    shutil.copy(demo_model_folder() / SHARD, broken)
    (broken / "tokenizer_config.json").write_text("{}")
    config = tmp_path / "appliance.toml"
    config.write_text(f'[models.chat]\nfolder = "{broken}"\n')
    done = run_appliance("config", "check", config)
    assert done.returncode == 0 and done.stdout.rstrip().endswith(f"ok: {config}")
    assert "warning: " in done.stdout and "chat requests will be refused" in done.stdout


def serve(*words: object, **environ: str) -> subprocess.CompletedProcess[str]:
    """Start a service that ends by itself, and return its output and exit code."""
    return subprocess.run(
        [APPLIANCE, "serve", *map(str, words)],
        stdin=subprocess.DEVNULL,
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_a_service_with_only_broken_models_ends_with_the_cause_as_its_last_status(
    broken: Path, tmp_path: Path
) -> None:
    folders = "--run-dir", tmp_path / "run", "--state-dir", tmp_path / "state"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        done = serve(*folders, "--model", broken, NOTIFY_SOCKET=str(tmp_path / "notify"))
        manager.setblocking(False)
        told = []
        while True:
            try:
                told.append(manager.recv(65536).decode())
            except BlockingIOError:
                break
    assert done.returncode == os.EX_CONFIG
    assert f"--model: model 'broken': {broken / SHARD} does not exist" in done.stderr
    assert "database" not in done.stderr and ".db" not in "".join(told)
    assert "STATUS=stopped: " in told[-1] and SHARD in told[-1]
    assert not (tmp_path / "state").exists(), "the databases were created although nothing can be served"


def test_a_defect_that_only_the_engine_finds_also_ends_the_start(broken: Path, tmp_path: Path) -> None:
    shutil.copy(demo_model_folder() / SHARD, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    folders = "--run-dir", tmp_path / "run", "--state-dir", tmp_path / "state"
    done = serve(*folders, "--model", broken, "--kv-blocks", "50", OMP_NUM_THREADS="1")
    assert done.returncode == os.EX_CONFIG
    assert "no model can be served: " in done.stderr and "config.json requires" in done.stderr


def test_a_broken_model_is_shown_as_failed_until_it_is_repaired_while_others_serve(
    broken: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Service, "ready", answers)
    models = "--model", f"demo={demo_model_folder()}", "--model", str(broken)
    with service(*models, "--kv-blocks", "50") as running:

        def state(name: str) -> tuple[str, str]:
            for model in running.status()["models"]:
                if model["name"] == name:
                    return model["state"], model["detail"]
            return "", ""

        running.wait_until(lambda: state("demo")[0] == "ready", 120, "the good model")
        running.wait_until(lambda: state("broken")[0] == "failed", 60, "the failure of the other model")
        assert SHARD in state("broken")[1]
        status = running.status()
        assert any(SHARD in problem["description"] for problem in status["current_problems"])
        assert "no such file" not in running.log_path.read_text(), "the engine was started for nothing"
        assert running.complete().status_code == 200
        refused = running.complete("broken")
        assert refused.status_code == 503 and SHARD in refused.text
        with running.http() as http:
            assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["demo"]
            not_ready = http.get("/health/ready")
            assert not_ready.status_code == 503 and SHARD in not_ready.text
        shutil.copy(demo_model_folder() / SHARD, broken)
        running.wait_until(lambda: state("broken")[0] == "ready", 120, "the repaired model")
        with running.http() as http:
            running.wait_until(lambda: http.get("/health/ready").status_code == 200, 60, "ready")
            assert len(http.get("/v1/models").json()["data"]) == 2


def test_the_service_is_ready_without_a_broken_model_that_is_not_required(
    broken: Path, tmp_path: Path
) -> None:
    config = tmp_path / "appliance.toml"
    config.write_text(
        f'[models.demo]\nfolder = "{demo_model_folder()}"\nkv_blocks = 50\n'
        f'[models.chat]\nfolder = "{broken}"\nrequired = false\n'
    )
    with service("--config", str(config)) as running, running.http() as http:
        assert http.get("/health/ready").status_code == 200

        def states() -> dict[str, str]:
            return {model["name"]: model["state"] for model in running.status()["models"]}

        running.wait_until(lambda: states() == {"demo": "ready", "chat": "failed"}, 60, "the failed model")


def test_a_reload_refuses_a_broken_model_and_changes_nothing(broken: Path, tmp_path: Path) -> None:
    config = tmp_path / "appliance.toml"
    good = f'[models.demo]\nfolder = "{demo_model_folder()}"\nkv_blocks = 50\n'
    config.write_text(good)
    with service("--config", str(config)) as running:
        pids = running.replica()["pids"]
        config.write_text(f'{good}max_num_seqs = 7\n[models.chat]\nfolder = "{broken}"\n')
        done = run_appliance("config", "reload", "--run-dir", running.run_dir)
        assert done.returncode == 1
        assert f"{config}:6: model 'chat': {broken / SHARD} does not exist" in done.stderr
        assert [model["name"] for model in running.status()["models"]] == ["demo"]
        assert running.replica()["pids"] == pids
        with running.http() as http:
            assert http.get("/health/ready").status_code == 200
