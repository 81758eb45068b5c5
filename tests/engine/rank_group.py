"""Runs the ranks of a replica in separate processes, without the service's core. As in a real replica, rank 0
plans the steps and the other ranks follow."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from engine import parallel
from engine.assembly import build_core
from engine.device import select_device
from engine.generate import LocalEngine
from engine.messages import ReplicaSpec
from engine.parallel import Ranks
from engine.peer_watch import PeerWatch
from engine.plan_channel import plan_channel
from engine.progress import no_progress
from engine.rank_messages import RankInbound
from engine.replica import follow
from engine.runner import ModelRunner
from engine.sleeping import SleepControl
from engine.wire import Channel, socketpair

START_TIMEOUT_S = 180.0


class RankEngine(LocalEngine):
    """Rank 0 of a group whose other ranks run `follow_rank_0`."""

    def __init__(self, spec: ReplicaSpec, runner: ModelRunner, peers: list[socket.socket]) -> None:
        self.runner, self.info, self.peers, self.others = runner, runner.info(), peers, None
        self.core = build_core(spec, self.info, runner, peers, runner.ranks.abandon)
        self._sleeping = SleepControl(self.core, runner)
        self.scheduler = self.core.scheduler
        self.finished, self.timings, self._handles = [], [], 0

    def release_peers(self) -> None:
        """Make `follow_rank_0` return on the other ranks."""
        for peer in self.peers:
            peer.close()


class Member:
    """One rank of a group, as seen by the code that runs in the rank's process."""

    def __init__(
        self, rank: int, size: int, folder: Path, device: str, overlap_from: int | None = None
    ) -> None:
        self.rank, self.size, self.folder = rank, size, folder
        kind = select_device(device, rank, size).type
        backend = "nccl" if kind == "cuda" else "gloo"
        self.ranks: Ranks = parallel.join(
            size,
            rank,
            str(folder / "meeting"),
            backend,
            timeout_seconds=START_TIMEOUT_S,
            overlap_from=overlap_from,
        )
        self.peers = self._connect()

    def runner(self, spec: ReplicaSpec) -> ModelRunner:
        return ModelRunner(spec, self.ranks, no_progress)

    def follow_rank_0(self, runner: ModelRunner) -> None:
        """Execute rank 0's plans until rank 0 closes the channel."""
        core, ours = socketpair()
        follow(Channel[RankInbound](ours, RankInbound), plan_channel(self.peers[0].detach()), runner)
        core.close()

    def watch(self) -> PeerWatch:
        """Watch the channels that carry plans, as a replica does."""
        channels = {f"peer {number}": peer.fileno() for number, peer in enumerate(self.peers)}
        return PeerWatch(channels, lambda name: self.ranks.abandon(f"{name} has exited"))

    def _connect(self) -> list[socket.socket]:
        path = str(self.folder / "plans")
        if self.rank == 0:
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(path + ".new")
                listener.listen()
                os.rename(path + ".new", path)
                return [listener.accept()[0] for _ in range(self.size - 1)]
        deadline = time.monotonic() + START_TIMEOUT_S
        while not os.path.exists(path):
            assert time.monotonic() < deadline, "rank 0 did not start listening"
            time.sleep(0.01)
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(path)
        return [connection]


Work = Callable[..., Any]


def rank_context(device: str) -> Any:
    """Return the multiprocessing context that starts the ranks. Ranks on a CPU are forked from a process that
    has already imported torch."""
    if device != "cpu":
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "engine.assembly", "engine.runner"])
    return context


def start_ranks(
    size: int, folder: Path, device: str, work: Work, *arguments: Any, overlap_from: int | None = None
) -> list[BaseProcess]:
    """Start a process for each rank, which runs `work(member, *arguments)`. `results` later returns each
    rank's result."""
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    folder.mkdir(exist_ok=True)
    context = rank_context(device)
    processes: list[BaseProcess] = [
        context.Process(
            target=_enter, args=(rank, size, folder, device, overlap_from, work, arguments), daemon=True
        )
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    return processes


def results(processes: list[BaseProcess], folder: Path, timeout_s: float = START_TIMEOUT_S) -> list[Any]:
    """Wait for the processes that `start_ranks` started. Return each rank's result, or None for a rank that
    was killed."""
    deadline = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert all(code in (0, -9) for code in codes), f"exit codes {codes}: see the ranks' output"
    paths = [folder / f"result-{rank}.pt" for rank in range(len(processes))]
    return [torch.load(path, weights_only=False) if path.exists() else None for path in paths]


def _enter(
    rank: int,
    size: int,
    folder: Path,
    device: str,
    overlap_from: int | None,
    work: Work,
    arguments: tuple[Any, ...],
) -> None:
    if device == "cpu":
        torch.set_num_threads(1)
    result = work(Member(rank, size, folder, device, overlap_from), *arguments)
    torch.save(result, folder / f"result-{rank}.pt")
    os._exit(0)  # a normal exit could hang because of torch.distributed's threads
