"""A replica without an engine. It implements a rank's protocol and generates one token every 10 ms for each
sample. While it has no request, its steps are longer.

A file `fake.json` in the model's folder determines the replica's behaviour. With {"fatal": [kind, message]},
it reports a fatal error. With {"exit": code}, it exits. With {"hang": true}, it stops sending messages while
it loads, until "hang" is removed from the file. With {"child": true}, it starts a process that survives it,
and writes that process's id to the file `child`. A file named `step.json`, such as {"announced_s": 2.0},
makes the next step long. When the step begins, the file is renamed `step.running`, and the step ends when the
file is deleted.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from engine.client import Channel
from engine.levels import LEVELS
from engine.messages import Cancel, DataInbound, Output, ReplicaInfo, ReplicaSpec, StepFrame, Submit
from engine.rank_messages import (
    AskBlocks,
    Attach,
    BlockOwner,
    BlockUse,
    CancelSequences,
    Fatal,
    Finished,
    LongStep,
    Progress,
    RankInbound,
    Ready,
    Report,
    Start,
)

STEP_S = 0.01
IDLE_STEP_S = 0.1


class Running:
    def __init__(self, front: str, submit: Submit) -> None:
        self.front = front
        self.submit = submit
        self.made = len(submit.output_token_ids)
        self.cancelled = False


class FakeReplica:
    def __init__(self, control: Channel[RankInbound]) -> None:
        self.control = control
        self.fronts: dict[str, Channel[DataInbound]] = {}
        self.running: list[Running] = []
        self.slots = 0
        self.returned_seqs, self.returned_tokens = [0] * LEVELS, [0] * LEVELS
        self.tokens = 0
        self.steps = 0
        self.closed_fronts: list[str] = []
        self.finished: list[Finished] = []
        self.folder = Path()

    def hear(self, message: RankInbound) -> None:
        if isinstance(message, Start):
            self.start(message.spec)
        elif isinstance(message, Attach):
            channel: Channel[DataInbound] = Channel(socket.socket(fileno=self.control.take_fd()), DataInbound)
            name = message.front
            self.fronts[name] = channel
            channel.listen(lambda said: self.take(name, said), lambda: self.front_disconnected(name))
        elif isinstance(message, CancelSequences):
            for run in self.running:
                run.cancelled |= run.submit.request_id == message.request_id
        elif isinstance(message, AskBlocks):
            names = dict.fromkeys(run.submit.request_id for run in self.running)
            states = bytes([2] * len(names) + [1])
            owners = b"".join(number.to_bytes(2, "little") for number in range(len(names)))
            requests = [BlockOwner(name, 1, 0) for name in names]
            self.control.send(
                BlockUse(1, states, bytes(len(states)), owners + (0xFFFF).to_bytes(2, "little"), requests)
            )
        else:
            os._exit(0)

    def start(self, spec: ReplicaSpec) -> None:
        self.folder = Path(spec.model_path)
        self.control.send(Progress("read", 1 << 20, 2 << 20, "bytes", "model.safetensors"))
        script = Path(spec.model_path) / "fake.json"
        while "hang" in (does := said(script)):
            time.sleep(0.05)  # A replica that hangs does not read messages, like a rank that is loading.
        if does.pop("child", False):
            child = subprocess.Popen(["sleep", "600"])
            (self.folder / "child").write_text(str(child.pid))
        if "fatal" in does:
            self.control.send(Fatal(*does["fatal"]))
        if does:
            os._exit(does.get("exit", 1))
        self.slots, self.tokens = spec.max_num_seqs, 2 * spec.max_num_batched_tokens
        self.control.send(Ready(info(spec)))
        asyncio.get_running_loop().create_task(self.step())

    def long_step(self) -> None:
        """If `step.json` exists, announce a long step and then block until it ends without sending
        anything."""
        long, running = said(self.folder / "step.json"), self.folder / "step.running"
        if long:
            self.control.send(LongStep(long["announced_s"]))
            (self.folder / "step.json").rename(running)
            while running.exists():
                time.sleep(0.05)

    def take(self, front: str, message: DataInbound) -> None:
        if isinstance(message, Submit):
            self.running.append(Running(front, message))
        elif isinstance(message, Cancel):
            for run in self.running:
                run.cancelled |= run.front == front and run.submit.handle == message.handle

    def front_disconnected(self, front: str) -> None:
        del self.fronts[front]
        for run in [run for run in self.running if run.front == front]:
            self.end(run, "cancelled")
        self.closed_fronts.append(front)

    def end(self, run: Running, how: str) -> None:
        self.running.remove(run)
        submit = run.submit
        self.slots += submit.n
        self.tokens += submit.credit_tokens
        self.returned_seqs[submit.level] += submit.n
        self.returned_tokens[submit.level] += submit.credit_tokens
        made = (run.made - len(submit.output_token_ids)) * submit.n
        self.finished.append(
            Finished(
                submit.request_id,
                submit.index,
                submit.first_sample,
                submit.prompt_tokens,
                0,
                made,
                0,
                len(self.running) + 1,
                [how] * submit.n,
                submit.credit_tokens,
            )
        )

    async def step(self) -> None:
        while True:
            self.steps += 1
            self.long_step()
            frames: dict[str, list[Output]] = {}
            for run in list(self.running):
                submit = run.submit
                run.made += 1
                done = run.made >= submit.sampling.max_tokens
                how = "cancelled" if run.cancelled else "length" if done else ""
                for sample in range(submit.first_sample, submit.first_sample + submit.n):
                    frames.setdefault(run.front, []).append(Output(submit.handle, sample, [run.made], how))
                if how:
                    self.end(run, how)
            for front, outputs in frames.items():
                if front in self.fronts:
                    self.fronts[front].send(StepFrame(self.steps, outputs))
            self.control.send(
                Report(
                    step=self.steps,
                    credit_seqs=self.slots,
                    credit_tokens=self.tokens,
                    returned_seqs=tuple(self.returned_seqs),
                    returned_tokens=tuple(self.returned_tokens),
                    finished=self.finished,
                    disconnected_fronts=self.closed_fronts,
                    running=len(self.running),
                )
            )
            self.finished, self.closed_fronts = [], []
            await asyncio.sleep(STEP_S if self.running else IDLE_STEP_S)


def said(script: Path) -> dict[str, Any]:
    """Read from `fake.json` how the fake replica must behave while it loads."""
    try:
        found: dict[str, Any] = json.loads(script.read_text())
    except FileNotFoundError:
        return {}
    return found


def info(spec: ReplicaSpec) -> ReplicaInfo:
    known: dict[str, Any] = {
        "replica": spec.replica,
        "max_num_seqs": spec.max_num_seqs,
        "max_num_batched_tokens": spec.max_num_batched_tokens,
        "devices": ["fake"] * spec.tensor_parallel_size,
        "tensor_parallel_size": spec.tensor_parallel_size,
        "load_seconds": 0.1,
    }
    texts = dict.fromkeys(("model_type", "backend", "collectives"), "fake")
    texts |= dict.fromkeys(("dtype", "weights", "kv_cache_dtype"), "float32")
    numbers = dict.fromkeys(ReplicaInfo.__struct_fields__, 100)
    return ReplicaInfo(**(numbers | texts | known))


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--channel", type=int)
    descriptor = parser.parse_args().channel
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    control: Channel[RankInbound] = Channel(socket.socket(fileno=descriptor), RankInbound)
    control.listen(FakeReplica(control).hear, lambda: os._exit(0))
    await asyncio.Event().wait()


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
