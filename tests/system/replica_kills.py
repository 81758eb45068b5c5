"""Kills a model's replica with SIGKILL during a load, a prompt, a decode, a swap and a drain, while another
model serves: `python -m tests.system.replica_kills --rounds 20`.

After each kill, the operation must complete, the replica must restart by itself, every greedy stream must
have the tokens of an undisturbed run, and every request must have exactly one row in the request log. The
other model's streams must not be affected."""

from __future__ import annotations

import argparse
import random
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from appliance.actions.parameters import (
    AddModel,
    DrainService,
    LoadModel,
    ResumeService,
    RollbackModel,
    SetDefaultModel,
    UnloadModel,
)
from appliance.settings import demo_model_folder
from tests.checkpoints import write_constant_checkpoint
from tests.system.service import Service, service

STATES = ("load", "prompt", "decode", "swap", "drain")
WITHIN_S = 180.0
STREAMS = 4
TOKENS = 100
"""Number of tokens of each stream, except those with a long prompt."""
BYSTANDER_PAUSE_S = 1.0
"""Pause between two streams to the other model. Without a pause, they would use most of the CPU time."""
CONSTANT = 100
"""The token that version 2 of the model generates."""
PROMPT = [7, *((11 * place) % 4000 + 10 for place in range(1199))]
"""A prompt that takes the engine several steps when several requests send it, each with a different first
token."""
VERSION = {
    "kv_blocks": 200,
    "threads": 1,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 512,
    # The same prompts must be computed again in every round.
    "prefix_cache": False,
}
SETTINGS = f"""
# The window of the circuit breaker is too short to contain two kills.
[restarts]
window_s = 0.05

[models.other]
folder = "{demo_model_folder()}"
kv_blocks = 100
threads = 1
"""


