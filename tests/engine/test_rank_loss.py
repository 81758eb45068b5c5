"""Tests that rank 0 stops waiting for a lost rank even if that rank's process still runs. gloo does not
detect such a loss."""

from __future__ import annotations

import json
import os
import queue
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine import other_ranks
from engine.messages import ReplicaSpec, SamplingParams, Submit, pack_tokens
from engine.parallel import RankFailureError
from tests.engine.rank_group import START_TIMEOUT_S, Member, RankEngine, results, start_ranks
from tests.engine.tiny import TINY

WAIT_S = 60.0
"""Time limit in seconds. It is far below START_TIMEOUT_S, the time after which a gloo collective fails by
itself."""


def spec_of(folder: Path, **changes: Any) -> ReplicaSpec:
    folder.joinpath("config.json").write_text(json.dumps(TINY | {"max_position_embeddings": 4096}))
    fields: dict[str, Any] = {
        "replica": "test-0",
        "model_path": str(folder),
        "load_format": "dummy",
        "device": "cpu",
        "threads": 1,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 4096,
        "max_mixed_tokens": 4096,
        "kv_blocks": 128,
        "tensor_parallel_size": 2,
    }
    return ReplicaSpec(**{**fields, **changes})


def lose_rank_1(
    member: Member, spec: ReplicaSpec, serve: Callable[[Member, RankEngine], None]
) -> tuple[str, float] | None:
    """Lose rank 1 while rank 0 runs `serve`. Return rank 0's error message and the time in seconds until the
    error was raised.

    Rank 1 loads the model. If steps do not overlap, rank 1 then reads one byte of a plan and closes its
    channel. After that, it only sleeps.
    """
    runner = member.runner(spec)
    ended = member.folder / "ended"
    if member.rank == 0:
        began = time.monotonic()
        try:
            serve(member, RankEngine(spec, runner, member.peers))
        except RankFailureError as error:
            return str(error), time.monotonic() - began
        finally:
            ended.touch()
        return None
    if not spec.overlap:
        assert member.peers[0].recv(1)
        member.peers[0].close()
    deadline = time.monotonic() + START_TIMEOUT_S
    while not ended.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    return None


def serve_watched(member: Member, made: RankEngine) -> None:
    member.watch()
    made.generate([[5, 6, 7]], SamplingParams(max_tokens=4))


def serve_with_unread_plan(member: Member, made: RankEngine) -> None:
    """Launch two steps. The first step's plan fits into the socket's buffer, and the second step's plan does
    not."""
    assert made.core.plans is not None
    for peer in made.core.plans._peers:  # type: ignore[attr-defined]
        peer._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)
        peer._timeout_s = 0.5
    for handle, prompt in enumerate(([5, 6, 7], [150] * 4000)):
        sampling = SamplingParams(max_tokens=4)
        made.scheduler.add(
            "front", Submit(handle=handle, request_id="r", prompt=pack_tokens(prompt), sampling=sampling)
        )
        made.core.step()
    while made.core.has_work:
        made.core.step()


@pytest.mark.parametrize(
    ("serve", "changes", "reason"),
    [
        (serve_watched, {"overlap": False}, "peer 0 has exited"),
        (serve_with_unread_plan, {}, "rank 1 did not read a plan for 0.5 s"),
    ],
    ids=["closed channel", "unread plan"],
)
def test_rank_0_does_not_wait_for_a_step_of_a_rank_that_is_lost(
    serve: Any, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    spec = spec_of(tmp_path, **changes)
    processes = start_ranks(2, tmp_path / "ranks", "cpu", lose_rank_1, spec, serve)
    found = results(processes, tmp_path / "ranks")[0]
    assert found is not None
    error, seconds = found
    assert error == f"rank 0 of 2: {reason}; restart the whole replica"
    assert seconds < WAIT_S


def test_a_benchmark_is_told_of_the_death_of_a_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_ranks, "LOSS_GRACE_S", WAIT_S)
    others = other_ranks.OtherRanks(spec_of(tmp_path))
    exited: queue.Queue[str] = queue.Queue()
    others.on_exit(exited.put)
    os.kill(others.pids[0], signal.SIGKILL)
    assert exited.get(timeout=WAIT_S) == "rank 1 has exited"
    others.on_exit(exited.put)
    assert "was killed by SIGKILL" in exited.get(timeout=WAIT_S)
    others.stop()
    assert exited.empty()
