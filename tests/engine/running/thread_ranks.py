"""Ranks that are threads of one process, for tests of computations on several ranks. Their collectives use a
barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from engine.parallel import Ranks

Result = TypeVar("Result")


class ThreadRank(Ranks):
    """One rank of a group of `size` ranks, which share `slots` and `barrier`."""

    collectives = "threads"

    def __init__(self, size: int, rank: int, slots: list[torch.Tensor], barrier: threading.Barrier) -> None:
        self.size, self.rank = size, rank
        self._slots, self._barrier = slots, barrier

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        self._slots[self.rank] = tensor
        self._barrier.wait()
        stack = torch.stack(self._slots)
        self._barrier.wait()
        return stack

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.all_gather_stack(tensor).sum(dim=0)


def on_ranks(size: int, work: Callable[[ThreadRank], Result]) -> list[Result]:
    """Run `work` on every rank at the same time and return the results in rank order. An exception on one
    rank stops all ranks."""
    slots = [torch.empty(0)] * size
    barrier = threading.Barrier(size, timeout=600)

    def guarded(rank: int) -> Result:
        try:
            return work(ThreadRank(size, rank, slots, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(guarded, range(size)))
