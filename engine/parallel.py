"""The ranks of a replica and their collectives.

A single rank needs no process group and does not load torch.distributed. Plans do not use collectives: rank 0
sends them on a channel (`engine.plan_channel`).
"""

from __future__ import annotations

import datetime
import os
from typing import Protocol

import torch


class RankLost(RuntimeError):
    """A collective failed because a peer died or timed out. The group cannot be used any more."""


class Ranks(Protocol):
    """A group of ranks. All ranks must make the same calls in the same order."""

    size: int
    rank: int
    collectives: str
    """Name of what exchanges data, for operators; empty for a single rank."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over the ranks, bitwise equal on all of them. May overwrite `tensor`."""

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate `[..., n]` of each rank, in rank order, to `[..., size × n]`. Shapes must be equal."""

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack `[...]` of each rank, in rank order, to `[size, ...]`. Shapes must be equal."""

    def close(self) -> None:
        """Leave the group."""


class _Single:
    """A single rank."""

    size = 1
    rank = 0
    collectives = ""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)

    def close(self) -> None:
        return


class _Group:
    """One of several ranks, which use the default group of torch.distributed."""

    def __init__(self, size: int, rank: int) -> None:
        import torch.distributed

        self.size = size
        self.rank = rank
        self._dist = torch.distributed
        backend = torch.distributed.get_backend()
        self.collectives = "NCCL" if backend == "nccl" else backend

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            self._dist.all_reduce(tensor)
        except RuntimeError as error:
            raise self._lost("all_reduce", error) from error
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        stack = self.all_gather_stack(tensor)
        return stack.movedim(0, -2).reshape(*tensor.shape[:-1], self.size * tensor.shape[-1])

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        stack = tensor.new_empty((self.size, *tensor.shape))
        try:
            self._dist.all_gather(list(stack.unbind()), tensor.contiguous())
        except RuntimeError as error:
            raise self._lost("all_gather", error) from error
        return stack

    def close(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()

    def _lost(self, what: str, error: RuntimeError) -> RankLost:
        return RankLost(
            f"{what} failed on rank {self.rank} of {self.size}: a peer died or timed out "
            f"({str(error).splitlines()[0]}); restart the whole replica"
        )


def all_to_all(tensor: torch.Tensor) -> torch.Tensor:
    """Send `tensor[i]` of `[size, ...]` to rank i of the default group, and return what this rank received,
    stacked in rank order. All ranks must call it with equal shapes. Raises RankLost."""
    import torch.distributed as dist

    received = torch.empty_like(tensor)
    try:
        # As bytes, because not every backend knows every dtype.
        dist.all_to_all_single(received.view(torch.uint8), tensor.view(torch.uint8))
    except RuntimeError as error:
        raise RankLost(
            f"all_to_all failed: a peer died or timed out ({str(error).splitlines()[0]}); "
            "restart the whole replica"
        ) from error
    return received


def single() -> Ranks:
    """Return the group of a single rank, without loading torch.distributed."""
    return _Single()


def join(size: int, rank: int, rendezvous_path: str, backend: str, *, timeout_seconds: float = 60.0) -> Ranks:
    """Find the other ranks through a file and return their group; `single()` for size 1.

    rendezvous_path: a file that does not exist yet, the same for all ranks, on a local file system. backend:
    "gloo" (CPU; uses the loopback interface unless GLOO_SOCKET_IFNAME is set) or "nccl" (CUDA; the rank's
    device must be the current one). timeout_seconds: how long a rank waits for the others, here and in each
    collective. gloo also notices the death of a peer at once, by its closed connection.

    Raises RankLost if the other ranks do not arrive in time, ValueError for invalid arguments.
    """
    if size == 1:
        return single()
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}; with {size} ranks it must be 0 to {size - 1}")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}; use gloo on CPU and nccl on CUDA")
    if not rendezvous_path:
        raise ValueError(f"rendezvous_path is empty; {size} ranks need a file to find each other")
    import torch.distributed as dist

    if backend == "gloo":
        # By default gloo resolves the host name. Without a network that fails, and otherwise traffic would
        # leave the machine.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        store = dist.FileStore(rendezvous_path, size)
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise RankLost(
            f"rank {rank} of {size} did not find the others within {timeout_seconds:g} s "
            f"through {rendezvous_path} "
            f"({str(error).splitlines()[0]})"
        ) from error
    return _Group(size, rank)
