"""A real service in real processes, started as an operator would start it, or forked to save CPU time."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import httpx2
import msgspec
import openai
import psutil

from appliance.actions.parameters import CreateKey, CreateTenant
from appliance.client import AdminClient
from store.requests import RequestFilter, RequestReader
from tests.forked import ForkedPopen
from tests.system.commands import run_appliance

APPLIANCE = str(Path(sys.executable).with_name("appliance"))


CALL_TIMEOUT_S = 60.0
"""Time limit for a call of the admin API. A busy machine may exceed the default limit of the client."""


class Service:
    """A running `appliance serve` in a separate folder. The folder has a short path because socket paths are
    limited in length."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder = folder
        self.run_dir, self.state_dir = folder / "run", folder / "state"
        self.api_socket = self.run_dir / "api.sock"
        self.flags = flags
        self.log_path = folder / "service.log"
        self.process: subprocess.Popen[bytes]

    def start(self) -> Service:
        words = ["serve", "--run-dir", str(self.run_dir), "--state-dir", str(self.state_dir), *self.flags]
        with self.log_path.open("ab") as log:
            self.process = self._popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        self.wait_until(self.ready, 180, "the service to be ready")
        return self

    def _popen(self, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Start `appliance` with these arguments. `options` are those of `subprocess.Popen`."""
        return subprocess.Popen([APPLIANCE, *words], **options)

    def ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(
                f"the service ended with {self.process.returncode}:\n{self.log_path.read_text()}"
            )
        try:
            with self.http() as client:
                return client.get("/health/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_until(self, condition: Callable[[], Any], timeout_s: float, description: str) -> Any:
        """Return the first true value of `condition`, which is checked after ever longer pauses of up to 0.1
        seconds."""
        began = time.monotonic()
        while not (value := condition()):
            waited_s = time.monotonic() - began
            if waited_s > timeout_s:
                raise AssertionError(
                    f"timed out after {timeout_s} s waiting for {description}; the "
                    f"log:\n{self.log_path.read_text()}"
                )
            time.sleep(min(0.1, max(0.02, waited_s / 20)))
        return value

    def stop(self) -> int:
        """Send SIGTERM, as systemd does, and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)

    def command(self, *words: str) -> Any:
        """Return the JSON that a client command prints."""
        done = self.run(*words, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a client command of this service, and return its output and exit code."""
        return run_appliance(*words, "--run-dir", self.run_dir)

    def status(self) -> Any:
        """Return the status as `appliance status --json` prints it, without starting a process for each
        call."""
        with AdminClient(self.run_dir, CALL_TIMEOUT_S) as client:
            return msgspec.to_builtins(client.status())

    def replica(self) -> Any:
        return self.status()["models"][0]["replicas"][0]

    def kill_front(self, pid: int) -> None:
        """Kill a front, and wait until the core has noticed. Until then, the core may assign new connections
        to the dead front."""
        psutil.Process(pid).kill()
        self.wait_until(
            lambda: pid not in [front["pid"] for front in self.status()["fronts"]],
            60,
            "the core to notice the death of the front",
        )

    def act(self, action: msgspec.Struct) -> Any:
        """Perform an operator action as its command would, without starting a process. Return the result."""
        with AdminClient(self.run_dir, CALL_TIMEOUT_S) as client:
            return client.act(action)

    def key(self, name: str, tenant: str = "default", **fields: Any) -> str:
        """Create a key and return its secret. `fields` contains additional fields of `CreateKey`."""
        return str(self.act(CreateKey(name=name, tenant=tenant, **fields)).key)

    def tenant(self, name: str, **fields: Any) -> None:
        """Create a tenant. `fields` are fields of `CreateTenant`."""
        self.act(CreateTenant(name=name, **fields))

    def rows(self, limit: int = 1000, **wanted: Any) -> list[dict[str, Any]]:
        """Return the rows that `appliance requests --json` would print, without starting a process for each
        call. `wanted` contains fields of `RequestFilter`."""
        reader = RequestReader(self.state_dir / "history.db")
        rows: list[dict[str, Any]] = msgspec.to_builtins(reader.query(RequestFilter(**wanted), limit))
        return rows

    def descendants(self) -> list[psutil.Process]:
        """Return the processes of all fronts and ranks. Other processes exit with their parent."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in children if not renders_templates(one) and not _runs(one, "tests.forked")]

    def client(self, **options: Any) -> openai.OpenAI:
        """Return an `openai` client on the Unix socket."""
        transport = httpx2.HTTPTransport(uds=str(self.api_socket), verify=False)
        return openai.OpenAI(
            base_url="http://appliance/v1",
            api_key="placeholder",
            http_client=openai.DefaultHttpx2Client(transport=transport),
            max_retries=0,
            **options,
        )

    def http(self) -> httpx.Client:
        """Return a plain HTTP client on the Unix socket."""
        # `verify=False` prevents each client from reading all CA certificates, which takes longer than a
        # request.
        transport = httpx.HTTPTransport(uds=str(self.api_socket), verify=False)
        return httpx.Client(transport=transport, base_url="http://appliance", timeout=300)

    def metrics(self) -> str:
        """Return the metrics that the admin socket serves."""
        transport = httpx.HTTPTransport(uds=str(self.run_dir / "admin.sock"), verify=False)
        with httpx.Client(transport=transport, base_url="http://appliance", timeout=600) as http:
            return http.get("/metrics").text

    def complete(self, model: str = "demo", **fields: Any) -> httpx.Response:
        """Request a completion of four tokens on a new connection. `fields` are added to the request."""
        body = {"model": model, "prompt": "import ", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        with self.http() as http:
            return http.post("/v1/completions", json=body | fields)


class Forked(Service):
    """A service whose core, fronts and ranks are forks of a process that has already imported their modules.
    Its start takes a third of the CPU time. Tests that measure or limit the memory of these processes, or
    change what their interpreters do, need a `Service`."""

    def _popen(self, words: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return ForkedPopen([sys.executable, "-m", "appliance.cli", *words], **options)


def renders_templates(process: psutil.Process) -> bool:
    """Return whether this process renders chat templates for a front."""
    return _runs(process, "appliance.text.template_worker")


def _runs(process: psutil.Process, module: str) -> bool:
    """Return whether this process was started as `python -m module`."""
    try:
        return module in process.cmdline()
    except psutil.Error:
        return False


@contextmanager
def service(*flags: str, kind: type[Service] = Forked) -> Iterator[Service]:
    """Start a service. At the end of the block, kill it together with all processes that it started, which is
    faster than stopping it."""
    folder = Path(tempfile.mkdtemp(prefix="appl-"))
    running = kind(folder, *flags)
    processes: list[psutil.Process] = []
    try:
        running.start()
        yield running
    finally:
        if running.process.poll() is None:
            processes = running.descendants()
            running.process.kill()
            running.process.wait()
        for process in processes:
            # These processes also exit by themselves when the core has exited.
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)
