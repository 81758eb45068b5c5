"""Tests of `appliance models pull` against a hub on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import on_a_terminal
from tests.hub.server import COMMIT, HubServer
from tests.system.commands import run_appliance

ROOT = Path(__file__).resolve().parents[2]
WEIGHTS_BYTES = 4 << 20
FILES = {
    "config.json": (ROOT / "appliance/demo_model/config.json").read_bytes(),
    "tokenizer.json": b"{}",
    "model.safetensors": random.Random(5).randbytes(WEIGHTS_BYTES),
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    server = HubServer()
    server.add("org/demo", FILES)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    yield server
    server.close()


def command(*words: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "appliance.cli", "models", "pull", "--no-add", *map(str, words)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(*words: object) -> tuple[int, str, str]:
    done = run_appliance("models", "pull", "--no-add", *words)
    return done.returncode, done.stdout, done.stderr


def test_a_pull_stores_the_model_in_the_state_directory_and_prints_one_json_object(
    hub: HubServer, tmp_path: Path
) -> None:
    code, out, err = run("org/demo", "--json")
    assert code == 0, err
    cache = tmp_path / "home/appliance/hub"
    size = sum(map(len, FILES.values()))
    pulled = json.loads(out)
    assert pulled == pulled | {
        "repository": "org/demo",
        "revision": "main",
        "commit": COMMIT,
        "folder": str(cache / "models--org--demo/snapshots" / COMMIT),
        "files": 3,
        "bytes": size,
        "received_bytes": size,
    }
    assert cache.stat().st_mode & 0o7777 == 0o2775
    assert not [request for request in hub.requests if "harness" in request.path]


def test_hf_home_selects_the_cache_and_the_token(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("org/closed", FILES, gated=True, token="hf_stored")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf/token").write_text("hf_stored")
    code, out, err = run("org/closed", "--json")
    assert code == 0, err
    assert Path(json.loads(out)["folder"]).is_relative_to(tmp_path / "hf/hub")


def received_bytes(partials: Path) -> int:
    """Return the size of the largest partial file."""
    sizes = [0]
    for path in partials.glob("*.incomplete"):
        with contextlib.suppress(FileNotFoundError):  # A complete file is renamed.
            sizes.append(path.stat().st_size)
    return max(sizes)


@pytest.mark.parametrize("stop", (signal.SIGINT, signal.SIGKILL), ids=lambda one: one.name)
def test_a_stopped_pull_continues_in_the_middle_of_the_file(
    hub: HubServer, tmp_path: Path, stop: signal.Signals
) -> None:
    reached, released = threading.Event(), threading.Event()

    def hold(path: str, offset: int) -> None:
        if offset >= 2 << 20:
            reached.set()
            released.wait(120)

    hub.faults.before_piece = hold
    process = command("org/demo", "--cache-dir", tmp_path / "c")
    assert reached.wait(120)
    partials = tmp_path / "c/models--org--demo/blobs"
    while received_bytes(partials) < 1 << 20:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(stop)
    _, err = process.communicate(timeout=600)
    released.set()
    if stop == signal.SIGINT:
        assert process.returncode == 130
        # A slow pull may have shown its progress before the signal, so only the last line is compared.
        told = "interrupted: the files downloaded so far are kept; run the same command again to resume"
        assert err.splitlines()[-1] == told
    code, out, err = run("org/demo", "--cache-dir", tmp_path / "c", "--json")
    assert code == 0, err
    pulled = json.loads(out)
    assert 0 < pulled["received_bytes"] <= sum(map(len, FILES.values())) - (1 << 20)
    assert (Path(pulled["folder"]) / "model.safetensors").read_bytes() == FILES["model.safetensors"]
    assert not list(partials.glob("*.incomplete"))


def test_a_terminal_gets_a_bar(hub: HubServer, tmp_path: Path) -> None:
    shown = on_a_terminal("models", "pull", "--no-add", "org/demo", "--cache-dir", str(tmp_path / "a"))
    assert "org/demo [" in shown and "4.0 MiB" in shown


def test_a_slow_pull_without_a_terminal_reports_its_progress_in_lines(hub: HubServer, tmp_path: Path) -> None:
    released = threading.Event()
    hub.faults.before_piece = lambda path, offset: released.wait(120) if offset >= 3 << 20 else None
    process = command("org/demo", "--cache-dir", tmp_path / "c")
    assert process.stderr is not None
    lines: list[str] = []
    # On a busy machine, the first lines may report a smaller share.
    while not lines or not lines[-1].startswith("org/demo 75% · 3.0 MiB of 4.0 MiB"):
        lines.append(process.stderr.readline())
        assert lines[-1].startswith("org/demo "), lines
    released.set()
    _, rest = process.communicate(timeout=600)
    assert "\x1b" not in "".join([*lines, rest])


def test_an_unsupported_architecture_is_refused_before_the_weights_are_downloaded(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.add("org/whisper", FILES | {"config.json": b'{"model_type": "whisper"}'})
    code, _, err = run("org/whisper", "--cache-dir", tmp_path / "c")
    assert code == 1
    assert "whisper" in err and err.endswith("The weights were not downloaded\n")
    assert not hub.sent("model.safetensors")


def test_a_failed_pull_exits_1_with_one_line(hub: HubServer, tmp_path: Path) -> None:
    code, out, err = run("org/none", "--cache-dir", tmp_path / "c")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("appliance: http://127") and "has no repository org/none" in err


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_an_operator_without_write_permission_gets_an_error_before_the_download(
    hub: HubServer, open_folder: Path
) -> None:
    (open_folder / "home").mkdir()
    (open_folder / "cache").mkdir(mode=0o755)
    # First run a pull that fails, because the other user may not be able to read the interpreter's own files.
    source = (
        "import os, sys; from appliance.cli import main\n"
        "wanted, sys.argv[3] = sys.argv[3], 'org/none'; main(); sys.argv[3] = wanted\n"
        "os.setgroups([]); os.setegid(65534); os.seteuid(65534); sys.exit(main())"
    )
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            source,
            "models",
            "pull",
            "org/demo",
            "--no-add",
            "--cache-dir",
            open_folder / "cache",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "HOME": str(open_folder / "home")},
    )
    assert done.returncode == 1
    assert (
        "cache cannot be written (no write permission for uid 65534): run the command as root" in done.stderr
    )
    assert not hub.storage_requests
