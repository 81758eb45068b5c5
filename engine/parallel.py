"""Defines a replica's ranks and their collective operations. A single rank needs no process group and does
not load torch.distributed. Step plans are sent through channels (`engine.plan_channel`), not by collectives.
If the ranks' GPUs can map each other's memory, the ranks exchange small messages through GPU memory
(`engine.peer_ranks`)."""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import threading
from typing import Protocol

import torch

from kernels import NextNorm, Residual
from kernels.draws import BAD_TOKEN

log = logging.getLogger(__name__)


class RankFailureError(RuntimeError):
    """Raised if a collective fails because a peer died or timed out. The group of ranks is then unusable."""


class Overlap(Protocol):
    """Sums results over the ranks while the forward pass continues. The pass's tokens are split into two
    halves: one half's results are summed while the other half is computed."""

    split: int
    """Number of tokens in the first half."""

    def part(self, half: int, rows: int) -> torch.Tensor | None:
        """Return a buffer for the `part` argument of a half's next `start` call: [rows, hidden]. None means
        that the caller must allocate one."""

    def start(self, half: int, residual: Residual, part: torch.Tensor) -> None:
        """For one half, start computing `residual` plus the sum of `part` over the ranks. Both tensors may be
        overwritten. If `part` is not already in the buffer returned by `part()`, it is copied there first."""

    def finish(self, half: int) -> Residual:
        """Wait for the result of a half's latest `start` and return it. The result stays valid until `start`
        has been called twice more for this half."""


class Ranks:
    """A group of ranks, which must all make the same calls in the same order. Subclasses implement at least
    `all_reduce` and `all_gather_stack`."""

    size: int
    rank: int
    collectives: str = ""
    """Name of the communication backend, shown to operators. Empty for a single rank."""
    _failure_reason = ""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of `tensor` over the ranks, bitwise equal on all ranks. May overwrite `tensor`."""
        raise NotImplementedError

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Stack the ranks' tensors `[...]`, in rank order, into one tensor `[size, ...]`. All shapes must be
        equal. The sign of a float32 zero may be lost."""
        raise NotImplementedError

    def add_sum(self, residual: Residual, part: torch.Tensor, norm: NextNorm | None) -> Residual:
        """Return `residual` plus the sum of `part` over the ranks, bitwise equal on all ranks.

        `part` is [tokens, hidden]. `residual.values` and `part` may be overwritten. `norm` is the norm that
        the next operation needs, or None. If it is given, the returned residual may include the norm's
        result.
        """
        return Residual(residual.values.add_(self.all_reduce(part)))

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenate the ranks' tensors `[..., n]` in rank order to `[..., size × n]`. All shapes must be
        equal. The sign of a floating-point zero may be lost."""
        stack = self.all_gather_stack(tensor)
        return stack.movedim(0, -2).reshape(*tensor.shape[:-1], self.size * tensor.shape[-1])

    def best(self, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """For each row, return the id of the largest value over all ranks: `[rows]` int64.

        `values` is [rows] float32, and `ids` is [rows] int64 with ids below 2³¹. Ties go to the lowest rank.
        The result is BAD_TOKEN if a row contains a NaN, or if its largest value is infinite.
        """
        words = torch.stack((values.float().view(torch.int32), ids.int()))
        stack = self.all_gather_stack(words)
        values, ids = stack[:, 0].view(torch.float32), stack[:, 1]
        # argmax returns the index of the first NaN if there is one, otherwise that of the first maximum.
        winner = values.argmax(dim=0, keepdim=True)
        finite = values.gather(0, winner)[0].isfinite()
        return torch.where(finite, ids.gather(0, winner)[0].long(), BAD_TOKEN)

    def prepare_overlap(self, tokens: int, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
        """Reserve memory so that sums can overlap with computation in passes of up to `tokens` tokens. Does
        nothing if this would not improve performance."""
        return

    def overlap(self, tokens: int) -> Overlap | None:
        """Return the `Overlap` for a pass of `tokens` tokens, or None if overlapping sums with computation
        would not improve performance."""
        return None

    def abandon(self, reason: str) -> None:
        """Abort all current and future waits for peers, because a peer was lost. May be called from any
        thread. From then on, results of collectives are undefined, and `check` raises RankFailureError.
        """
        self._failure_reason = self._failure_reason or reason

    def check(self) -> None:
        """Raise RankFailureError if `abandon` was called."""
        if self._failure_reason:
            raise RankFailureError(
                f"rank {self.rank} of {self.size}: {self._failure_reason}; restart the whole replica"
            )

    def close(self) -> None:
        """Leave the group of ranks. CUDA graphs that contain collectives must be deleted first."""
        return


class _Single(Ranks):
    """The only rank of its group, which needs no communication."""

    size = 1
    rank = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unsqueeze(0)


class _Group(Ranks):
    """A rank that uses torch.distributed's default process group."""

    def __init__(self, size: int, rank: int) -> None:
        import torch.distributed

        self.size = size
        self.rank = rank
        self._dist = torch.distributed
        backend = torch.distributed.get_backend()
        self.collectives = "NCCL" if backend == "nccl" else backend
        # torch 2.13 renamed all_gather_into_tensor.
        self._gather = getattr(
            torch.distributed, "all_gather_single", torch.distributed.all_gather_into_tensor
        )

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        try:
            self._dist.all_reduce(tensor)
        except RuntimeError as error:
            raise self._failure("all_reduce", error) from error
        return tensor

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        stack = tensor.new_empty((self.size, *tensor.shape))
        try:
            self._gather(stack.view(-1), tensor.contiguous().view(-1))
        except RuntimeError as error:
            raise self._failure("all_gather", error) from error
        return stack

    def abandon(self, reason: str) -> None:
        is_aborting = bool(self._failure_reason)
        super().abandon(reason)
        if is_aborting or self._dist.get_backend() != "nccl":
            return  # gloo detects a peer's exit by itself

        # Abort on a separate thread, because the call can block: it waits for running NCCL kernels, which
        # wait for the lost peer until they are aborted.
        threading.Thread(target=self._abort, name="abort-collectives", daemon=True).start()

    def close(self) -> None:
        if self._dist.is_initialized():
            self._dist.destroy_process_group()

    def _abort(self) -> None:
        from torch.distributed.distributed_c10d import _abort_process_group

        with contextlib.suppress(Exception):  # the process exits even if the abort fails
            _abort_process_group()

    def _failure(self, operation: str, error: RuntimeError) -> RankFailureError:
        return RankFailureError(
            f"{operation} failed on rank {self.rank} of {self.size}: a peer died or timed out "
            f"({str(error).splitlines()[0]}); restart the whole replica"
        )


