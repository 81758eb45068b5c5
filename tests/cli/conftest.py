from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import typer

from appliance.cli import main
from appliance.cli.app import app
from appliance.protocol import ModelStatus, ReplicaStatus
from appliance.protocol.status import DatabaseStatus, FrontStatus, Problem, QueueStatus, SocketStatus, Status
from store.control import ControlStore
from store.requests import RequestLog, RequestRow
from store.schemas import HISTORY
from store.writer import Writer
from tests.cli.servers import AdminService, ApiService
from tests.system.commands import start_on_terminal

HOMES = ("HOME", "XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")


class Outcome(NamedTuple):
    """The output and exit code of a command."""

    code: int
    out: str
    err: str


Run = Callable[..., Outcome]

BUILT: Any = typer.main.get_command(app)
"""The command tree, built only once. Otherwise, typer would rebuild it for each command line."""


def commands(group: Any = BUILT, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the name (as a tuple of words) and the command object of every runnable command."""
    for name, command in group.commands.items():
        below = getattr(command, "commands", None)
        if not below or command.invoke_without_command:
            yield (*words, name), command
        if below:
            yield from commands(command, (*words, name))


EVERY = dict(commands())


class History(NamedTuple):
    """A request log that is opened for writing."""

    log: RequestLog
    writer: Writer

    def flush(self) -> None:
        """Wait until everything logged so far has been written and can be read."""
        self.writer.call(lambda connection: None).result(60)


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide the settings and directories of the user who runs the tests."""
    for name in ("APPLIANCE_CONFIG", "RUNTIME_DIRECTORY", "STATE_DIRECTORY", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("appliance.settings.SYSTEM_CONFIG", tmp_path / "no-such-file")
    for name in HOMES:
        monkeypatch.setenv(name, str(tmp_path / "home"))


@pytest.fixture(autouse=True)
def _patient_databases(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let writes to the control database wait long on a busy machine, where they could exceed the product's
    limit."""
    for module in ("control", "trail"):
        monkeypatch.setattr(f"store.{module}.WITHIN_S", 600.0)


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs the command in this process, as its entry point does."""

    monkeypatch.setattr("appliance.cli.app.app", BUILT)

    def run(*words: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["appliance", *map(str, words)])
        code = main()
        sys.stdout.flush()
        sys.stderr.flush()
        return Outcome(code, *capfd.readouterr())

    return run


def on_a_terminal(*words: str, width: int = 80, typed: str = "", **environ: str) -> str:
    """Run a command in a terminal of this width, enter `typed`, and return the output."""
    master, slave = os.openpty()
    termios.tcsetwinsize(slave, (40, width))
    process = start_on_terminal(os.ttyname(slave), {**os.environ, "TERM": "xterm", **environ}, *words)
    os.write(master, typed.encode())
    output = b""
    # Until the process has exited, this side keeps the terminal open.
    while select.select([master, process.sentinel], [], [])[0] != [process.sentinel]:
        output += os.read(master, 65536)
    os.close(slave)
    os.close(master)
    process.join()
    assert process.exitcode == 0, output
    return output.decode()


@pytest.fixture
def run_unprivileged_cli(open_folder: Path) -> Run:
    """Return a function that runs the command as a user without write access to root's files. Any file that
    the command reads must be in `open_folder`."""

    def run(*words: object) -> Outcome:
        # First run a command that imports all modules, because the other user may not be able to read the
        # interpreter's files.
        source = (
            "import contextlib, io, os, sys; from appliance.cli import main\n"
            "with contextlib.redirect_stdout(io.StringIO()): main()\n"
        )
        if os.geteuid() == 0:
            source += "os.setgroups([]); os.setegid(65534); os.seteuid(65534)\n"
        source += "sys.exit(main())"
        done = subprocess.run(
            [sys.executable, "-c", source, *map(str, words)],
            env={**os.environ, **dict.fromkeys(HOMES, str(open_folder / "home"))},
            capture_output=True,
            text=True,
            timeout=600,
        )
        return Outcome(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """Return a run directory with a short path, because a socket path has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="cli-"))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def admin(run_dir: Path) -> Iterator[AdminService]:
    service = AdminService(run_dir / "admin.sock", a_status(run_dir))
    yield service
    service.close()


@pytest.fixture
def api(run_dir: Path) -> Iterator[ApiService]:
    service = ApiService(run_dir / "api.sock")
    yield service
    service.close()


@pytest.fixture
def history(tmp_path: Path) -> Iterator[History]:
    """Open `history.db` in `tmp_path` for writing, as the service does."""
    writer = Writer(tmp_path / "history.db", HISTORY, synchronous="NORMAL")
    writer.start()
    yield History(RequestLog(writer), writer)
    writer.close()


@pytest.fixture
def databases(tmp_path: Path) -> Path:
    """Return a state directory with two keys and both databases, as a stopped service leaves them."""
    control = ControlStore(tmp_path / "control.db")
    control.start()
    for name in ("one", "two"):
        control.create_key(actor="uid:0", name=name, tenant="default").result(60)
    control.close()
    history = Writer(tmp_path / "history.db", HISTORY, synchronous="NORMAL")
    history.start()
    RequestLog(history).end(a_row("req-1"))
    history.close()
    return tmp_path


def a_row(request_id: str, **fields: object) -> RequestRow:
    """Return the row of a successful request. `fields` overrides its fields."""
    known: dict[str, object] = {
        "created_at": 1_790_000_000.0,
        "finished_at": 1_790_000_001.0,
        "tenant": "default",
        "peer": "uid 0",
        "endpoint": "/v1/chat/completions",
        "model": "demo",
        "prompt_tokens": 12,
        "generated_tokens": 17,
        "e2e_ms": 192.3,
        "status": 200,
        "finish_reason": "stop",
        **fields,
    }
    return RequestRow(request_id=request_id, **known)  # type: ignore[arg-type]


def a_status(run_dir: Path) -> Status:
    """Return the status of a service with one front, one model that has two ranks, and one problem."""
    replica = ReplicaStatus(
        name="demo-0",
        state="ready",
        pids=[101, 102],
        devices=["cpu", "cpu"],
        dtype="float32",
        weights="float32",
        kv_cache_dtype="float32",
        tensor_parallel_size=2,
        predicted_bytes=1 << 30,
        used_bytes=1200 << 20,
        max_num_seqs=64,
        running=3,
        waiting=2,
        blocks_total=3276,
        blocks_used=12,
        generated_tokens=123456,
        step_ms=8.25,
    )
    model = ModelStatus(
        name="demo",
        folder="/srv/models/with/a/long/path/to/the/demo/model/that/goes/on/and/on/until/the/end",
        version="191c2087af56",
        created=1_790_000_000,
        state="ready",
        max_model_len=2048,
        queued=5,
        replicas=[replica],
    )
    return Status(
        version="0.1.0",
        pid=os.getpid(),
        uid=os.geteuid(),
        python="3.11.7",
        sqlite="3.40.1",
        started_at=1_790_000_000.0,
        uptime_s=11_520.0,
        state="ready",
        config_file="",
        run_dir=str(run_dir),
        state_dir=str(run_dir / "state"),
        sockets=[
            SocketStatus(name="api", address=str(run_dir / "api.sock"), state="accepting", accepted=1234)
        ],
        fronts=[FrontStatus(name="front-0", state="ready", pid=77, streams=3, tokens=98765)],
        models=[model],
        queue=QueueStatus(
            waiting=5,
            running=3,
            oldest_wait_s=1.5,
            limit=2048,
            timeout_s=120,
            admitted=40,
            refused=2,
            ended=37,
        ),
        databases=[
            DatabaseStatus(
                path=str(run_dir / "state" / "history.db"),
                lag_rows=4,
                lag_ms=120,
                failing_s=0,
                last_error=None,
                committed_rows=80,
                dropped_rows=0,
                rejected_rows=0,
            )
        ],
        problems=[
            Problem(at=1_790_000_500.0, where="demo-0", description="rank 1 was killed by signal 9", count=2)
        ],
    )


def change_replica(status: Status, **fields: Any) -> None:
    """Set the given fields of the only replica in a status."""
    replicas = status.models[0].replicas
    replicas[0] = msgspec.structs.replace(replicas[0], **fields)
