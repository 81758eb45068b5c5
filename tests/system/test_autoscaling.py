"""Tests that a real service adds a replica under a recorded load and removes it afterwards."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from appliance.settings import demo_model_folder
from tests.models.simulated_scaling import recorded_shares
from tests.system.replica_kills import TokenStream
from tests.system.service import Service, service

pytestmark = pytest.mark.system

TTFT_TARGET_S = 20.0
"""Target for the time to first token, in seconds. It is generous, because a busy machine needs seconds for an
answer."""
SETTINGS = f"""
[autoscaling]
cooldown_s = 1
idle_s = 8
[models.demo]
folder = "{demo_model_folder()}"
kv_blocks = 50
threads = 1
max_num_seqs = 4
max_replicas = 2
ttft_target_s = {TTFT_TARGET_S}
"""

TOKENS = 100
"""Length of each answer. With short answers, a busy machine would spend more time in the clients than in the
service, and one replica would be enough."""
CLIENTS = 6
"""Number of clients at the peak of the recorded load: one and a half times as many as one replica serves."""
POINTS, POINT_S = 58, 0.4
"""Number of points, and duration of each point in seconds. The recording of 58 minutes is replayed in 23 s,
so each point is the mean of one minute."""


class Clients:
    """Clients that send one stream after another. The recorded load sets the number of clients rather than a
    request rate, so the load on the replicas does not depend on the machine's speed."""

    def __init__(self, running: Service) -> None:
        self.answers, self.failures = 0, list[str]()
        self._running = running
        self._wanted = 0
        self._ended = threading.Event()

    def replay(self) -> None:
        """Run clients according to the recorded load, and wait for the last answer."""
        threads = [threading.Thread(target=self._run, args=(one,), daemon=True) for one in range(CLIENTS)]
        for thread in threads:
            thread.start()
        for share in recorded_shares(POINTS):
            self._wanted = round(share * CLIENTS)
            time.sleep(POINT_S)
            if share == 1.0:
                # On a slow machine, the load would otherwise fall before the second replica is ready.
                self._running.wait_until(lambda: has(self._running, 2), 300, "the second replica")
        self._ended.set()
        for thread in threads:
            thread.join(180)
            assert not thread.is_alive(), "a stream has not ended"

    def _run(self, number: int) -> None:
        while not self._ended.is_set():
            if number >= self._wanted:
                self._ended.wait(0.05)
                continue
            stream = TokenStream(self._running, "demo", "import ", TOKENS)
            stream.join(180)
            self.answers += 1
            if stream.error is not None or len(stream.token_ids) != TOKENS:
                self.failures.append(f"{stream.error}, {len(stream.token_ids)} tokens")


def has(running: Service, count: int) -> bool:
    """Return whether the model has this number of replicas and all of them are ready."""
    return [one["state"] for one in running.status()["models"][0]["replicas"]] == ["ready"] * count


def test_a_recorded_load_adds_a_replica_and_removes_it_once_and_no_request_fails(
    tmp_path: Path,
) -> None:
    config = tmp_path / "appliance.toml"
    config.write_text(SETTINGS)
    with service("--config", str(config)) as running:

        def model() -> Any:
            return running.status()["models"][0]

        assert has(running, 1) and model()["scaling"]["replicas"] == 1
        clients = Clients(running)
        clients.replay()
        running.wait_until(lambda: has(running, 1), 300, "the end of the second replica")
        assert clients.answers > 12 and not clients.failures
        changes = model()["scaling"]["changes"]
        assert [(one["former"], one["replicas"]) for one in changes] == [(2, 1), (1, 2)]
        assert "has needed at most" in changes[0]["reason"] and changes[1]["reason"]
        log = running.log_path.read_text()
        assert "model demo: 1 → 2 replicas: " in log and "model demo: 2 → 1 replicas: " in log
        rows = running.rows(state="ended")
        assert {row["replica"] for row in rows} == {"demo-0", "demo-1"}
        waits_s = sorted((row["queue_ms"] or 0.0) / 1000 for row in rows)
        assert waits_s[int(0.99 * len(waits_s))] < TTFT_TARGET_S
