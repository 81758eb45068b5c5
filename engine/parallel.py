"""The ranks of a replica and what they say to each other on the data path.

One rank costs nothing: no process group, no torch.distributed. Rank 0's plan travels on `engine.wire`, not
here.
"""

from __future__ import annotations

import datetime
import os
from typing import Protocol

import torch


class RankLost(RuntimeError):
    """A collective failed: a peer died or did not answer in time. The group is of no use any more."""


class Ranks(Protocol):
    """A group of ranks. Every rank must make the same calls in the same order."""

    size: int
    rank: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, equal to the bit on all of them. May overwrite `tensor`."""

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[..., n]` on each rank to `[..., size × n]`, in rank order. Shapes must be equal."""

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """`[...]` on each rank to `[size, ...]`, in rank order. Shapes must be equal."""

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        """Rank 0's `tensor`, written into everyone's."""

    def close(self) -> None:
        """Leaves the group."""


class _Single:
    """The only rank."""

    size = 1
    rank = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def close(self) -> None:
        return


class _Group:
    """One of several ranks, over torch.distributed's default group."""

    def __init__(self, size: int, rank: int) -> None:
        import torch.distributed

        self.size = size
        self.rank = rank
        self._dist = torch.distributed

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

    def broadcast(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            self._dist.broadcast(tensor, src=0)
        except RuntimeError as error:
            raise self._lost("broadcast", error) from error
        return tensor

    def close(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()

    def _lost(self, what: str, error: RuntimeError) -> RankLost:
        return RankLost(
            f"{what} failed on rank {self.rank} of {self.size}: a peer died or did not answer in time "
            f"({str(error).splitlines()[0]}); the whole replica must be started again"
        )


def single() -> Ranks:
    """The group of one rank; loads no torch.distributed."""
    return _Single()


def join(size: int, rank: int, rendezvous_path: str, backend: str, *, timeout_seconds: float = 60.0) -> Ranks:
    """Meets the other ranks over a file and returns the group; `single()` for size 1.

    rendezvous_path: a file that does not exist yet, the same for all ranks, on a local file system.
    backend: "gloo" (CPU; over the loopback interface, unless GLOO_SOCKET_IFNAME names another) or "nccl"
    (CUDA; the rank's device must be current).
    timeout_seconds: how long a rank may keep the others waiting, at the meeting and in each collective; on
    gloo a peer's death is noticed at once, by its closed connection.

    Raises RankLost when the others do not come, ValueError for arguments that make no group.
    """
    if size == 1:
        return single()
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}; with {size} ranks it must be 0 to {size - 1}")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}; use gloo on CPU and nccl on CUDA")
    if not rendezvous_path:
        raise ValueError(f"rendezvous_path is empty; {size} ranks need a file to meet at")
    import torch.distributed as dist

    if backend == "gloo":
        # Without it gloo resolves the host's name, which fails or leaves the machine where there is no
        # network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=timeout_seconds)
    try:
        store = dist.FileStore(rendezvous_path, size)
        store.set_timeout(timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        raise RankLost(
            f"rank {rank} of {size} did not meet the others at {rendezvous_path} in {timeout_seconds:g} s "
            f"({str(error).splitlines()[0]})"
        ) from error
    return _Group(size, rank)
