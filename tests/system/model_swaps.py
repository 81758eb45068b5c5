"""Changes the version that answers for a name while streams run, and checks every answer: `python -m
tests.system.model_swaps --rounds 20`.

The two checkpoints answer with different tokens. A request that begins after a change was acknowledged must
be answered by the new version only, and no request may fail.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from appliance.actions import AddModel, LoadModel, RollbackModel, SetAlias, SetDefaultModel
from appliance.client import AdminClient
from tests.checkpoints import write_constant_checkpoint
from tests.system.service import Service, service

TOKENS = {1: 100, 2: 200}
"""The token that each version generates."""
STREAMS = 32
MAX_TOKENS = 24
SETTINGS = {"kv_blocks": 200, "threads": 1, "max_num_seqs": STREAMS}
WITHIN_S = 180.0


def is_rank(process: psutil.Process) -> bool:
    """Return whether this process is a rank of a replica. It may have ended in the meantime."""
    try:
        return "engine.replica" in process.cmdline()
    except psutil.Error:
        return False


class Streams:
    """Clients that send one stream after another to a name, and check each answer."""

    def __init__(self, running: Service, name: str, count: int = STREAMS) -> None:
        self.acknowledged = 1
        """The version that every new request must get, unless a change is in progress."""
        self.changing = False
        self.changes = 0
        """Number of changes that have begun."""
        self.answers = 0
        self.checked = 0
        """Number of answers whose version was certain."""
        self.failures: list[str] = []
        self._running = running
        self._name = name
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def change(self, version: int, act: Callable[[], Any]) -> None:
        """Perform an operation that makes `version` answer the requests."""
        self.changing, self.changes = True, self.changes + 1
        act()
        self.acknowledged, self.changing = version, False

    def wait_for_answers(self, count: int) -> None:
        """Wait until this many further answers are complete whose requests began after the latest change."""
        wanted, deadline = self.checked + count, time.monotonic() + WITHIN_S
        while self.checked < wanted and not self.failures:
            assert time.monotonic() < deadline, f"fewer than {count} answers in {WITHIN_S} s"
            time.sleep(0.02)

    def stop(self) -> None:
        """Let the running streams end."""
        self._stop.set()
        for thread in self._threads:
            thread.join(WITHIN_S)

    def _run(self) -> None:
        with self._running.client(timeout=WITHIN_S) as client:
            while not self._stop.is_set():
                changes, version, was_changing = self.changes, self.acknowledged, self.changing
                try:
                    tokens = self._answer(client)
                except Exception as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    return
                # A request during which a change has begun may be answered by either version.
                checked = not was_changing and self.changes == changes
                self._check(tokens, version if checked else None)
                self.checked += checked
                self.answers += 1

    def _answer(self, client: Any) -> list[int]:
        chunks = client.completions.create(
            model=self._name,
            prompt="import ",
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return [
            token
            for chunk in chunks
            for choice in chunk.choices
            for token in (choice.model_extra or {}).get("token_ids") or ()
        ]

    def _check(self, tokens: list[int], version: int | None) -> None:
        """Check that an answer is complete and comes from one version: from `version`, unless it is None."""
        if len(tokens) != MAX_TOKENS or len(set(tokens)) != 1:
            self.failures.append(f"an answer has the tokens {tokens}")
        elif version is not None and tokens[0] != TOKENS[version]:
            self.failures.append(f"a request that began with version {version} got token {tokens[0]}")


class Swaps:
    """A service with two versions of a model."""

    def __init__(self, running: Service, folder: Path) -> None:
        self.running = running
        for token in TOKENS.values():
            checkpoint = write_constant_checkpoint(folder / f"chat-{token}", token)
            self.act(AddModel(name="chat", folder=str(checkpoint), settings=SETTINGS))
        self.act(LoadModel(model="chat", wait=True))

    def act(self, action: Any) -> Any:
        with AdminClient(self.running.run_dir) as client:
            return client.act(action)

    def loaded(self) -> list[tuple[int, str]]:
        """Return the versions that occupy memory, and their states."""
        with AdminClient(self.running.run_dir) as client:
            [model] = client.models()
        return [(one.version, one.state) for one in model.versions if one.replicas]

    def wait_for_one(self, version: int) -> None:
        """Wait until only this version occupies memory."""
        self.running.wait_until(
            lambda: self.loaded() == [(version, "ready")], WITHIN_S, f"only version {version} to be loaded"
        )
        self.running.wait_until(
            lambda: sum(map(is_rank, self.running.descendants())) == 1, WITHIN_S, "only one rank to run"
        )

    def swap_and_roll_back(self, rounds: int, streams: int = STREAMS) -> int:
        """Swap the versions and roll back, `rounds` times each, under streams. Return the number of answers.
        Raises AssertionError if a request failed or was answered by the wrong version."""
        clients = Streams(self.running, "chat", streams)
        try:
            for _ in range(rounds):
                clients.change(2, lambda: self.act(SetDefaultModel(model="chat@2")))
                clients.wait_for_answers(streams)
                self.wait_for_one(2)
                clients.change(1, lambda: self.act(RollbackModel(name="chat")))
                clients.wait_for_answers(streams)
                self.wait_for_one(1)
        finally:
            clients.stop()
        assert not clients.failures, clients.failures[:5]
        return clients.answers

    def change_alias(self, rounds: int, streams: int = STREAMS) -> int:
        """Let an alias name the two versions in turn under streams. Return the number of answers."""
        self.act(LoadModel(model="chat@2", wait=True))
        self.act(SetAlias(name="assistant", target="chat@1"))
        clients = Streams(self.running, "assistant", streams)
        try:
            for _ in range(rounds):
                for version in (2, 1):
                    action = SetAlias(name="assistant", target=f"chat@{version}")
                    clients.change(version, partial(self.act, action))
                    clients.wait_for_answers(streams)
        finally:
            clients.stop()
        assert not clients.failures, clients.failures[:5]
        return clients.answers


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "appliance.toml"
        config.write_text("fronts = 2\n[models]\n")
        with service("--config", str(config)) as running:
            swaps = Swaps(running, Path(folder))
            print(f"{rounds} swaps and rollbacks: {swaps.swap_and_roll_back(rounds)} answers, 0 failed")
            print(f"{2 * rounds} changes of an alias: {swaps.change_alias(rounds)} answers, 0 failed")


if __name__ == "__main__":
    main()
