"""Tests of the benchmark, the profile and the soak test with several ranks, in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.tiny import TINY
from tests.forked import ForkedPopen

pytestmark = pytest.mark.system

WAIT_S = 500.0
SIZES = ["--max-num-seqs", "8", "--max-num-batched-tokens", "1024", "--kv-blocks", "128"]

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Write a tiny model's configuration. Return a function that starts a Python command with a separate
    folder for temporary files."""
    model, scratch = tmp_path / "model", tmp_path / "scratch"
    for folder in (model, scratch):
        folder.mkdir()
    (model / "config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 1024}))
    started: list[subprocess.Popen[str]] = []

    def run(*command: str) -> subprocess.Popen[str]:
        environment = {**os.environ, "TMPDIR": str(scratch), "OMP_NUM_THREADS": "1"}
        popen = ForkedPopen if command[0] == "-m" else subprocess.Popen
        process = popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def options(tmp_path: Path) -> list[str]:
    model = ["--model", str(tmp_path / "model"), "--load-format", "dummy", "--device", "cpu"]
    return [*model, *SIZES, "--tensor-parallel-size", "2"]


def finish(process: subprocess.Popen[str], wait_s: float = WAIT_S) -> tuple[int, str, str]:
    """Wait for a process to end. Return its exit code, standard output and standard error."""
    out, err = process.communicate(timeout=wait_s)
    return process.returncode, out, err


def children(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


def running(pid: int) -> bool:
    """Return whether a process is running. A zombie counts as not running."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def left_behind(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "scratch").iterdir())


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_benchmark_measures_a_replica_of_two_ranks(start: Start, tmp_path: Path) -> None:
    out = tmp_path / "raw.json"
    process = start("-m", "engine.bench", "b1_decode", *options(tmp_path), "--runs", "1", "--json", str(out))
    code, printed, errors = finish(process)
    assert code == 0, errors
    assert " on 2 × cpu (gloo), ready in " in printed
    raw = json.loads(out.read_text())
    assert raw["info"]["tensor_parallel_size"] == len(raw["info"]["devices"]) == 2
    decode = raw["workloads"]["b1_decode"]["runs"][0]["decode"]
    assert decode["count"] >= 255 and 0 < decode["plan_us"] < 1e3 * decode["ms"]
    assert re.search(r"plans to the other ranks: \d+ µs per decode step, \d+ µs per mixed step", printed)
    assert left_behind(tmp_path) == []


def test_a_rank_that_is_killed_ends_the_benchmark_with_the_reason(start: Start, tmp_path: Path) -> None:
    process = start("-m", "engine.bench", "b1_decode", *options(tmp_path), "--runs", "100000")
    assert process.stdout is not None
    assert " on 2 × cpu" in process.stdout.readline()
    (rank,) = children(process.pid)
    os.kill(rank, signal.SIGKILL)
    code, _, errors = finish(process)
    assert code == 1
    assert errors.startswith(f"rank 1 (pid {rank}) was killed by SIGKILL")
    assert len(errors.splitlines()) == 1
    assert left_behind(tmp_path) == []


def test_a_benchmark_that_is_killed_leaves_no_rank_behind(start: Start, tmp_path: Path) -> None:
    process = start("-m", "engine.bench", "b1_decode", *options(tmp_path), "--runs", "100000")
    wait_until(lambda: children(process.pid))
    (rank,) = children(process.pid)
    process.kill()
    wait_until(lambda: not running(rank))


def test_the_profile_records_steps_of_rank_0(start: Start, tmp_path: Path) -> None:
    process = start("-m", "engine.profile", "--workload", "b1_decode", "--steps", "3", *options(tmp_path))
    code, printed, errors = finish(process)
    assert code == 0, errors
    assert "on 2 × cpu" in printed
    assert "1 tokens per step, 1 of them decodes" in printed


def test_a_model_that_cannot_be_split_is_reported_before_ranks_start(start: Start, tmp_path: Path) -> None:
    command = [*options(tmp_path)[:-1], "3"]
    code, _, errors = finish(start("-m", "engine.bench", "b1_decode", *command))
    assert code == 1
    assert errors.startswith("tensor_parallel_size is 3, which does not divide 4 attention heads")


@pytest.mark.timeout(1900)  # one minute on a quiet machine with two cores
def test_random_traffic_over_two_ranks_leaves_nothing_behind(start: Start, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    # The known requests take most of the time, because each of them first runs alone.
    rounds = ["--rounds", "1", "--seed", "3", "--known", "2", "--spec", "tensor_parallel_size=2"]
    soak = ["-m", "tests.engine.soak", *rounds]
    code, printed, errors = finish(start(*soak, "--json", str(report)), 1800)
    assert code == 0, printed + errors
    results = json.loads(report.read_text())
    assert results["wrong"] is None and results["known"]["tokens"] > 0 and results["preemptions"] > 0


LOSE = """
import os, signal, sys, time
from engine.messages import ReplicaSpec
from engine.other_ranks import OtherRanks

device, lose = sys.argv[1:]
spec = ReplicaSpec(replica="test-0", model_path="none", device=device, tensor_parallel_size=3)
others = OtherRanks(spec)
if lose == "kill":
    os.kill(others.pids[1], signal.SIGKILL)
time.sleep(600)  # as in a collective that never returns
"""


@pytest.mark.parametrize(
    ("device", "lose", "reason"),
    [
        ("cpu", "kill", r"rank 2 .* was killed by SIGKILL"),
        (
            "cuda",
            "wait",
            r"rank [12] .* exited with code 1: DeviceError: device is 'cuda', which needs 3",
        ),
    ],
)
@pytest.mark.skipif(torch.cuda.device_count() >= 3, reason="needs a machine with fewer than three GPUs")
def test_a_process_that_waits_for_a_lost_rank_ends(start: Start, device: str, lose: str, reason: str) -> None:
    code, _, errors = finish(start("-c", LOSE, device, lose))
    assert code == 1
    assert re.match(reason, errors.splitlines()[-1])
