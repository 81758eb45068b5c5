"""Sums long messages over the ranks while a forward pass runs, using the GPUs' copy engines.

Each rank sums a share of the rows. First, every rank copies its summands to the ranks that sum them. Each
rank then adds up its rows and copies the sums to all other ranks. The copies do not occupy the
multiprocessors, which run the pass. Sums are computed in rank order in float32, so they are bitwise equal on
all ranks.
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
    """Buffers for the ranks' parts and the resulting sums. All ranks' buffers are mapped on this rank's
    device."""

    stages: Sequence[torch.Tensor]
    """For each rank, the buffer that receives the parts that the rank must sum: [HALVES, ranks, rows / ranks,
    hidden]. The second index is the sending rank."""
    gathered: Sequence[torch.Tensor]
    """For each rank, two result buffers per half, used alternately so that one can be read while the other is
    written: [HALVES, 2, rows, hidden]."""

    @staticmethod
    def shapes(ranks: int, rows: int, hidden: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of a rank's two buffers, for halves of up to `rows` tokens. `rows` must be a
        multiple of `ranks`."""
        return (HALVES, ranks, rows // ranks, hidden), (HALVES, 2, rows, hidden)


class PeerOverlap:
    """Computes the sums over the ranks for the two halves of a forward pass. Implements
    `engine.parallel.Overlap`.

    The copies and kernels of a sum form one CUDA graph, because the host would take longer to launch them one
    by one than the device takes to compute a layer. The graphs' buffers are therefore allocated once. The
    graphs for each token count are captured when first needed, which is during warm-up.

    Between the first `start` of a pass and its last `finish`, the arena must not be used for anything else.
    """

    def __init__(self, arena: Arena, memory: OverlapMemory, device: torch.device) -> None:
        self.split = 0
        self._arena, self._memory = arena, memory
        self._results = memory.gathered[arena.rank]
        self._parts = torch.empty_like(self._results[:, 0])
        """This rank's summands: [HALVES, rows, hidden]."""
        self._turns, self._rows = [0] * HALVES, [0] * HALVES
        """For each half, the index of the result buffer with the latest sum, and the number of rows in that
        sum."""
        self._flag = torch.zeros(1, dtype=torch.int32, device=device)
        # On meta tensors, kernels are only enumerated, which needs no streams.
        cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device, priority=-1) if cuda else None
        self._computed = [torch.cuda.Event() if cuda else None for _ in range(HALVES)]
        self._summed = [torch.cuda.Event() if cuda else None for _ in range(HALVES)]
        self._graphs: dict[tuple[int, int, int], torch.cuda.CUDAGraph] = {}
        """Captured `_sum` calls, keyed by their arguments."""
        self._graph_memory = torch.cuda.graph_pool_handle() if cuda else None
        self._loaded = False
        """Whether the kernels have been loaded. They cannot be loaded during a capture."""

    @property
    def max_half_tokens(self) -> int:
        """Maximum number of tokens in a half."""
        return self._parts.shape[1]

    def part(self, half: int, rows: int) -> torch.Tensor:
        return self._parts[half, :rows]

    def result(self, half: int, turn: int, rows: int) -> torch.Tensor:
        """Return one of a half's two result buffers, which are used alternately: [rows, hidden]."""
        return self._results[half, turn, :rows]

    def begin(self, half: int, values: torch.Tensor) -> None:
        """Begin a pass for one half: copy its residual `values` to result buffer 0. The half's sums are then
        stored in result buffers 1 and 0 alternately."""
        self._turns[half] = 0
        self.result(half, 0, len(values)).copy_(values)

    def start(self, half: int, residual: Residual, part: torch.Tensor) -> None:
        rows = len(part)
        own_part, before = self.part(half, rows), self.result(half, self._turns[half], rows)
        if part.data_ptr() != own_part.data_ptr():
            own_part.copy_(part)
        if residual.values.data_ptr() != before.data_ptr():
            mine = self._rows_of(self._arena.rank, rows)
            before[mine].copy_(residual.values[mine])
        self.start_sum(half, rows)

    def start_sum(self, half: int, rows: int) -> None:
        """Start a half's all-reduce, which adds every rank's part to that half's latest sum. This rank's part
        must be in the buffer returned by `part`."""
        self._turns[half] ^= 1
        self._rows[half] = rows
        with self._on_stream(half):
            self._launch((half, self._turns[half], rows))

    def finish(self, half: int) -> Residual:
        summed = self._summed[half]
        if summed is not None:
            torch.cuda.current_stream().wait_event(summed)
        return Residual(self.result(half, self._turns[half], self._rows[half]))

    def _launch(self, arguments: tuple[int, int, int]) -> None:
        """Launch `_sum(*arguments)` on the current stream."""
        if self._stream is None or not self._loaded:
            self._sum(*arguments)
            self._loaded = True
            return
        if arguments not in self._graphs:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(pool=self._graph_memory)
            self._sum(*arguments)
            graph.capture_end()
            self._graphs[arguments] = graph
        self._graphs[arguments].replay()

    def _sum(self, half: int, turn: int, rows: int) -> None:
        """Add the ranks' parts to the sum in result buffer `1 - turn` and store the result in buffer
        `turn`."""
        rank, world = self._arena.rank, self._arena.world
        part, mine = self.part(half, rows), self._rows_of(rank, rows)
        peers = [(rank + hop) % world for hop in range(1, world)]
        for peer in peers:
            stage = self._memory.stages[peer][half, rank, : rows // world]
            stage.copy_(part[self._rows_of(peer, rows)], non_blocking=True)
        self.barrier()
        before, result = self.result(half, turn ^ 1, rows)[mine], self.result(half, turn, rows)[mine]
        sum_parts(self._memory.stages[rank][half], part[mine], before, result, rank)
        for peer in peers:
            self._memory.gathered[peer][half, turn, mine].copy_(result, non_blocking=True)
        self.barrier()

    def _rows_of(self, rank: int, rows: int) -> slice:
        """Return the rows that a rank sums."""
        share = rows // self._arena.world
        return slice(rank * share, (rank + 1) * share)

    def barrier(self) -> None:
        """Make the device wait for all copies issued by any rank before this call."""
        all_gather(self._flag, 1, self._arena, pdl=False, fence=True)

    @contextlib.contextmanager
    def _on_stream(self, half: int):  # type: ignore[no-untyped-def]
        """Run the `with` body on the second stream, after all work on the current stream, and record an event
        at its end."""
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
"""Allocates a buffer on every rank and returns all ranks' buffers, mapped on this rank's device."""


def make_overlap(
    arena: Arena, rows: int, hidden: int, dtype: torch.dtype, device: torch.device, allocate: Allocate
) -> PeerOverlap:
    """Allocate the buffers for halves of up to `rows` tokens. All ranks must call this function at the same
    time."""
    stage, gathered = OverlapMemory.shapes(arena.world, rows, hidden)
    return PeerOverlap(arena, OverlapMemory(allocate(stage, dtype), allocate(gathered, dtype)), device)
