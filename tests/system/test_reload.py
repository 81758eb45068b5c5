"""Tests that a running service with a real engine can reload its settings, and that loaded models keep their
processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from appliance.client import AdminClient
from appliance.protocol.status import Status
from appliance.settings import demo_model_folder
from tests.ports import free_port
from tests.system.service import CALL_TIMEOUT_S, Service, service
from tests.system.test_deaths import Stream

pytestmark = pytest.mark.system

MODEL = f'folder = "{demo_model_folder()}"\nthreads = 1\nkv_blocks = 100\n'


class Server:
    """A service and its settings file."""

    def __init__(self, path: Path, running: Service) -> None:
        self.path, self.running = path, running

    def change(self, old: str, new: str) -> None:
        text = self.path.read_text()
        assert old in text
        self.path.write_text(text.replace(old, new))

    def reload(self) -> dict[str, Any]:
        done: dict[str, Any] = self.running.command("config", "reload")
        return done

    def status(self) -> Status:
        with AdminClient(self.running.run_dir, CALL_TIMEOUT_S) as admin:
            return admin.status()

    def pids(self, model: str) -> list[int]:
        found = [replica for one in self.status().models if one.name == model for replica in one.replicas]
        return [pid for replica in found if replica.state == "ready" for pid in replica.pids]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("reload") / "appliance.toml"
    # Top-level settings must precede all tables, and the tests insert tables after `fronts`.
    path.write_text(
        f'drain_grace_s = 120\nlisten = "127.0.0.1:{free_port()}"\nfronts = 2\n'
        f"[models.demo]\n{MODEL}[models.other]\n{MODEL}"
    )
    with service("--config", str(path)) as running:
        yield Server(path, running)


def test_a_reload_under_load_applies_the_changes_and_affects_nothing_else(server: Server) -> None:
    running, kept, changed = server.running, server.pids("demo"), server.pids("other")
    front = server.status().fronts[0].pid
    streams = [Stream(running, max_tokens=200) for _ in range(2)]
    for stream in streams:
        assert stream.begun.wait(120)
    port = free_port()
    former = next(sock.address for sock in server.status().sockets if sock.name == "tcp")
    server.change("fronts = 2", 'fronts = 1\nlog_level = "debug"\n[limits]\nmax_body_bytes = 999\n')
    server.change(f'listen = "{former}"\n', "")
    server.path.write_text(f'listen = "127.0.0.1:{port}"\n{server.path.read_text()}')
    server.change(
        f"[models.other]\n{MODEL}", f"[models.other]\n{MODEL}max_num_seqs = 5\n[models.new]\n{MODEL}"
    )
    done = server.reload()
    assert done["models"] == [
        "model new: is being added with 1 replica",
        "model other: its replicas are being replaced one by one",
    ]
    assert [line.partition(":")[0] for line in done["changed"] if not line.startswith("models.new")] == [
        "fronts",
        "limits.max_body_bytes",
        "listen",
        "log_level",
        "models.other.max_num_seqs",
    ]
    for stream in streams:
        stream.join(120)
        assert (stream.error, stream.finish_reason) == (None, "length")
    running.wait_until(lambda: server.pids("new"), 120, "the new model")
    running.wait_until(lambda: not set(changed) & set(server.pids("other") or changed), 120, "its successor")
    running.wait_until(lambda: len(running.descendants()) == 4, 60, "a front and three replicas")
    # On a busy machine, a replica may have been silent for a while.
    running.wait_until(lambda: server.pids("demo") == kept, 60, "the replica of demo to be unchanged")
    running.wait_until(lambda: [one.pid for one in server.status().fronts] == [front], 60, "only one front")
    for model in ("demo", "other", "new"):
        running.wait_until(lambda model=model: running.complete(model).status_code == 200, 120, model)
    with httpx.Client(timeout=600) as http:
        assert http.get(f"http://127.0.0.1:{port}/health/ready").status_code == 200
        with pytest.raises(httpx.ConnectError):
            http.get(f"http://{former}/health/ready")
    assert running.complete(prompt="x" * 1000).status_code == 413
    running.wait_until(lambda: not running.rows(state="open"), 60, "all rows to end")
    assert {row["status"] for row in running.rows()} <= {200, 413}
