"""Tests that a real service adds a replica under load and removes it afterwards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from appliance.settings import demo_model_folder
from tests.system.replica_kills import TokenStream
from tests.system.service import Service, service

pytestmark = pytest.mark.system

SETTINGS = f"""
[autoscaling]
cooldown_s = 1
idle_s = 5
[models.demo]
folder = "{demo_model_folder()}"
kv_blocks = 50
threads = 1
max_num_seqs = 4
max_replicas = 2
"""


TOKENS = 100
"""Length of each answer. With short answers, a busy machine would spend more time in the clients than in the
service, and one replica would be enough."""


class Clients:
    """Clients that send one stream after another."""

    def __init__(self, running: Service, count: int) -> None:
        self.answers, self.failures = 0, list[str]()
        self._running = running
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(180)

    def _run(self) -> None:
        while not self._stopping.is_set():
            stream = TokenStream(self._running, "demo", "import ", TOKENS)
            stream.join(180)
            self.answers += 1
            if stream.error is not None or len(stream.token_ids) != TOKENS:
                self.failures.append(f"{stream.error}, {len(stream.token_ids)} tokens")


def test_a_replica_is_added_under_load_and_removed_again_without_a_failed_request(tmp_path: Path) -> None:
    config = tmp_path / "appliance.toml"
    config.write_text(SETTINGS)
    with service("--config", str(config)) as running:

        def model() -> Any:
            return running.status()["models"][0]

        def has(count: int) -> bool:
            return [one["state"] for one in model()["replicas"]] == ["ready"] * count

        assert has(1) and model()["scaling"]["replicas"] == 1
        clients = Clients(running, 6)

        def second_ready() -> str:
            ready = [one["name"] for one in model()["replicas"] if one["state"] == "ready"]
            return ready[1] if len(ready) == 2 else ""

        second = running.wait_until(second_ready, 120, "the second replica")
        running.wait_until(
            lambda: any(row["replica"] == second for row in running.rows()),
            120,
            "an answer of the second replica",
        )
        clients.stop()
        running.wait_until(lambda: has(1), 120, "the end of the second replica")
        assert clients.answers > 12 and not clients.failures
        changes = model()["scaling"]["changes"]
        assert [(one["former"], one["replicas"]) for one in changes] == [(2, 1), (1, 2)]
        assert "has needed at most" in changes[0]["reason"] and changes[1]["reason"]
        log = running.log_path.read_text()
        assert "model demo: 1 → 2 replicas: " in log and "model demo: 2 → 1 replicas: " in log
