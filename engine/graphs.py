"""Decode steps as CUDA graphs, captured for several batch sizes.

Each size has one graph for the forward pass up to the logits, and one graph per sampling variant, which also
writes the next input in place. A replay reads all its input from the device. The host sends only the slots
that decode, and only when they change. A batch between two captured sizes is padded with slot -1, for which
nothing is read or written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.device_tables import SlotTables
from engine.forward import ForwardInput
from engine.model.decoder import Decoder
from engine.progress import ProgressCallback
from engine.sampler import Sampler
from engine.sizing import decode_capture_sizes, size_for
from kernels import AttentionInput, KvPool
from kernels.draws import Variant
from kernels.triton.decode_step import advance, empty_decodes, place


@dataclass(frozen=True, slots=True)
class _Sample:
    graph: torch.cuda.CUDAGraph
    token_ids: torch.Tensor
    """The tokens that a replay samples, in the graphs' memory: [size] int64."""


class DecodeGraphs:
    """Captured decode steps of one rank.

    Call `capture` once. Then call `set_slots`, `forward` and `sample` for each step. A step that needs logits
    processors calls the sampler instead of `sample`.
    """

    def __init__(
        self, decoder: Decoder, kv: list[KvPool], tables: SlotTables, sampler: Sampler, max_batch: int
    ) -> None:
        self._decoder, self._kv, self._tables, self._sampler = decoder, kv, tables, sampler
        self.sizes = decode_capture_sizes(max_batch)
        device = tables.device
        self._slots = torch.full((self.sizes[-1],), -1, dtype=torch.int64, device=device)
        self._decodes = empty_decodes(self.sizes[-1], device)
        self._logits = torch.empty((self.sizes[-1], decoder.shard.vocab), dtype=decoder.dtype, device=device)
        self._current: list[int] = []
        self._passes: dict[int, torch.cuda.CUDAGraph] = {}
        self._samples: dict[tuple[int, Variant], _Sample] = {}

    def capture(self, progress: ProgressCallback) -> None:
        """Capture every size, the largest first, so that the smaller ones reuse its memory.

        Each pass runs once before its capture, so that kernels are compiled and workspaces exist. Sampling
        kernels are the same for every size.
        """
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for variant in Variant:
                self._sample(self.sizes[-1], variant)
            for done, size in enumerate(reversed(self.sizes)):
                progress("capturing CUDA graphs", done / len(self.sizes))
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
        """Return whether a graph was captured for a batch of `decodes` sequences."""
        return decodes <= self.sizes[-1]

    def set_slots(self, slots: list[int]) -> None:
        """Set the slots that decode in the next steps. Nothing is sent if they are unchanged."""
        if slots == self._current:
            return
        padded = slots + [-1] * (self._size(len(slots)) - len(slots))
        # The source is pageable memory, which the driver copies before the call returns, so it may be freed.
        self._slots[: len(padded)].copy_(torch.tensor(padded), non_blocking=True)
        self._current = list(slots)

    def forward(self) -> torch.Tensor:
        """Run the pass of the current slots. Returns `[slots, vocabulary on this rank]` logits, which the
        next pass overwrites."""
        self._passes[self._size(len(self._current))].replay()
        return self._logits[: len(self._current)]

    def positions(self) -> torch.Tensor:
        """Return the positions of the tokens that are sampled from the logits of `forward`: `[slots]`
        int64."""
        return self._decodes.lens[: len(self._current)]

    def slots(self) -> torch.Tensor:
        """Return the current slots on the device: `[slots]` int64."""
        return self._slots[: len(self._current)]

    def sample(self, variant: Variant) -> torch.Tensor:
        """Sample each slot's token and make it the slot's next input.

        Returns `[slots]` int64, BAD_TOKEN if no token could be sampled. The next call overwrites the result.
        """
        captured = self._samples[self._size(len(self._current)), variant]
        captured.graph.replay()
        return captured.token_ids[: len(self._current)]

    def _size(self, decodes: int) -> int:
        return size_for(decodes, self.sizes)

    # ── captured code ─────────────────────────────────────────────────────────────────────────

    def _forward(self, size: int) -> None:
        tables, slots, decodes = self._tables, self._slots[:size], self._decodes.first(size)
        place(slots, tables.last_tokens, tables.lengths, tables.block_table, decodes)
        table = tables.block_table
        inputs = ForwardInput(
            token_ids=decodes.token_ids,
            positions=decodes.positions,
            kv_slots=decodes.kv_slots,
            attention=AttentionInput(table, decodes.slots, decodes.lens, table.shape[1], []),
        )
        self._decoder.logits(self._decoder.forward(inputs, self._kv), out=self._logits[:size])

    def _sample(self, size: int, variant: Variant) -> torch.Tensor:
        tables, slots, positions = self._tables, self._slots[:size], self._decodes.lens[:size]
        draws = tables.sampling.draws(slots, positions)
        token_ids = self._sampler.draw(self._logits[:size], variant, draws)
        advance(slots, token_ids, positions, tables.last_tokens, tables.lengths)
        return token_ids
