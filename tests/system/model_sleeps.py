"""Repeatedly puts a model of a running service to sleep and wakes it: `python -m tests.system.model_sleeps
--rounds 50`. Checks the tokens, and that no process leaks memory, descriptors or threads."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import psutil

from appliance.actions.parameters import AddModel, LoadModel, SleepModel, WakeModel
from appliance.client import AdminClient
from tests.checkpoints import write_constant_checkpoint
from tests.system.model_swaps import is_rank
from tests.system.service import CALL_TIMEOUT_S, Service, service
from tests.system.usage import Usage, usage_of

TOKEN = 100
MAX_GROWTH_MB = 20.0
"""Allowed growth of a process's memory in MB after the first ten rounds. The caches of the interpreter and of
malloc grow by less. A single leaked KV cache would be several times as large."""


class Sleeps:
    """A service with a model that has a KV cache of up to 64 MiB."""

    def __init__(self, running: Service, folder: Path) -> None:
        self.running = running
        checkpoint = write_constant_checkpoint(folder / "chat", TOKEN)
        settings = {"kv_blocks": 2000, "threads": 1, "max_num_seqs": 16}
        self.act(AddModel(name="chat", folder=str(checkpoint), settings=settings))
        self.act(LoadModel(model="chat", wait=True))

    def act(self, action: Any) -> Any:
        return self.running.act(action)

    def state(self) -> str:
        with AdminClient(self.running.run_dir, CALL_TIMEOUT_S) as client:
            [model] = client.models()
        return model.state

    def tokens(self) -> list[int]:
        """Return the tokens of an answer."""
        answer = self.running.complete("chat", prompt="import " * 100, max_tokens=8, return_token_ids=True)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def rank(self) -> psutil.Process:
        """Return the only rank."""
        [rank] = [process for process in self.running.descendants() if is_rank(process)]
        return rank

    def usage(self) -> dict[int, Usage]:
        """Return the resource use of the core, the fronts and the rank, by process id."""
        processes = [psutil.Process(self.running.process.pid), *self.running.descendants()]
        return {process.pid: usage_of(process) for process in processes}

    def rounds(self, count: int) -> None:
        """Sleep and wake `count` times. Raises AssertionError if the answers change."""
        for _ in range(count):
            assert self.act(SleepModel(model="chat", wait=True)).state == "sleeping"
            assert self.act(WakeModel(model="chat", wait=True)).state == "ready"
            assert self.tokens() == [TOKEN] * 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=50)
    rounds = max(11, parser.parse_args().rounds)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "appliance.toml"
        config.write_text("fronts = 2\n[models]\n")
        with service("--config", str(config), kind=Service) as running:
            sleeps = Sleeps(running, Path(folder))
            sleeps.rounds(10)
            before = sleeps.usage()
            sleeps.rounds(rounds - 10)
            after = sleeps.usage()
    assert before.keys() == after.keys(), "a process was replaced"
    for pid, now in after.items():
        was = before[pid]
        print(
            f"process {pid}: {was.rss_mb:.0f} → {now.rss_mb:.0f} MB, {was.descriptors} → {now.descriptors} "
            f"descriptors, {was.threads} → {now.threads} threads"
        )
        assert now.rss_mb - was.rss_mb < MAX_GROWTH_MB, "memory grows"
        assert now.descriptors <= was.descriptors + 2, "descriptors are not closed"
        assert now.threads <= was.threads + 2, "threads do not end"
    print(f"{rounds} rounds of sleep and wake: the same tokens, nothing left behind")


if __name__ == "__main__":
    main()
