"""Kills or stops a replica's ranks while they are idle, during a prompt and during a decode. `python -m
tests.system.rank_faults` runs every case many times, and `tests.system.test_rank_faults` runs some cases
once.

After each fault, all ranks must exit, the replica must restart by itself, and streams must continue with the
same greedy text. No process, shared memory or descriptor may be left behind.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import time
from dataclasses import dataclass

import psutil

from tests.system.attacks.reading import configured
from tests.system.service import Service
from tests.system.test_deaths import Stream, answer, wait_gone

DEATH_LIMIT_S = 1.0
STOP_LIMIT_S = 5.0
"""Time limits, in seconds, for the exit of every rank after one rank has been killed or stopped."""
STATES = ("idle", "prompt", "decode")
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
FLAGS = ("--tensor-parallel-size", "2")
SETTINGS = "[restarts]\nmax_deaths = 1000\n"
"""The circuit breaker must not open, although the faults follow each other quickly."""
_PROMPTS = 4
_PROMPT_TOKENS = 1200
"""Number of tokens in each prompt. Together, the prompts need several engine steps."""


@dataclass(frozen=True, slots=True)
class Expected:
    """Return the texts of uninterrupted streams."""

    decode: str
    prompts: list[str]


@dataclass(frozen=True, slots=True)
class Left:
    """Resource counts that must not grow from one fault to the next."""

    processes: int
    shared_memory: frozenset[str]
    rendezvous_folders: int
    descriptors: int


def decode(running: Service) -> Stream:
    return Stream(running, max_tokens=120)


def prompts(running: Service) -> list[Stream]:
    """Start streams with prompts that together fill several steps. The prompts differ in their first token,
    so they share no prefix."""
    return [
        Stream(
            running,
            prompt=[7 + number] + [(11 * place) % 4000 + 10 for place in range(_PROMPT_TOKENS - 1)],
            max_tokens=8,
            extra_body={"ignore_eos": True},
        )
        for number in range(_PROMPTS)
    ]


def finished(streams: list[Stream]) -> list[str]:
    for stream in streams:
        stream.join(180)
        assert not stream.is_alive(), "a stream has not ended"
        assert stream.error is None, stream.error
    return [stream.text for stream in streams]


def undisturbed(running: Service) -> Expected:
    return Expected(finished([decode(running)])[0], finished(prompts(running)))


def left(running: Service) -> Left:
    """Wait until the replica is idle, and return the resources in use."""

    def idle() -> bool:
        replica = running.replica()
        return running.ready() and replica["running"] == replica["blocks_used"] == 0

    running.wait_until(idle, 120, "an idle replica without blocks in use")
    core = psutil.Process(running.process.pid)

    def settled() -> int | None:
        """Return how many descriptors the core has open, or None if the number is still changing because
        connections are being closed."""
        count = core.num_fds()
        time.sleep(0.2)
        return count if core.num_fds() == count else None

    return Left(
        len(running.descendants()),
        frozenset(os.listdir("/dev/shm")),
        len(list(running.run_dir.glob("ranks-*"))),
        running.wait_until(settled, 60, "the core's descriptors"),
    )


def inflict(running: Service, expected: Expected, fault: signal.Signals, state: str, victim: int) -> float:
    """Kill or stop a rank in the given state and check the consequences. Returns the time, in seconds, until
    every rank had exited."""
    before = left(running)
    replica = running.replica()
    pids, restarts = replica["pids"], replica["restarts"]
    streams: list[Stream] = []
    if state == "decode":
        streams = [decode(running) for _ in range(3)]
        for stream in streams:
            assert stream.begun.wait(60)
    elif state == "prompt":
        streams = prompts(running)
        running.wait_until(lambda: running.replica()["running"] > 0, 60, "a prompt to be computed")
        assert not all(stream.text for stream in streams), "the prompts are too short: all have been computed"
    psutil.Process(pids[victim]).send_signal(fault)
    began = time.monotonic()
    wait_gone(pids, 60.0)
    gone_s = time.monotonic() - began
    texts = finished(streams)
    assert texts == (expected.prompts if state == "prompt" else [expected.decode] * len(texts))
    assert answer(running)

    def nothing_new() -> bool:
        after = left(running)
        return (
            after.processes == before.processes
            and after.rendezvous_folders == before.rendezvous_folders
            and after.descriptors <= before.descriptors
        )

    # The core reaps processes and closes connections a moment after they have ended.
    running.wait_until(nothing_new, 60, f"the resource use of {before}")
    # Other programs on this machine also create and remove shared memory.
    new = left(running).shared_memory - before.shared_memory
    running.wait_until(lambda: new.isdisjoint(os.listdir("/dev/shm")), 60, f"the end of {new}")
    replica = running.replica()
    how = "was killed by SIGKILL" if fault == signal.SIGKILL else "was stopped by a signal"
    assert replica["restarts"] == restarts + 1
    assert replica["last_error"] == f"rank {victim} (pid {pids[victim]}) {how}"
    return gone_s


def main() -> int:
    """Run every case, alternately on the first and the last rank. The exit code is 1 if ranks exit too late.
    Other failures raise AssertionError."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10, help="how often each case runs (%(default)s)")
    parser.add_argument("--ranks", type=int, default=2, help="number of ranks (%(default)s)")
    arguments = parser.parse_args()
    rounds, ranks = arguments.rounds, arguments.ranks
    slowest: dict[tuple[str, str], float] = {}
    for number in range(rounds):
        # Each round starts a new service, because the delay before a restart doubles with each fault.
        with configured(SETTINGS, "--tensor-parallel-size", str(ranks)) as running:
            expected = undisturbed(running)
            for index, (fault, state) in enumerate(itertools.product(SIGNALS, STATES)):
                took = inflict(running, expected, fault, state, victim=(number + index) % 2 * (ranks - 1))
                slowest[fault.name, state] = max(took, slowest.get((fault.name, state), 0.0))
    late = False
    for (name, state), took in slowest.items():
        limit = DEATH_LIMIT_S if name == "SIGKILL" else STOP_LIMIT_S
        late |= took > limit
        print(f"{name:8} {state:7} {rounds} times: every rank exited within {took:.2f} s (limit {limit:g} s)")
    return int(late)


if __name__ == "__main__":
    sys.exit(main())
