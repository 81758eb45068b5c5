from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from appliance.actions.parameters import ReloadConfig
from appliance.client import AdminClient, ServiceNotRunningError
from appliance.protocol.status import Status
from store.audit import AuditRow
from store.requests import LoggedRequest, RequestReader
from tests.audit_trail import read_audit
from tests.forked import ForkedPopen
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


def alive(pid: int) -> bool:
    """Return whether the process is running. A zombie counts as not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Service:
    """A core in a separate process, with fake fronts and replicas."""

    def __init__(self, folder: Path, settings: str = "", models: tuple[str, ...] = ("m",)) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.state_dir = folder / "state"
        tables = ""
        for model in models:
            (folder / model).mkdir(exist_ok=True)
            (folder / model / "config.json").write_text('{"vocab_size": 10}')
            tables += f'[models.{model}]\nfolder = "{model}"\n'
        self.config = folder / "appliance.toml"
        self.config.write_text(
            f'run_dir = "{self.run_dir}"\nstate_dir = "{self.state_dir}"\n{settings}\n{tables}'
        )
        self.admin = AdminClient(self.run_dir)
        self.log = folder / "log"
        self.tree = ROOT
        """The checkout that contains the modules to run."""
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        # Processes are forked from one that has imported modules of this checkout.
        popen = ForkedPopen if self.tree == ROOT else subprocess.Popen
        with self.log.open("ab") as log:
            self.process = popen(
                [sys.executable, "-m", "tests.core.service", str(self.config)], cwd=self.tree, stderr=log
            )

    def wait_ready(self) -> Status:
        wait_until(lambda: self.state() == "ready", description=f"ready ({self.log})")
        return self.admin.status()

    def start_and_wait(self) -> Service:
        """Start the core, and wait until it is ready."""
        self.start()
        self.wait_ready()
        return self

    def state(self) -> str:
        with contextlib.suppress(ServiceNotRunningError):
            return self.admin.status().state
        return "down"

    def pids(self) -> list[int]:
        """Return the process ids of all fronts and ranks."""
        status = self.admin.status()
        fronts = [front.pid for front in status.fronts if front.pid is not None]
        return fronts + [pid for model in status.models for replica in model.replicas for pid in replica.pids]

    def connect(self, line: str, address: tuple[str, int] | None = None) -> socket.socket:
        """Send a request and return the socket on which its answer arrives."""
        sock = socket.socket(socket.AF_UNIX if address is None else socket.AF_INET)
        sock.settimeout(60)
        sock.connect(str(self.run_dir / "api.sock") if address is None else address)
        sock.sendall(line.encode() + b"\n")
        return sock

    def rows(self) -> list[LoggedRequest]:
        return RequestReader(self.state_dir / "history.db").changes(0)

    def audit(self) -> list[AuditRow]:
        """Return the audit rows, oldest first. First wait until they are on the disk, because the service
        answers an action after 3 s even if its rows are not stored yet."""
        path = self.state_dir / "control.db"

        def written() -> bool:
            [database] = [one for one in self.admin.status().databases if one.path == str(path)]
            return database.lag_rows == 0

        wait_until(written, description="control.db to be written")
        return read_audit(path)

    def set_timeout(self, name: str, seconds: int) -> None:
        """Change a time limit in the settings file, and reload it. A limit that is short only while a test
        waits for its end kills no process that a busy machine delays at another time."""
        text, count = re.subn(rf"^{name} = .*", f"{name} = {seconds}", self.config.read_text(), flags=re.M)
        assert count == 1, f"{name} is not in {self.config}"
        self.config.write_text(text)
        self.admin.act(ReloadConfig())

    def stop(self, number: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(60)


@contextlib.contextmanager
def running_core(folder: Path, settings: str = "") -> Iterator[Service]:
    """Run a core in `folder` until the block ends. The core is ready when the block begins."""
    service = Service(folder, settings)
    service.start()
    assert service.process is not None
    try:
        service.wait_ready()
        yield service
    finally:
        service.process.kill()
        service.process.wait()


def read_answer(sock: socket.socket) -> list[str]:
    """Return all lines of an answer."""
    with sock, sock.makefile() as lines:
        return [line.strip() for line in lines]


@pytest.fixture
def make_service(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    made: list[Service] = []

    def make(settings: str = "", models: tuple[str, ...] = ("m",), folder: Path = tmp_path) -> Service:
        made.append(Service(folder, settings, models))
        return made[-1]

    yield make
    for service in made:
        if service.process is not None and service.process.poll() is None:
            os.kill(service.process.pid, signal.SIGKILL)
            service.process.wait()
