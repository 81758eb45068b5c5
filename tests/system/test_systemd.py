"""Tests of the service under a real systemd, in a separate machine: start, restart, reload, watchdog and
stop."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.settings import demo_model_folder
from tests.system.machine import ROOT, BootError, Machine, machine, refusal
from tests.system.memory_limit import memory_limit
from tests.system.test_deaths import wait_exited

pytestmark = pytest.mark.system

UNITS = ROOT / "systemd"
SERVICE = "appliance.service"
DROP_IN = "/etc/appliance/conf.d/20-test.toml"
WATCHDOG_S = 30
HANG_S = 20
STOP_S = 6
"""Time in seconds in which the service must stop or ask systemd for more time. A drain in the tests takes
longer."""
LONG = {"model": "demo", "prompt": "import ", "temperature": 0, "max_tokens": 300, "ignore_eos": True}


class Server:
    """The service in the machine, and clients on the host. The clients reach the service's sockets through
    /proc."""

    def __init__(self, inside: Machine) -> None:
        self.inside = inside
        self.api_socket = inside.root / "run/appliance/api.sock"

    def http(self) -> httpx.Client:
        """Return a client with a new connection."""
        transport = httpx.HTTPTransport(uds=str(self.api_socket), verify=False)
        return httpx.Client(transport=transport, base_url="http://appliance", timeout=600)

    def ready(self) -> int:
        with self.http() as client:
            return client.get("/health/ready").status_code

    def complete(self, **options: Any) -> int:
        """Request a few tokens and return the status of the answer."""
        body = {**LONG, "max_tokens": 8, **options}
        with self.http() as client:
            return client.post("/v1/completions", json=body).status_code

    def unit(self) -> dict[str, str]:
        names = ("ActiveState", "MainPID", "NRestarts", "StatusText", "Result")
        return self.inside.show(SERVICE, *names)

    def ask_admin(self, path: str) -> Any:
        """Return the answer of a read-only route of the admin API."""
        transport = httpx.HTTPTransport(uds=str(self.inside.root / "run/appliance/admin.sock"), verify=False)
        with httpx.Client(transport=transport, base_url="http://appliance", timeout=180) as admin:
            answer = admin.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def status(self) -> Any:
        return self.ask_admin("/status")

    def replica(self) -> Any:
        return self.status()["models"][0]["replicas"][0]

    def children(self) -> list[int]:
        """Return the process ids of every front and rank."""
        status = self.status()
        ranks = [pid for model in status["models"] for one in model["replicas"] for pid in one["pids"]]
        return ranks + [front["pid"] for front in status["fronts"]]

    def rows(self, **wanted: Any) -> dict[str, Any]:
        """Return the rows of the request log whose columns have these values, keyed by request id."""
        rows = self.ask_admin("/request-log?limit=1000")["rows"]
        assert len(rows) == len({row["request_id"] for row in rows}), "a request has two rows"
        return {
            row["request_id"]: row
            for row in rows
            if all(row[name] == value for name, value in wanted.items())
        }

    def write(self, text: str) -> None:
        """Write a drop-in file with settings that extend the main settings file."""
        path = self.inside.root / DROP_IN.lstrip("/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def forget(self) -> None:
        (self.inside.root / DROP_IN.lstrip("/")).unlink(missing_ok=True)

    def wait_logged(self, text: str, lines: int) -> str:
        """Wait until the newest `lines` lines of the service's journal contain `text`, and return these
        lines. The journal receives a line a moment after the service has written it."""

        def logged() -> str:
            newest = self.inside.journal("--unit", SERVICE, "--lines", str(lines))
            return newest if text in newest else ""

        return str(self.inside.wait_until(logged, 60, f"{text!r} in the journal"))

    def wait_active(self, *, but: str = "") -> None:
        """Wait until the unit is active with a main process whose id differs from `but`."""

        def active() -> bool:
            unit = self.unit()
            return unit["ActiveState"] == "active" and unit["MainPID"] != but

        self.inside.wait_until(active, 300, "the unit to be active")


class Stream(threading.Thread):
    """A client that reads one stream until it ends."""

    def __init__(self, server: Server, **options: Any) -> None:
        super().__init__(daemon=True)
        self.server = server
        self.options = {**LONG, "stream": True, **options}
        self.begun = threading.Event()
        self.lines: list[str] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with (
                self.server.http() as client,
                client.stream("POST", "/v1/completions", json=self.options) as answer,
            ):
                for line in answer.iter_lines():
                    if line:
                        self.lines.append(line)
                    if len(self.lines) == 5:
                        self.begun.set()
        except Exception as error:
            self.error = error
        finally:
            self.begun.set()


def shown_to_the_sandbox() -> str:
    """Return unit settings that make this checkout and its Python visible inside the sandbox."""
    needed = {Path(path).resolve() for path in (ROOT, sys.prefix, sys.base_prefix)}
    hidden = [path for path in sorted(needed) if path.parts[1] in ("home", "root", "tmp")]
    return "".join(
        ["ProtectHome=tmpfs\n"] * bool(hidden) + [f"BindReadOnlyPaths={path}\n" for path in hidden]
    )


@pytest.fixture(scope="module")
def booted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    if reason := refusal():
        pytest.skip(f"no machine can be booted here: {reason}")
    unit, socket = "/etc/systemd/system/appliance.service", "/etc/systemd/system/appliance.socket"
    files = {
        unit: (UNITS / "appliance.service").read_text(),
        socket: (UNITS / "appliance.socket").read_text(),
        f"{socket}.d/tcp.conf": (UNITS / "examples/appliance.socket.d/tcp.conf").read_text(),
        f"{unit}.d/test.conf": "[Service]\n"
        f'Environment="PYTHONPATH={ROOT}" OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1\nWatchdogSec={WATCHDOG_S}s\n'
        f"TimeoutStopSec={STOP_S}s\n{shown_to_the_sandbox()}",
        "/usr/lib/sysusers.d/appliance.conf": (UNITS / "sysusers.d/appliance.conf").read_text(),
        "/etc/appliance/appliance.toml": f"hang_timeout_s = {HANG_S}\ndrain_grace_s = 500\n",
    }
    with contextlib.ExitStack() as held:
        try:
            inside = held.enter_context(machine(tmp_path_factory.mktemp("machine"), files))
        except BootError as error:
            pytest.skip(str(error))
        yield inside


@pytest.fixture
def server(booted: Machine) -> Iterator[Server]:
    """The service, running."""
    server = Server(booted)
    server.forget()
    booted.systemctl("reset-failed")
    booted.systemctl("start", SERVICE)
    yield server


def test_the_units_pass_the_check_of_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    for unit in UNITS.glob("appliance.*"):
        text = unit.read_text().replace("/opt/appliance/bin/", f"{sys.prefix}/bin/")
        (tmp_path / unit.name).write_text(text)
    shutil.copytree(UNITS / "examples", tmp_path, dirs_exist_ok=True)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.glob("appliance.*[et]"))],
        capture_output=True,
        text=True,
    )
    # Ignore messages about other software on this machine.
    said = [line for line in (done.stdout + done.stderr).splitlines() if "appliance" in line]
    assert (done.returncode, said) == (0, []), done.stderr


def test_the_exposure_level_that_systemd_computes_for_the_sandbox_is_low() -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze")
    command = ["systemd-analyze", "security", "--offline=true", "--no-pager"]
    done = subprocess.run(
        [*command, "--threshold=20", str(UNITS / SERVICE)], capture_output=True, text=True, check=False
    )
    # The exit code is 1 if the exposure level exceeds 2.0.
    assert done.returncode == 0, done.stdout + done.stderr
    score = re.search(r"Overall exposure level for appliance.service: ([0-9.]+)", done.stdout)
    assert score and float(score[1]) <= 2.0


def test_start_returns_when_the_models_answer(booted: Machine) -> None:
    server = Server(booted)
    assert server.unit()["ActiveState"] == "inactive"
    with ThreadPoolExecutor(1) as pool:
        start = pool.submit(booted.systemctl, "start", SERVICE)
        seen: dict[str, str] = {}
        while wait([start], timeout=0.05).not_done:
            unit = server.unit()
            seen.setdefault(unit["StatusText"], unit["ActiveState"])
        start.result()
    assert server.ready() == 200
    loading = {text: state for text, state in seen.items() if text.startswith("loading: demo-0 ")}
    assert set(loading.values()) == {"activating"}, seen
    assert server.unit()["StatusText"].startswith("ready: 1 model, ")
    over_tcp = "import urllib.request as r; print(r.urlopen('http://127.0.0.1:8080/health/ready').status)"
    assert booted.run("/opt/appliance/bin/python", "-c", over_tcp).stdout.strip() == "200"
    booted.wait_until(
        lambda: len(booted.processes("appliance")) == 4,
        60,
        "the core, a front, the front's chat template renderer and a rank",
    )
    cache = booted.root / "var/cache/appliance"  # space for kernels that are compiled at run time
    assert cache.stat().st_uid == booted.processes("appliance")[0].uids().real


def test_a_reload_restarts_no_model_and_fails_with_an_invalid_file(server: Server) -> None:
    children, before = server.children(), server.unit()
    server.write('drain_grace_s = 61\nlog_level = "debug"\n')
    server.inside.systemctl("reload", SERVICE)
    assert server.inside.appliance("config", "show")["settings"]["drain_grace_s"] == 61

    server.write('drain_grace_s = 62\nfronts = "many"\n')
    refused = server.inside.systemctl("reload", SERVICE, check=False)
    assert refused.returncode != 0
    server.wait_logged(f"{DROP_IN}:2", 30)
    assert server.inside.appliance("config", "show")["settings"]["drain_grace_s"] == 61

    assert server.complete() == 200
    now = server.unit()
    assert (now["ActiveState"], now["MainPID"]) == ("active", before["MainPID"])
    assert len(children) == 2
    assert server.children() == children


@pytest.fixture(params=["by a signal", "for lack of memory"])
def kill_core(request: pytest.FixtureRequest, server: Server) -> Iterator[Callable[[], None]]:
    """Yield a function that kills the core."""

    def send_signal() -> None:
        server.inside.systemctl("kill", "--signal=KILL", "--kill-whom=main", SERVICE)

    if request.param == "by a signal":
        yield send_signal
        return
    with memory_limit() as group:

        def take_its_memory() -> None:
            (core,) = (
                one for one in server.inside.processes("appliance") if one.ppid() == server.inside.init
            )
            group.add(core.pid)
            group.kill(core.pid)
            wait_exited([core.pid], 60.0)

        yield take_its_memory


def test_a_killed_core_is_restarted_and_waiting_clients_are_served(
    server: Server, kill_core: Callable[[], None]
) -> None:
    # The rows of earlier requests must be on the disk.
    server.inside.wait_until(
        lambda: not any(one["lag_rows"] for one in server.status()["databases"]),
        60,
        "every row to be on the disk",
    )
    before, ended = server.unit(), server.rows()
    under_way = [Stream(server, max_tokens=1900) for _ in range(8)]
    assert all(stream.begun.wait(120) for stream in under_way)
    killed = server.inside.processes("appliance")

    def opened() -> dict[str, Any] | None:
        rows = server.rows(state="open")
        return rows if len(rows) == 8 else None

    interrupted = server.inside.wait_until(opened, 60, "their rows to be on the disk").keys()
    kill_core()
    with ThreadPoolExecutor(8) as pool:
        completions = [pool.submit(server.complete) for _ in range(8)]
        assert [answer.result() for answer in completions] == [200] * 8
    for stream in under_way:
        stream.join(300)
        assert not stream.is_alive()
        assert stream.error is not None  # the stream must not look complete
    server.wait_active(but=before["MainPID"])
    assert int(server.unit()["NRestarts"]) == int(before["NRestarts"]) + 1
    told = f"the previous run (process {before['MainPID']}) was killed or crashed"
    assert any(told in one["description"] for one in server.status()["problems"])
    server.inside.wait_until(
        lambda: not any(process.is_running() for process in killed), 60, "the end of all processes"
    )
    # Rows are written a moment after the answers.
    server.inside.wait_until(lambda: len(server.rows()) >= len(ended) + 16, 60, "the rows of all requests")
    server.inside.wait_until(lambda: not server.rows(state="open"), 60, "the rows to end")
    after = server.rows()
    assert ended.keys() <= after.keys()
    assert {after[one]["finish_reason"] for one in interrupted} == {"interrupted"}
    served = [row for name, row in after.items() if name not in ended.keys() | interrupted]
    assert [row["status"] for row in served] == [200] * 8


def test_a_stalled_rank_is_replaced_by_the_core_without_a_restart_of_the_service(server: Server) -> None:
    before, ranks = server.unit(), server.replica()["pids"]
    server.inside.run("kill", "-STOP", *map(str, ranks))
    assert server.complete() == 200  # the answer arrives only after a new rank has replaced the stopped one
    assert server.replica()["pids"] != ranks
    assert "did not report for" in server.replica()["last_error"]
    now = server.unit()
    assert (now["ActiveState"], now["MainPID"], now["NRestarts"]) == (
        "active",
        before["MainPID"],
        before["NRestarts"],
    )


def test_a_core_that_hangs_is_killed_by_the_watchdog_and_started_again(server: Server) -> None:
    before = server.unit()
    server.inside.run("kill", "-STOP", before["MainPID"])
    try:
        answer = server.complete()  # the request waits in the backlog until the service has restarted
    # systemd resumes the stopped process to abort it, so the process may still accept the connection.
    except (httpx.RemoteProtocolError, httpx.ReadError):
        answer = server.complete()
    assert answer == 200
    server.wait_active(but=before["MainPID"])
    server.wait_logged("Watchdog timeout", 200)
    server.wait_logged("Fatal Python error: Aborted", 200)  # each thread's stack follows this line
    assert int(server.unit()["NRestarts"]) == int(before["NRestarts"]) + 1


def test_commands_find_the_service_of_the_unit_and_nothing_in_tmp(server: Server) -> None:
    inside = server.inside
    inside.run("useradd", "--system", "--groups", "appliance", "appliance-operator")
    trap = inside.root / "tmp/appliance-0"
    trap.mkdir()
    (trap / "admin.sock").touch()
    os.chown(trap, 65534, 65534)
    as_operator = ("setpriv", "--reuid=appliance-operator", "--regid=appliance-operator", "--init-groups")
    command = "/opt/appliance/bin/appliance"

    assert server.complete() == 200
    assert inside.appliance("status")["run_dir"] == "/run/appliance"
    seen = inside.run(*as_operator, command, "status", "--json")
    assert json.loads(seen.stdout)["run_dir"] == "/run/appliance"
    assert json.loads(inside.run(*as_operator, command, "requests", "--json").stdout)
    assert server.ask_admin("/audit/verify")["ok"]
    found = server.ask_admin("/findings")
    assert found["state_dir"] == "/var/lib/appliance"
    assert not [one for one in found["findings"] if "check failed" in one["text"]]

    inside.systemctl("stop", "appliance.socket", SERVICE)
    stopped = inside.run(command, "status", check=False)
    assert stopped.returncode == 1
    assert stopped.stderr.endswith("start the service with: systemctl start appliance\n")
    shutil.rmtree(trap)


def test_models_in_srv_are_served_and_models_in_home_need_the_drop_in(server: Server) -> None:
    inside, example = server.inside, UNITS / "examples/appliance.service.d/models-in-home.conf"
    for parent in ("srv", "home"):
        folder = inside.root / parent / "models/demo"
        shutil.copytree(demo_model_folder(), folder)
        inside.run("chmod", "-R", "a+rX", f"/{parent}/models")
    server.write(
        "".join(
            f'[models.in-{name}]\nfolder = "/{name}/models/demo"\nkv_blocks = 50\n'
            for name in ("srv", "home")
        )
    )
    drop_in = inside.root / "etc/systemd/system/appliance.service.d" / example.name
    try:
        refused = inside.systemctl("reload", SERVICE, check=False)
        assert refused.returncode != 0
        assert "/srv/models/demo" not in server.wait_logged("/home/models/demo", 20)

        drop_in.write_text(example.read_text())
        inside.systemctl("daemon-reload")
        inside.systemctl("restart", SERVICE)
        assert [server.complete(model=f"in-{name}") for name in ("srv", "home")] == [200, 200]
        # Nothing else below /home is visible, and the models cannot be changed.
        core = server.unit()["MainPID"]
        (inside.root / "home/other").mkdir()
        shown = ("nsenter", f"--target={core}", "--mount", "find", "/home", "-maxdepth", "2")
        assert set(inside.run(*shown).stdout.split()) == {"/home", "/home/models", "/home/models/demo"}
    finally:
        drop_in.unlink(missing_ok=True)
        server.forget()
        inside.systemctl("daemon-reload")
        inside.systemctl("restart", SERVICE)


def test_stop_drains_and_leaves_nothing(server: Server) -> None:
    ranks = [str(pid) for pid in server.replica()["pids"]]
    stream = Stream(server)
    assert stream.begun.wait(120)
    server.inside.run("kill", "-STOP", *ranks)
    assert stream.is_alive()
    with ThreadPoolExecutor(1) as pool:
        stop = pool.submit(server.inside.systemctl, "stop", SERVICE)
        assert wait([stop], timeout=STOP_S + 2).not_done
        server.inside.run("kill", "-CONT", *ranks)
        stop.result()
    stream.join(300)
    assert stream.error is None
    assert stream.lines[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in "".join(stream.lines)
    unit = server.inside.show(SERVICE, "ActiveState", "Result", "ExecMainStatus")
    assert unit == {"ActiveState": "inactive", "Result": "success", "ExecMainStatus": "0"}
    assert server.inside.processes("appliance") == []
    state = server.inside.root / "var/lib/appliance"
    assert not list(state.glob("*-wal"))
    assert [path.name for path in (server.inside.root / "run/appliance").iterdir() if path.is_dir()] == []

    # Invalid settings must be reported, and systemd must not restart the service.
    server.write("fronts = 0\n")
    assert server.inside.systemctl("start", SERVICE, check=False).returncode != 0
    server.wait_logged(f"{DROP_IN}:1", 10)
    failed = server.inside.show(SERVICE, "ActiveState", "ExecMainStatus", "NRestarts")
    assert failed == {"ActiveState": "failed", "ExecMainStatus": "78", "NRestarts": "0"}

    # The socket still exists, so a client that connects starts the service.
    server.forget()
    assert server.complete() == 200
    server.wait_active()
    server.inside.systemctl("stop", "appliance.socket", SERVICE)
    assert not server.api_socket.exists()
    assert server.inside.processes("appliance") == []
