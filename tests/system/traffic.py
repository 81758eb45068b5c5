"""Helpers shared by tests of a running service: steady traffic, and a check of the audit trail."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from store.requests import RequestFilter, RequestReader
from tests.system.commands import run_appliance
from tests.system.service import Service


class Load(threading.Thread):
    """A client that sends one request after another until the test stops it."""

    def __init__(self, running: Service, key: str = "placeholder") -> None:
        super().__init__(daemon=True)
        self.request_ids: list[str] = []
        self.errors: list[Exception] = []
        self._running, self._key = running, key
        self._told = threading.Event()

    def run(self) -> None:
        with self._running.client().with_options(api_key=self._key) as client:
            while not self._told.is_set():
                try:
                    answer = client.completions.create(model="demo", prompt="x = ", max_tokens=4)
                    self.request_ids.append(answer.id.removeprefix("cmpl-"))
                except Exception as error:
                    self.errors.append(error)
                    return

    def end(self) -> None:
        """Stop the client, and check that every request was answered."""
        self._told.set()
        self.join(300)
        assert not self.is_alive() and self.errors == []


def verify(state_dir: Path, *words: str) -> Any:
    """Return the report and exit code of `appliance audit verify`."""
    done = run_appliance("audit", "verify", "--state-dir", state_dir, "--json", *words)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout) | {"code": done.returncode}


def ended(running: Service) -> set[str]:
    """Return the ids of all requests with closed rows."""
    reader = RequestReader(running.state_dir / "history.db")
    return {row.request_id for row in reader.query(RequestFilter(state="ended"), 100_000)}
