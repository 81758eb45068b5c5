"""Changes the version that answers requests for a name while streams run, and checks every answer: `python -m
tests.system.model_swaps --rounds 20`.

The two checkpoints answer with different tokens. A request that begins after a change has been acknowledged
must be answered by one of the versions that are active after the change, and no request may fail. While a
split is unchanged, the same user gets the same version.
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

from appliance.actions.parameters import (
    AddModel,
    LoadModel,
    RollbackModel,
    SetAlias,
    SetDefaultModel,
    SplitModel,
    UnloadModel,
)
from appliance.client import AdminClient
from tests.checkpoints import write_constant_checkpoint
from tests.system.service import CALL_TIMEOUT_S, Service, service

TOKENS = {1: 100, 2: 200}
"""The token that each version generates."""
STREAMS = 32
MAX_TOKENS = 24
SETTINGS = {"kv_blocks": 200, "threads": 1, "max_num_seqs": STREAMS}
WITHIN_S = 180.0


def is_rank(process: psutil.Process) -> bool:
    """Return whether this process is a rank of a replica. The process may already have ended."""
    try:
        return "engine.replica" in process.cmdline()
    except psutil.Error:
        return False


class Streams:
    """Clients that send one stream after another to a name, and check each answer."""

    def __init__(self, running: Service, name: str, count: int) -> None:
        self.acknowledged = frozenset({1})
        """The versions that may answer new requests, unless a change is in progress."""
        self.changing = False
        self.changes = 0
        """Number of changes that have begun."""
        self.answers = 0
        self.checked = 0
        """Number of answers that began and ended between the same two changes."""
        self.seen: set[int] = set()
        """Versions that have given such undisturbed answers since the latest change."""
        self._lock = threading.Lock()
        """Protects the attributes above."""
        self.failures: list[str] = []
        self._running = running
        self._name = name
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._run, args=(f"user-{number}",), daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def change(self, act: Callable[[], Any], *versions: int) -> None:
        """Perform an operation that makes these versions answer the requests."""
        with self._lock:
            self.changing, self.changes = True, self.changes + 1
        act()
        with self._lock:
            self.seen = set()
            self.acknowledged, self.changing = frozenset(versions), False

    def wait_for_answers(self, count: int) -> None:
        """Wait for this many more complete answers to requests that began after the latest change."""
        wanted, deadline = self.checked + count, time.monotonic() + WITHIN_S
        while self.checked < wanted and not self.failures:
            assert time.monotonic() < deadline, f"fewer than {count} answers in {WITHIN_S} s"
            time.sleep(0.02)

    def wait_for_versions(self, *versions: int) -> None:
        """Wait until each of these versions has answered since the latest change."""
        deadline = time.monotonic() + WITHIN_S
        while self.seen != set(versions) and not self.failures:
            assert time.monotonic() < deadline, f"only versions {self.seen} answered in {WITHIN_S} s"
            time.sleep(0.02)

    def stop(self) -> None:
        """Stop after the running streams have ended."""
        self._stop.set()
        for thread in self._threads:
            thread.join(WITHIN_S)

    def _run(self, user: str) -> None:
        former = (-1, 0)
        with self._running.client(timeout=WITHIN_S) as client:
            while not self._stop.is_set():
                with self._lock:
                    changes, versions, was_changing = self.changes, self.acknowledged, self.changing
                try:
                    tokens = self._answer(client, user)
                except Exception as error:
                    self.failures.append(f"{type(error).__name__}: {error}")
                    return
                version = self._version(tokens)
                with self._lock:
                    # If a change began during a request, either version may answer it.
                    if not was_changing and self.changes == changes:
                        if version not in versions:
                            self.failures.append(f"a request after change {changes} got version {version}")
                        if former[0] == changes and former[1] != version:
                            self.failures.append(f"{user} got versions {former[1]} and {version}")
                        former = changes, version
                        self.seen.add(version)
                        self.checked += 1
                    self.answers += 1

    def _answer(self, client: Any, user: str) -> list[int]:
        chunks = client.completions.create(
            model=self._name,
            prompt="import ",
            max_tokens=MAX_TOKENS,
            temperature=0,
            stream=True,
            user=user,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        return [
            token
            for chunk in chunks
            for choice in chunk.choices
            for token in (choice.model_extra or {}).get("token_ids") or ()
        ]

    def _version(self, tokens: list[int]) -> int:
        """Check that an answer is complete and comes from a single version, and return that version."""
        for version, token in TOKENS.items():
            if tokens == [token] * MAX_TOKENS:
                return version
        self.failures.append(f"the tokens of an answer are those of neither version: {tokens}")
        return 0


class Swaps:
    """A service with two versions of a model, and the number of streams that run during the changes."""

    def __init__(self, running: Service, folder: Path, streams: int = STREAMS) -> None:
        self.running = running
        self.streams = streams
        for token in TOKENS.values():
            checkpoint = write_constant_checkpoint(folder / f"chat-{token}", token)
            self.act(AddModel(name="chat", folder=str(checkpoint), settings=SETTINGS))
        self.act(LoadModel(model="chat", wait=True))

    def act(self, action: Any) -> Any:
        return self.running.act(action)

    def loaded(self) -> list[tuple[int, str]]:
        """Return the versions that occupy memory, and their states."""
        with AdminClient(self.running.run_dir, CALL_TIMEOUT_S) as client:
            [model] = client.models()
        return [(one.version, one.state) for one in model.versions if one.replicas]

    def wait_for_one(self, version: int) -> None:
        """Wait until only this version occupies memory."""
        self.running.wait_until(
            lambda: self.loaded() == [(version, "ready")],
            WITHIN_S,
            f"version {version} to be the only loaded one",
        )
        self.running.wait_until(
            lambda: sum(map(is_rank, self.running.descendants())) == 1, WITHIN_S, "only one rank to run"
        )

    def swap_and_roll_back(self, rounds: int) -> int:
        """Swap the versions and roll back, `rounds` times each, while streams run. Return the number of
        answers. Raises AssertionError if a request fails or the wrong version answers it."""
        clients = Streams(self.running, "chat", self.streams)
        try:
            for _ in range(rounds):
                clients.change(lambda: self.act(SetDefaultModel(model="chat@2")), 2)
                clients.wait_for_answers(self.streams)
                self.wait_for_one(2)
                clients.change(lambda: self.act(RollbackModel(name="chat")), 1)
                clients.wait_for_answers(self.streams)
                self.wait_for_one(1)
        finally:
            clients.stop()
        assert not clients.failures, clients.failures[:5]
        return clients.answers

    def change_alias(self, rounds: int) -> int:
        """Point an alias at the two versions in turn while streams run. Return the number of answers."""
        self.act(LoadModel(model="chat@2", wait=True))
        self.act(SetAlias(name="assistant", target="chat@1"))
        clients = Streams(self.running, "assistant", self.streams)
        try:
            for _ in range(rounds):
                for version in (2, 1):
                    action = SetAlias(name="assistant", target=f"chat@{version}")
                    clients.change(partial(self.act, action), version)
                    clients.wait_for_answers(self.streams)
        finally:
            clients.stop()
        assert not clients.failures, clients.failures[:5]
        return clients.answers

    def change_split(self, rounds: int) -> int:
        """Change the weights of two versions in a split while streams run: add each version to the split and
        remove it again in turn. Afterwards, end the split and unload version 2. Return the number of
        answers."""
        self.act(LoadModel(model="chat@2", wait=True))
        clients = Streams(self.running, "chat", self.streams)
        try:
            for _ in range(rounds):
                for weights in ({"1": 50.0, "2": 50.0}, {"2": 1.0}, {"1": 70.0, "2": 30.0}, {"1": 1.0}):
                    action = SplitModel(name="chat", weights=weights)
                    clients.change(partial(self.act, action), *map(int, weights))
                    clients.wait_for_answers(self.streams)
                    clients.wait_for_versions(*map(int, weights))
            clients.change(partial(self.act, SplitModel(name="chat", weights=None)), 1)
            clients.wait_for_answers(self.streams)
            self.act(UnloadModel(model="chat@2", wait=True))
            self.wait_for_one(1)
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
            print(f"{4 * rounds} changes of a split: {swaps.change_split(rounds)} answers, 0 failed")


if __name__ == "__main__":
    main()
