"""Kills or stops a replica's ranks while they are idle, during a prompt and during a decode. `python -m
tests.system.rank_faults` runs every case many times, and `tests.system.test_rank_faults` runs some cases
once.

After each fault, all ranks must exit, the replica must restart by itself, and streams must continue with the
same greedy tokens. No process, shared memory, descriptor or GPU memory may be left behind.

    python -m tests.system.rank_faults                                  # two ranks on the CPU
    python -m tests.system.rank_faults --device cuda --ranks 4 --both --rounds 2

On GPUs, the model is a small one with random weights, whose messages fit into peer memory. A resubmitted
request computes its earlier tokens in one pass, which rounds differently. Its tokens may therefore differ
from those of an undisturbed stream from a position where the two best tokens are almost equally likely.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from appliance.models.gpus import find_gpus
from appliance.settings import demo_model_folder
from tests.system.attacks.reading import configured
from tests.system.service import Service
from tests.system.test_deaths import Stream, answer, wait_exited

DEATH_LIMIT_S = 1.0
STOP_LIMIT_S = 5.0
"""Time limits, in seconds, within which the other ranks must notice that a rank was killed or stopped."""
STATES = ("idle", "prompt", "decode")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
FLAGS = ("--tensor-parallel-size", "2")
SETTINGS = "[restarts]\nmax_deaths = 1000\n"
"""The circuit breaker must not open, although the faults follow each other quickly."""
GPU_SHAPE = {"hidden_size": 512, "num_key_value_heads": 2, "max_position_embeddings": 8192}
"""Fields of the model on GPUs that differ from the demo model's `config.json`."""
_MODEL = """
[models.demo]
folder = "{folder}"
# Repeated prompts must be computed again.
prefix_cache = false
"""
CPU_SETTINGS = SETTINGS + _MODEL.format(folder=demo_model_folder())
GPU_SETTINGS = f"""{_MODEL}
load_format = "dummy"
max_num_seqs = 16
max_num_batched_tokens = 128
kv_blocks = 2048
"""
NEAR_TIE = 0.125
"""Maximum difference of the log probabilities of two tokens that may be exchanged on GPUs, as in
`tests.gpu.test_ranks_on_gpu`."""
MAX_LEFT_BYTES = 64 << 20
"""Allowed growth, in bytes, of the memory in use on a GPU. The memory in use varies by less between two
starts of the same replica."""
_NOTICED = re.compile(r"^(\S+)Z .*(?:restart the whole replica|this rank exits)", re.MULTILINE)
"""Matches a line in which a rank logs that it has noticed the loss of another rank, and captures the time of
the line."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests during which ranks are killed or stopped."""

    prompts: int = 4
    prompt_tokens: int = 1200
    """Number of tokens in each prompt. Together, the prompts need several engine steps."""
    decode_tokens: int = 120
    near_tie: float = 0.0
    """Difference of log probabilities up to which a token may differ from that of an undisturbed stream."""


ON_CPU = Traffic()
ON_GPU = Traffic(prompts=16, prompt_tokens=6000, decode_tokens=4000, near_tie=NEAR_TIE)
"""The traffic on GPUs. GPUs are faster, so the requests must be longer."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The streams of an undisturbed run, with which the streams of disturbed runs are compared."""

    traffic: Traffic
    decode: Stream
    prompts: list[Stream]


@dataclass(frozen=True, slots=True)
class Took:
    """Times of a fault, in seconds."""

    noticed: float
    """Time until a rank logged the loss of another rank. Idle ranks may exit without logging it; in that
    case, the value equals `exited`."""
    exited: float
    """Time until every rank had exited."""


@dataclass(frozen=True, slots=True)
class Left:
    """Counts of the service's resources. They must not grow from one fault to the next."""

    processes: int
    shared_memory: frozenset[str]
    rendezvous_folders: int
    descriptors: int
    gpu_bytes: tuple[int, ...]
    """Memory in use on each GPU."""

    def allows(self, after: Left) -> bool:
        """Return whether the resources in `after` are within these counts. Shared memory is checked
        separately."""
        return (
            after.processes == self.processes
            and after.rendezvous_folders == self.rendezvous_folders
            and after.descriptors <= self.descriptors
            and grown(self.gpu_bytes, after.gpu_bytes) <= MAX_LEFT_BYTES
        )


def used_bytes() -> tuple[int, ...]:
    return tuple(gpu.used_bytes for gpu in find_gpus().gpus)


