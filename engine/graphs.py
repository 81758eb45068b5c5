"""Decode steps as CUDA graphs: a ladder of batch sizes, each with one graph for the pass (*forward*, to
logits) and one for each way to sample (*sample*, which writes the next input in place).

A replay reads everything from the device: the host only says which rows decode, and only when that changes.
A batch between two sizes is padded with rows of -1, of which nothing is read or written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.batch import RowTables
from engine.forward import ForwardInput
from engine.model.decoder import Decoder
from engine.sampler import Sampler
from engine.sizing import ladder, size_for
from kernels import AttentionInput, KvPool
from kernels.draws import Variant
from kernels.triton.decode_step import advance, empty_decodes, place

Progress = Callable[[str, float], None]


@dataclass(frozen=True, slots=True)
class _Sample:
    graph: torch.cuda.CUDAGraph
    token_ids: torch.Tensor
    """[size] int64: what a replay draws, in the graphs' memory."""


class DecodeGraphs:
    """Captured decode steps of one rank. `capture` once; then, for each step, `set_rows`, `forward`, and
    `sample` in the cheapest variant that serves every row, unless some row's logits are to be edited first.
    """

    def __init__(
        self, decoder: Decoder, kv: list[KvPool], tables: RowTables, sampler: Sampler, most: int
    ) -> None:
        self._decoder, self._kv, self._tables, self._sampler = decoder, kv, tables, sampler
        self.sizes = ladder(most)
        device = tables.device
        self._rows = torch.full((self.sizes[-1],), -1, dtype=torch.int64, device=device)
        self._decodes = empty_decodes(self.sizes[-1], device)
        self._logits = torch.empty((self.sizes[-1], decoder.shard.vocab), dtype=decoder.dtype, device=device)
        self._held: list[int] = []
        self._passes: dict[int, torch.cuda.CUDAGraph] = {}
        self._samples: dict[tuple[int, Variant], _Sample] = {}

    def capture(self, progress: Progress) -> None:
        """Capture every size, the largest first, so that the smaller ones find their memory in its pool.

        A size's pass runs once before: its products compile and make their workspaces. Sampling kernels are
        the same for every size.
        """
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for variant in Variant:
                self._sample(self.sizes[-1], variant)
            for done, size in enumerate(reversed(self.sizes)):
                progress("capturing graphs", done / len(self.sizes))
                self._forward(size)
                self._passes[size] = torch.cuda.CUDAGraph()
                self._passes[size].capture_begin(pool=pool)
                self._forward(size)
                self._passes[size].capture_end()
                for variant in Variant:
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(pool=pool)
                    token_ids = self._sample(size, variant)
                    graph.capture_end()
                    self._samples[size, variant] = _Sample(graph, token_ids)
        torch.cuda.current_stream().wait_stream(stream)

    def launch(self) -> None:
        """Launch every kernel that `capture` captures, without capturing."""
        for size in self.sizes:
            self._forward(size)
            for variant in Variant:
                self._sample(size, variant)

    # ── a step ───────────────────────────────────────────────────────────────────────────────────

    def fits(self, decodes: int) -> bool:
        """Whether a batch has a graph."""
        return decodes <= self.sizes[-1]

    def set_rows(self, rows: list[int]) -> None:
        """Who decodes in the next steps; nothing is sent while it is as before."""
        if rows == self._held:
            return
        padded = rows + [-1] * (self._size(len(rows)) - len(rows))
        # From pageable memory, which the driver copies before it returns.
        self._rows[: len(padded)].copy_(torch.tensor(padded), non_blocking=True)
        self._held = list(rows)

    def forward(self) -> torch.Tensor:
        """Run the pass of the rows that were set: `[rows, vocabulary on this rank]` logits, which the next
        pass overwrites."""
        self._passes[self._size(len(self._held))].replay()
        return self._logits[: len(self._held)]

    def positions(self) -> torch.Tensor:
        """`[rows]` int64: where the tokens sampled from `forward`'s logits will stand."""
        return self._decodes.lens[: len(self._held)]

    def rows(self) -> torch.Tensor:
        """`[rows]` int64, on the device."""
        return self._rows[: len(self._held)]

    def sample(self, variant: Variant) -> torch.Tensor:
        """Draw each row's token and make it the row's next input: `[rows]` int64, BAD_TOKEN where a row has
        none; the next sample overwrites it."""
        captured = self._samples[self._size(len(self._held)), variant]
        captured.graph.replay()
        return captured.token_ids[: len(self._held)]

    def _size(self, decodes: int) -> int:
        return size_for(decodes, self.sizes)

    # ── what is captured ─────────────────────────────────────────────────────────────────────────

    def _forward(self, size: int) -> None:
        tables, rows, decodes = self._tables, self._rows[:size], self._decodes.first(size)
        place(rows, tables.last_tokens, tables.lengths, tables.block_table, decodes)
        table = tables.block_table
        inputs = ForwardInput(
            token_ids=decodes.token_ids,
            positions=decodes.positions,
            slots=decodes.kv_slots,
            attention=AttentionInput(table, decodes.slots, decodes.lens, table.shape[1], []),
        )
        self._decoder.logits(self._decoder.forward(inputs, self._kv), out=self._logits[:size])

    def _sample(self, size: int, variant: Variant) -> torch.Tensor:
        tables, rows, positions = self._tables, self._rows[:size], self._decodes.lens[:size]
        draws = tables.sampling.draws(rows, positions)
        token_ids = self._sampler.draw(self._logits[:size], variant, draws)
        advance(rows, token_ids, positions, tables.last_tokens, tables.lengths)
        return token_ids
