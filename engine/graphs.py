"""Decode steps as CUDA graphs: a ladder of batch sizes, each in two graphs, *forward* (to logits) and
*greedy* (which picks the tokens and writes the next input in place).

A replay reads everything from the device: the host only says which rows decode, and only when that changes.
A batch between two sizes is padded with a row that nobody owns, which reads and writes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.batch import RowTables
from engine.forward import ForwardInput, KvPool
from engine.messages import BLOCK_TOKENS
from engine.model.decoder import Decoder
from kernels import AttentionInput

Progress = Callable[[str, float], None]

_WARM_UPS = 2
"""Runs before a capture: the first compiles kernels, and makes handles and workspaces."""


def ladder(most: int) -> list[int]:
    """Batch sizes that get a graph: 1, 2, 4, 8, 12, 16, then steps of about an eighth, up to `most`."""
    sizes = [size for size in (1, 2, 4, 8, 12, 16) if size < most]
    step = 8
    while (sizes[-1] if sizes else 0) < most:
        last = sizes[-1] if sizes else 0
        while step < last // 8:
            step *= 2
        sizes.append(min(most, last + step))
    return sizes


class DecodeGraphs:
    """Captured decode steps of one rank. `capture` once; then, for each step, `set_rows`, `forward`, and
    `greedy` where every row takes its best token."""

    def __init__(
        self,
        decoder: Decoder,
        kv: list[KvPool],
        tables: RowTables,
        pick: Callable[[torch.Tensor], torch.Tensor],
        most: int,
    ) -> None:
        """pick: `[rows, vocabulary on this rank]` logits to `[rows]` int64 token ids, BAD_TOKEN where there
        is none."""
        self._decoder, self._kv, self._tables, self._pick = decoder, kv, tables, pick
        self.sizes = ladder(most)
        device = tables.device
        self._rows = torch.full((self.sizes[-1],), tables.padding_row, dtype=torch.int64, device=device)
        self._next = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._tokens = torch.zeros(self.sizes[-1], dtype=torch.int64, device=device)
        self._logits = torch.empty((self.sizes[-1], decoder.shard.vocab), dtype=decoder.dtype, device=device)
        self._held: list[int] = []
        self._forward_graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._greedy_graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def capture(self, progress: Progress) -> None:
        """Capture every size, the largest first, so that the smaller ones find their memory in its pool."""
        pool = torch.cuda.graph_pool_handle()
        for done, size in enumerate(reversed(self.sizes)):
            progress("capturing graphs", done / len(self.sizes))
            for body, graphs in ((self._forward, self._forward_graphs), (self._greedy, self._greedy_graphs)):
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    for _ in range(_WARM_UPS):
                        body(size)
                torch.cuda.current_stream().wait_stream(stream)
                graphs[size] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[size], pool=pool):
                    body(size)

    def fits(self, decodes: int) -> bool:
        """Whether a batch has a graph."""
        return decodes <= self.sizes[-1]

    def set_rows(self, rows: list[int]) -> None:
        """Who decodes in the next steps; nothing is sent while it is as before."""
        if rows == self._held:
            return
        padded = rows + [self._tables.padding_row] * (self._size(len(rows)) - len(rows))
        # From pageable memory, which the driver copies before it returns.
        self._rows[: len(padded)].copy_(torch.tensor(padded), non_blocking=True)
        self._held = list(rows)

    def forward(self) -> torch.Tensor:
        """Run the pass of the rows that were set: `[rows, vocabulary on this rank]` logits, which the next
        pass overwrites."""
        self._forward_graphs[self._size(len(self._held))].replay()
        return self._logits[: len(self._held)]

    def positions(self) -> torch.Tensor:
        """`[rows]` int64: where the tokens sampled from `forward`'s logits will stand."""
        return self._next[: len(self._held)]

    def rows(self) -> torch.Tensor:
        """`[rows]` int64, on the device."""
        return self._rows[: len(self._held)]

    def greedy(self) -> torch.Tensor:
        """Pick each row's best token and make it the row's next input: `[rows]` int64, until the next."""
        self._greedy_graphs[self._size(len(self._held))].replay()
        return self._tokens[: len(self._held)]

    def _size(self, decodes: int) -> int:
        return next(size for size in self.sizes if size >= decodes)

    def _forward(self, size: int) -> None:
        tables, rows = self._tables, self._rows[:size]
        real = rows != tables.padding_row
        positions = tables.lengths[rows]
        blocks = tables.block_table[rows, positions // BLOCK_TOKENS]
        slots = torch.where(real, blocks * BLOCK_TOKENS + positions % BLOCK_TOKENS, -1)
        lens = torch.where(real, positions + 1, 0)
        self._next[:size] = lens
        inputs = ForwardInput(
            token_ids=tables.last_tokens[rows],
            positions=positions,
            slots=slots,
            attention=AttentionInput(tables.block_table, rows, lens, tables.block_table.shape[1], []),
            logit_index=rows,
        )
        self._decoder.logits(self._decoder.forward(inputs, self._kv), out=self._logits[:size])

    def _greedy(self, size: int) -> None:
        tables, rows = self._tables, self._rows[:size]
        tokens = self._pick(self._logits[:size])
        self._tokens[:size] = tokens
        tables.last_tokens[rows] = tokens.clamp(min=0)
        tables.lengths[rows] = self._next[:size]