class TokenStream(threading.Thread):
    """A client that reads the tokens of one greedy stream."""

    def __init__(self, running: Service, model: str, prompt: str | list[int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.token_ids: list[int] = []
        self.error: Exception | None = None
        self._running = running
        self._body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
        self.start()

    def run(self) -> None:
        try:
            with self._running.client(timeout=WITHIN_S) as client:
                options: Any = {**self._body, "stream": True}
                extra = {"ignore_eos": True, "return_token_ids": True}
                for chunk in client.completions.create(**options, extra_body=extra):
                    for choice in chunk.choices:
                        self.token_ids += (choice.model_extra or {}).get("token_ids") or ()
        except Exception as error:
            self.error = error

    def end(self) -> list[int]:
        """Wait until the stream has ended, and return its tokens."""
        self.join(WITHIN_S)
        assert not self.is_alive(), "a stream has not ended"
        assert self.error is None, self.error
        return self.token_ids


class Bystander(threading.Thread):
    """A client that sends streams to the model `other`, one at a time, and compares their tokens."""

    def __init__(self, running: Service) -> None:
        super().__init__(daemon=True)
        self.answers = 0
        self.failures: list[str] = []
        self._stopping = threading.Event()
        self._running = running
        self._expected = TokenStream(running, "other", "import ", 24).end()
        self.start()

    def run(self) -> None:
        while not self._stopping.is_set():
            stream = TokenStream(self._running, "other", "import ", 24)
            stream.join(WITHIN_S)
            self.answers += 1
            if stream.error is not None or stream.token_ids != self._expected:
                self.failures.append(f"{stream.error}, tokens {stream.token_ids}")
            self._stopping.wait(BYSTANDER_PAUSE_S)

    def stop(self) -> None:
        """Stop after the running stream has ended."""
        self._stopping.set()
        self.join(WITHIN_S)


class Kills:
    """A service with the model `other`, and the model `chat` with two versions of different checkpoints."""

    def __init__(self, running: Service, folder: Path) -> None:
        self.running = running
        self.kills = 0
        self._sent = 0
        self._draw = random.Random(0)
        constant = write_constant_checkpoint(folder / "constant", CONSTANT)
        for checkpoint in (demo_model_folder(), constant):
            running.act(AddModel(name="chat", folder=str(checkpoint), settings=VERSION))
        running.act(LoadModel(model="chat", wait=True))
        self._decode = next(stream.end() for stream in self._decodes(1))
        self._prompts = [stream.end() for stream in self._long_prompts()]
        assert len(self._decode) == TOKENS and len(set(self._decode)) > 10
        self._bystander = Bystander(running)
        self._sent += 1

    def close(self) -> None:
        """Check that `other` was not affected, and that every request has a row in the request log."""
        self._bystander.stop()
        assert not self._bystander.failures, self._bystander.failures[:3]
        (other,) = self._unit("other")["replicas"]
        assert other["restarts"] == 0
        self._check_rows(self._sent + self._bystander.answers)

    def kill_during(self, state: str) -> None:
        """Kill the replica in this state, and check the consequences."""
        {
            "load": self._kill_in_load,
            "prompt": self._kill_in_prompt,
            "decode": self._kill_in_decode,
            "swap": self._kill_in_swap,
            "drain": self._kill_in_drain,
        }[state]()
        self.running.wait_until(self._is_idle, WITHIN_S, f"the model to be idle after a kill in a {state}")
        assert not self._bystander.failures, self._bystander.failures[:3]

    # ── the states ──

    def _kill_in_load(self) -> None:
        loading = False
        while not loading:
            self.running.act(UnloadModel(model="chat", wait=True))
            with self._performed(LoadModel(model="chat", wait=True)):
                pid = self._wait_for_rank("chat@1")
                time.sleep(self._draw.uniform(0.0, 0.5))
                # On a busy machine, the load may be complete by now. A stopped rank cannot complete it.
                psutil.Process(pid).suspend()
                loading = self._unit("chat@1")["replicas"][0]["state"] in ("starting", "loading")
                streams = self._decodes(2)  # the streams wait in the front until the model is loaded
                self._kill(pid)
            self._expect_decodes(streams)

    def _kill_in_prompt(self) -> None:
        computing = False
        while not computing:
            pid, streams = self._wait_for_rank("chat@1"), self._long_prompts()
            self.running.wait_until(
                lambda streams=streams: (
                    self._replica()["running"] > 0 or all(stream.token_ids for stream in streams)
                ),
                WITHIN_S,
                "a prompt to be computed",
            )
            # On a busy machine, all prompts may have been computed by now. A stopped rank computes nothing.
            psutil.Process(pid).suspend()
            computing = not all(stream.token_ids for stream in streams)
            self._kill(pid)
            assert [stream.end() for stream in streams] == self._prompts

    def _kill_in_decode(self) -> None:
        streams = self._begun_decodes()
        self._kill(self._replica()["pids"][0])
        self._expect_decodes(streams)

    def _kill_in_swap(self) -> None:
        """Kill the replica of the new version while it loads, or the serving replica of the old version."""
        streams, old = self._begun_decodes(), self._replica()["pids"][0]
        with self._performed(SetDefaultModel(model="chat@2")):
            new_rank = self._wait_for_rank("chat@2")
            time.sleep(self._draw.uniform(0.0, 0.5))
            self._kill(self._draw.choice([new_rank, old]))
            with suppress(psutil.NoSuchProcess):
                psutil.Process(old).resume()
        new = self._sends([TokenStream(self.running, "chat", "import ", 8)])
        assert [stream.end() for stream in new] == [[CONSTANT] * 8]
        self._expect_decodes(streams)
        self.running.act(RollbackModel(name="chat"))

    def _kill_in_drain(self) -> None:
        """Kill the replica while an operator drains the model, or while the old version of a swap drains."""
        if self._draw.random() < 0.5:
            streams = self._begun_decodes()
            self.running.act(DrainService(model="chat@1", grace_s=WITHIN_S))
            self._kill(self._replica()["pids"][0])
            self._expect_decodes(streams)
            self.running.act(ResumeService(model="chat@1"))
            return
        self.running.act(LoadModel(model="chat@2", wait=True))
        streams = self._begun_decodes()
        self.running.act(SetDefaultModel(model="chat@2"))
        draining = self._unit("chat@1")
        assert draining is not None and any(stream.is_alive() for stream in streams), "nothing drains"
        self._kill(draining["replicas"][0]["pids"][0])
        self._expect_decodes(streams)
        self.running.act(RollbackModel(name="chat"))

    # ── helpers ──

    def _decodes(self, count: int) -> list[TokenStream]:
        return self._sends([TokenStream(self.running, "chat", "import ", TOKENS) for _ in range(count)])

    def _begun_decodes(self) -> list[TokenStream]:
        """Start streams, and suspend version 1's rank after their first tokens, so that they cannot end."""
        streams = self._decodes(STREAMS)
        self.running.wait_until(
            lambda: all(len(stream.token_ids) > 10 or stream.error for stream in streams),
            WITHIN_S,
            "the first tokens",
        )
        psutil.Process(self._replica()["pids"][0]).suspend()
        return streams

    def _expect_decodes(self, streams: list[TokenStream]) -> None:
        for stream in streams:
            assert stream.end() == self._decode

    def _long_prompts(self) -> list[TokenStream]:
        return self._sends(
            [TokenStream(self.running, "chat", [8 + number, *PROMPT], 8) for number in range(STREAMS)]
        )

    def _sends(self, streams: list[TokenStream]) -> list[TokenStream]:
        self._sent += len(streams)
        return streams

    @contextmanager
    def _performed(self, action: Any) -> Iterator[None]:
        """Perform an action in another thread. At the end of the block, wait for the action and check that it
        succeeded."""
        errors: list[Exception] = []

        def perform() -> None:
            try:
                self.running.act(action)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=perform, daemon=True)
        thread.start()
        yield
        thread.join(WITHIN_S)
        assert not thread.is_alive(), f"{action} has not ended"
        assert not errors, f"{action}: {errors}"

    def _kill(self, pid: int) -> None:
        # On a busy machine, the operation may have ended, and the service kills a rank that stays stopped.
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
        self.kills += 1

    def _unit(self, name: str) -> Any:
        """Return the status of a unit (a version of a model), or None if it is not loaded."""
        models = self.running.status()["models"]
        return next((model for model in models if model["name"] == name), None)

    def _replica(self) -> Any:
        """Return the status of version 1's replica."""
        return self._unit("chat@1")["replicas"][0]

    def _wait_for_rank(self, unit: str) -> int:
        """Wait until the process of a unit that is being loaded exists, and return its process id."""

        def look() -> int:
            found = self._unit(unit)
            return next((pid for one in found["replicas"] for pid in one["pids"]), 0) if found else 0

        pid: int = self.running.wait_until(look, WITHIN_S, f"the process of {unit}")
        return pid

    def _is_idle(self) -> bool:
        """Return whether only version 1 is loaded and no requests remain."""
        if self._unit("chat@2") is not None or (found := self._unit("chat@1")) is None:
            return False
        if len(found["replicas"]) != 1:
            return False
        (replica,) = found["replicas"]
        return (
            found["state"] == "ready"
            and replica["running"] == replica["waiting"] == replica["blocks_used"] == 0
            and replica["credit_seqs"] == replica["max_num_seqs"]
        )

    def _check_rows(self, count: int) -> None:
        def rows() -> list[dict[str, Any]]:
            found = self.running.rows(limit=100_000)
            return found if len([row for row in found if row["state"] == "ended"]) >= count else []

        found = self.running.wait_until(rows, WITHIN_S, f"{count} ended rows")
        assert len(found) == count and {row["state"] for row in found} == {"ended"}
        assert {(row["status"], row["finish_reason"], row["double_ends"]) for row in found} == {
            (200, "length", 0)
        }


@contextmanager
def kills() -> Iterator[Kills]:
    """Start a service. At the end of the block, all rows of its request log are checked."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "appliance.toml"
        config.write_text(SETTINGS)
        with service("--config", str(config)) as running:
            made = Kills(running, Path(folder))
            yield made
            made.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="how often each case runs (%(default)s)")
    rounds = parser.parse_args().rounds
    with kills() as running:
        for number in range(rounds):
            began = time.monotonic()
            for state in STATES:
                running.kill_during(state)
            print(f"round {number + 1}: {', '.join(STATES)} in {time.monotonic() - began:.1f} s", flush=True)
    print(f"{running.kills} kills: every stream had the expected tokens, and every request exactly one row")


if __name__ == "__main__":
    main()