def grown(before: tuple[int, ...], after: tuple[int, ...]) -> int:
    """Return the largest growth in any GPU's memory use, in bytes."""
    return max((now - then for then, now in zip(before, after, strict=True)), default=0)


def decode(running: Service, traffic: Traffic, **options: Any) -> Stream:
    return _stream(running, max_tokens=traffic.decode_tokens, **options)


def prompt(running: Service, traffic: Traffic, number: int, **options: Any) -> Stream:
    """Start a stream with a long prompt. The prompts of all streams together fill several steps. They differ
    in their first token, so they share no prefix."""
    return _stream(
        running,
        prompt=[7 + number] + [(11 * place) % 4000 + 10 for place in range(traffic.prompt_tokens - 1)],
        max_tokens=8,
        **options,
    )


def _stream(running: Service, **options: Any) -> Stream:
    return Stream(running, **options, extra_body={"ignore_eos": True, "return_token_ids": True})


class Client(threading.Thread):
    """A client that reads the same stream again and again, so that a fault cannot come too late."""

    def __init__(self, start: Callable[[], Stream]) -> None:
        super().__init__(daemon=True)
        self.streams = [start()]
        self._start_stream = start
        self._told = threading.Event()
        self.start()

    def run(self) -> None:
        self.streams[-1].join(180)
        while not self._told.is_set() and self.streams[-1].error is None:
            self.streams.append(self._start_stream())
            self.streams[-1].join(180)

    def tell(self) -> None:
        """Start no further stream."""
        self._told.set()

    def finished(self) -> list[Stream]:
        """Wait until the last stream has ended, and return all streams."""
        self.join(400)
        return finished(self.streams)


def finished(streams: list[Stream]) -> list[Stream]:
    for stream in streams:
        stream.join(180)
        assert not stream.is_alive(), "a stream has not ended"
        assert stream.error is None, stream.error
    return streams


def undisturbed(running: Service, traffic: Traffic = ON_CPU) -> Expected:
    """Run streams without a fault, and return them for comparison with disturbed streams."""
    options = {"logprobs": 2} if traffic.near_tie else {}
    return Expected(
        traffic,
        finished([decode(running, traffic, **options)])[0],
        finished([prompt(running, traffic, number, **options) for number in range(traffic.prompts)]),
    )


def check_tokens(found: Stream, wanted: Stream, near_tie: float) -> None:
    """Check that a stream has the same tokens as an undisturbed stream, or first differs from it at a
    near-tie."""
    assert len(found.token_ids) == len(wanted.token_ids)
    pairs = zip(found.token_ids, wanted.token_ids, strict=True)
    place = next((place for place, (one, other) in enumerate(pairs) if one != other), None)
    if place is not None:
        gap = wanted.gaps[place] if place < len(wanted.gaps) else float("inf")
        assert gap <= near_tie, (
            f"token {place} is {found.token_ids[place]}, not {wanted.token_ids[place]} ({gap})"
        )


def left(running: Service) -> Left:
    """Wait until the replica is idle, and return the counts of the resources in use."""

    def idle() -> bool:
        replica = running.replica()
        return running.ready() and replica["running"] == replica["blocks_used"] == 0

    running.wait_until(idle, 120, "an idle replica without blocks in use")
    core = psutil.Process(running.process.pid)

    def settled() -> int | None:
        """Return how many descriptors the core has open, or None if connections are still being closed and
        the number changes."""
        count = core.num_fds()
        time.sleep(0.2)
        return count if core.num_fds() == count else None

    return Left(
        len(running.descendants()),
        # Tests that run at the same time on this machine leave the memory of libfaketime behind.
        frozenset(name for name in os.listdir("/dev/shm") if "faketime" not in name),
        len(list(running.run_dir.glob("ranks-*"))),
        running.wait_until(settled, 60, "the core's descriptors"),
        used_bytes(),
    )


