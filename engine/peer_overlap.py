"""Sums long messages over the ranks while a forward pass runs, using the GPUs' copy engines.

Each rank computes the sums for a share of the rows. The other ranks copy their summands for these rows into
this rank's memory. This rank then copies the sums into the memory of the other ranks. The copies do not
occupy the multiprocessors, which run the pass. Sums are computed in rank order in float32, so they are
bitwise equal on all ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from kernels import Residual
from kernels.triton.all_gather import all_gather
from kernels.triton.peer_arena import Arena
from kernels.triton.sum_parts import sum_parts

HALVES = 2


@dataclass(frozen=True, slots=True)
class OverlapMemory:
    """Buffers for the parts and the results of sums. All ranks' buffers are mapped on this rank's device."""

    stages: Sequence[torch.Tensor]
    """For each rank, the buffer that receives the parts that this rank must sum, indexed by source rank:
    [HALVES, ranks, rows / ranks, hidden]."""
    gathered: Sequence[torch.Tensor]
    """For each rank, two alternating buffers for the results, so that one can be read while the other is
    written: [HALVES, 2, rows, hidden]."""

    @staticmethod
    def shapes(ranks: int, rows: int, hidden: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a rank's two buffers, for halves of up to `rows` tokens. `rows` must be a
        multiple of `ranks`."""
        return (HALVES, ranks, rows // ranks, hidden), (HALVES, 2, rows, hidden)


class PeerOverlap:
    """Computes the sums over the ranks for the two halves of a forward pass. Implements
    `engine.parallel.Overlap`.

    Between the first `start` of a pass and its last `finish`, the arena must not be used for anything else.
    """

    def __init__(self, arena: Arena, memory: OverlapMemory, device: torch.device) -> None:
        self.split = 0
        self._arena, self._memory = arena, memory
        self._turns = [0] * HALVES
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        # On meta tensors, kernels are only enumerated, so no streams are needed.
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if cuda else None
        self._computed = [torch.cuda.Event() if cuda else None for _ in range(HALVES)]
        self._summed = [torch.cuda.Event() if cuda else None for _ in range(HALVES)]
        self._sums: list[torch.Tensor | None] = [None] * HALVES
        self._in_use: list[tuple[torch.Tensor, ...]] = [()] * HALVES
        """Tensors that are read on the second stream. The references prevent reuse of their memory before
        `finish`."""

    @property
    def max_half_tokens(self) -> int:
        """Maximum number of tokens in a half."""
        return self._memory.gathered[0].shape[2]

    def start(self, half: int, residual: Residual, part: torch.Tensor) -> None:
        self._in_use[half] = (residual.values, part)
        with self._on_stream(half):
            self._sums[half] = self._sum(half, residual.values, part)

    def finish(self, half: int) -> Residual:
        summed, result = self._summed[half], self._sums[half]
        assert result is not None
        if summed is not None:
            torch.cuda.current_stream().wait_event(summed)
        self._in_use[half], self._sums[half] = (), None
        return Residual(result)

    def _sum(self, half: int, residual: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        rank, world = self._arena.rank, self._arena.world
        rows, own = len(part), len(part) // world
        mine = slice(rank * own, (rank + 1) * own)
        self._turns[half] ^= 1
        turn = self._turns[half]
        peers = [(rank + hop) % world for hop in range(1, world)]
        for peer in peers:
            stage = self._memory.stages[peer][half, rank, :own]
            stage.copy_(part[peer * own : (peer + 1) * own], non_blocking=True)
        self.barrier()
        result = self._memory.gathered[rank][half, turn, :rows]
        sum_parts(self._memory.stages[rank][half], part[mine], residual[mine], result[mine], rank)
        for peer in peers:
            self._memory.gathered[peer][half, turn, mine].copy_(result[mine], non_blocking=True)
        self.barrier()
        return result

    def barrier(self) -> None:
        """Make the device wait until all copies that any rank issued before this call have arrived."""
        all_gather(self._flag, 1, self._arena, pdl=False, fence=True)

    @contextlib.contextmanager
    def _on_stream(self, half: int):  # type: ignore[no-untyped-def]
        """Run the body on the second stream, after all work on the current stream, and record an event at its
        end."""
        computed, summed = self._computed[half], self._summed[half]
        if self._stream is None or computed is None or summed is None:
            yield
            return
        computed.record()
        self._stream.wait_event(computed)
        with torch.cuda.stream(self._stream):
            yield
            summed.record()


Allocate = Callable[[tuple[int, ...], torch.dtype], Sequence[torch.Tensor]]
"""Allocates a buffer on every rank, and returns the buffers of all ranks, mapped on this rank's device."""


def make_overlap(
    arena: Arena, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, allocate: Allocate
) -> PeerOverlap:
    """Allocate the buffers for halves of up to `rows` tokens. All ranks must call this function at the same
    time."""
    stage, gathered = OverlapMemory.shapes(arena.world, rows, hidden)
    return PeerOverlap(arena, OverlapMemory(allocate(stage, dtype), allocate(gathered, dtype)), device)