def all_to_all(tensor: torch.Tensor) -> torch.Tensor:
    """Send `tensor[i]` to rank i of the default group and return the received tensors, stacked in rank order.

    `tensor` is `[size, ...]`, with equal shapes on all ranks. Raises RankFailureError if a peer is lost.
    """
    import torch.distributed as dist

    received = torch.empty_like(tensor)
    try:
        # The tensor is sent as bytes, because some backends do not support all dtypes.
        dist.all_to_all_single(received.view(torch.uint8), tensor.view(torch.uint8))
    except RuntimeError as error:
        raise RankFailureError(
            f"all_to_all failed: a peer died or timed out ({str(error).splitlines()[0]}); "
            "restart the whole replica"
        ) from error
    return received


def single() -> Ranks:
    """Return a group with a single rank, without loading torch.distributed."""
    return _Single()


def join(
    size: int,
    rank: int,
    rendezvous_path: str,
    backend: str,
    *,
    timeout_seconds: float = 60.0,
    overlap_from: int | None = None,
) -> Ranks:
    """Join a replica's process group and return its ranks. With `size` 1, this is `single()`.

    `rendezvous_path` is a file on a local file system through which the ranks find each other. All ranks use
    the same path, and the file must not exist yet. `backend` is "gloo" for CPUs or "nccl" for CUDA. gloo uses
    the loopback interface unless GLOO_SOCKET_IFNAME is set. With nccl, the rank's device must be the current
    device.

    `timeout_seconds` limits the wait for other ranks, both here and in each collective. gloo also detects a
    peer's exit immediately, because its connection closes. On GPUs that can map each other's memory, sums and
    computation overlap in passes of at least `overlap_from` tokens (by default
    `engine.sizing.OVERLAP_FROM_TOKENS`).

    Raises RankFailureError if the other ranks do not join in time, and ValueError for invalid arguments.
    """
    if size == 1:
        return single()
    if not 0 <= rank < size:
        raise ValueError(f"rank is {rank}; with {size} ranks it must be from 0 to {size - 1}")
    if backend not in ("gloo", "nccl"):
        raise ValueError(f"backend is {backend!r}; use gloo on CPU and nccl on CUDA")
    if not rendezvous_path:
        raise ValueError(f"rendezvous_path is empty; {size} ranks need a file to find each other")
    import torch.distributed as dist

    if backend == "gloo":
        # By default, gloo uses the address that the host name resolves to. Without a network, using this
        # address fails; otherwise, the ranks would communicate over the network.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    timeout = datetime.timedelta(seconds=timeout_seconds)
    device = torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else None
    try:
        store = dist.FileStore(rendezvous_path, size)
        store.set_timeout(timeout)
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timeout, device_id=device
        )
    except RuntimeError as error:
        raise RankFailureError(
            f"rank {rank} of {size} did not find the other ranks within {timeout_seconds:g} s "
            f"through {rendezvous_path} "
            f"({str(error).splitlines()[0]})"
        ) from error
    group = _Group(size, rank)
    return group if device is None else _connect(group, device, overlap_from)


def _connect(group: Ranks, device: torch.device, overlap_from: int | None) -> Ranks:
    """Return ranks that use peer memory if all GPUs of the group can map each other's memory, otherwise
    `group`."""
    # Imported here because these modules load Triton, which is not needed on a CPU.
    from engine.peer_memory import PeerMemory
    from engine.peer_ranks import PeerRanks
    from engine.sizing import OVERLAP_FROM_TOKENS

    devices = group.all_gather_stack(torch.tensor([device.index], device=device)).view(-1).tolist()
    problem, memory = "", None
    if not all(
        torch.cuda.can_device_access_peer(device.index, other) for other in {*devices} - {device.index}
    ):
        problem = "no NVLink, and no PCIe peer access"
    if _all(group, not problem, device):
        try:
            memory = PeerMemory(group.rank, group.size)
        except RuntimeError as error:
            problem = str(error).splitlines()[0]
        # This exchange also makes every rank wait until all ranks have set up their memory. From then on,
        # peers may write messages to this rank's memory.
        if not _all(group, memory is not None, device):
            memory = None
    if memory is None:
        reason = f" ({problem})" if problem else ""
        log.warning(
            "rank %d: not all of the replica's GPUs can access each other's memory%s; the ranks use NCCL for "
            "every message, which slows down every decode step",
            group.rank,
            reason,
        )
        return group
    overlap_from = OVERLAP_FROM_TOKENS if overlap_from is None else overlap_from
    return PeerRanks(group, memory, overlap_from=overlap_from)


def _all(group: Ranks, condition: bool, device: torch.device) -> bool:
    """Return whether `condition` is true on every rank."""
    return bool(group.all_gather_stack(torch.tensor([int(condition)], device=device)).all())