def inflict(running: Service, expected: Expected, fault: signal.Signals, state: str, victim: int) -> Took:
    """Kill or stop a rank in the given state and check the consequences."""
    traffic = expected.traffic
    before = left(running)
    replica = running.replica()
    pids, restarts = replica["pids"], replica["restarts"]
    clients: list[Client] = []
    wanted: list[Stream] = []
    if state == "decode":
        wanted = [expected.decode] * 3
        clients = [Client(partial(decode, running, traffic)) for _ in wanted]
        for client in clients:
            assert client.streams[0].begun.wait(120)
    elif state == "prompt":
        wanted = expected.prompts
        clients = [Client(partial(prompt, running, traffic, number)) for number in range(len(wanted))]
    if clients:
        running.wait_until(lambda: running.replica()["running"] > 0, 120, "running requests")
    psutil.Process(pids[victim]).send_signal(fault)
    began, began_at = time.monotonic(), time.time()
    for client in clients:
        client.tell()
    wait_exited(pids, 120.0)
    exited_s = time.monotonic() - began
    for client, undisturbed_one in zip(clients, wanted, strict=True):
        for stream in client.finished():
            check_tokens(stream, undisturbed_one, traffic.near_tie)
    assert answer(running)
    # The core reaps processes and closes connections a moment after they have ended.
    running.wait_until(lambda: before.allows(left(running)), 60, f"the resource use of {before}")
    # Other programs on this machine also create and remove shared memory.
    new = left(running).shared_memory - before.shared_memory
    running.wait_until(lambda: new.isdisjoint(os.listdir("/dev/shm")), 60, f"the end of {new}")
    replica = running.replica()
    how = "was killed by SIGKILL" if fault == signal.SIGKILL else "was stopped by a signal"
    assert replica["restarts"] == restarts + 1
    assert replica["last_error"] == f"rank {victim} (pid {pids[victim]}) {how}"
    return Took(_noticed_s(running, began_at, exited_s), exited_s)


def _noticed_s(running: Service, began_at: float, exited_s: float) -> float:
    """Return the time in seconds from `began_at` until a rank first logged the loss of another rank, or
    `exited_s` if no rank logged a loss."""
    times = [
        datetime.fromisoformat(f"{when}+00:00").timestamp() - began_at
        for when in _NOTICED.findall(running.log_path.read_text())
    ]
    # The log rounds times down to milliseconds.
    return min((max(0.0, each) for each in times if each > -0.01), default=exited_s)


def write_gpu_model(folder: Path) -> str:
    """Write a model folder for the test on GPUs, and return the settings with which the service loads the
    model."""
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(demo_model_folder() / name, folder)
    config = json.loads((demo_model_folder() / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | GPU_SHAPE))
    return GPU_SETTINGS.format(folder=folder)


def main() -> int:
    """Run every case on the first or on the last rank, alternately. The exit code is 1 if a loss was noticed
    too late. Other failures raise AssertionError."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="how often each case runs (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (%(default)s)")
    parser.add_argument("--both", action="store_true", help="in each round, run every case on both ranks")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    worst: dict[tuple[str, str], list[Took]] = {}
    for number in range(arguments.rounds):
        _run_round(arguments, number, worst)
    late = False
    for (name, state), took in worst.items():
        limit = DEATH_LIMIT_S if name == "SIGKILL" else STOP_LIMIT_S
        noticed, exited = max(each.noticed for each in took), max(each.exited for each in took)
        late |= noticed > limit
        print(
            f"{name:8} {state:7} {len(took)} times: noticed within {noticed:.2f} s (limit {limit:g} s), "
            f"every rank exited within {exited:.2f} s",
            flush=True,
        )
    return int(late)


def _run_round(arguments: argparse.Namespace, number: int, worst: dict[tuple[str, str], list[Took]]) -> None:
    """Run every case once, or once on both ranks, and add the times to `worst`."""
    ranks, on_gpu, unused = arguments.ranks, arguments.device == "cuda", used_bytes()
    with ExitStack() as stack:
        settings = CPU_SETTINGS
        if on_gpu:
            settings = SETTINGS + write_gpu_model(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        # Each round starts a new service, because the delay before a restart doubles with each fault.
        flags = ("--tensor-parallel-size", str(ranks), "--device", arguments.device)
        running = stack.enter_context(configured(settings, *flags))
        expected = undisturbed(running, ON_GPU if on_gpu else ON_CPU)
        for index, (fault, state) in enumerate(itertools.product(SIGNALS, STATES)):
            first = (number + index) % 2 * (ranks - 1)
            for victim in (first, ranks - 1 - first)[: 1 + arguments.both]:
                took = inflict(running, expected, fault, state, victim)
                worst.setdefault((fault.name, state), []).append(took)
                print(f"{fault.name} of rank {victim}, {state}: {took}", file=sys.stderr, flush=True)
        running.stop()
    assert grown(unused, used_bytes()) <= MAX_LEFT_BYTES, f"GPU memory in use: {unused}, then {used_bytes()}"


if __name__ == "__main__":
    sys.exit(main())
