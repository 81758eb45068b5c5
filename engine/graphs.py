"""Captures decode steps as CUDA graphs for several batch sizes and replays them.

Each batch size has one graph for the forward pass, including the logits, and one graph per sampling variant.
The sampling graphs also store the sampled tokens in place as the next input. A replay reads all of its input
from device memory. The host sends only the list of decoding slots, and only when it changes. A batch smaller
than the captured size is padded with slot -1, for which nothing is read or written.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.device_tables import SlotTables
from engine.forward import ForwardInput
from engine.model.decoder import Decoder
from engine.progress import ProgressCallback
from engine.rank_messages import Progress
from engine.sampler import Sampler
from engine.sizing import decode_capture_sizes, size_for
from kernels import AttentionInput, KvPool
from kernels.draws import Variant
from kernels.triton.decode_step import advance, empty_decodes, place


@dataclass(frozen=True, slots=True)
class _Sample:
    graph: torch.cuda.CUDAGraph
    token_ids: torch.Tensor
    """The tokens sampled by a replay, stored in the graphs' memory pool: [size] int64."""


class DecodeGraphs:
    """The captured decode steps of one rank. Call `capture` once, then `set_slots`, `forward` and `sample` in
    each step. For a step with logits processors, call the sampler instead of `sample`.
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
        """Capture the graphs for all batch sizes, largest first, so that the smaller ones reuse the largest
        one's memory. Before each capture, a pass of a few layers loads the kernels and allocates their
        workspaces. The sampling kernels are the same for all sizes.
        """
        few = self._decoder.representative(self._kv)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for variant in Variant:
                self._sample(self.sizes[-1], variant)
            for done, size in enumerate(reversed(self.sizes)):
                progress(Progress("warm up", done, len(self.sizes), "graphs", "decode steps"))
                self._forward(size, *few)
                self._passes[size] = torch.cuda.CUDAGraph()
                self._passes[size].capture_begin(pool=pool)
                self._forward(size, self._decoder, self._kv)
                self._passes[size].capture_end()
                for variant in Variant:
                    graph = torch.cuda.CUDAGraph()
                    graph.capture_begin(pool=pool)
                    token_ids = self._sample(size, variant)
                    graph.capture_end()
                    self._samples[size, variant] = _Sample(graph, token_ids)
        torch.cuda.current_stream().wait_stream(stream)

    def launch(self) -> None:
        """Launch every kernel in the captured graphs once, without capturing a graph."""
        for size in self.sizes:
            self._forward(size, self._decoder, self._kv)
            for variant in Variant:
                self._sample(size, variant)

    # ── running a step ───────────────────────────────────────────────────────────────────────────

    def fits(self, decodes: int) -> bool:
        """Return whether a batch of `decodes` sequences fits into the largest captured graph."""
        return decodes <= self.sizes[-1]

    def set_slots(self, slots: list[int]) -> None:
        """Set the slots that decode in the following steps. Nothing is sent if they are unchanged."""
        if slots == self._current:
            return
        padded = slots + [-1] * (self._size(len(slots)) - len(slots))
        # The source tensor can be freed immediately, because the driver copies pageable memory before the
        # call returns.
        self._slots[: len(padded)].copy_(torch.tensor(padded), non_blocking=True)
        self._current = list(slots)

    def forward(self) -> torch.Tensor:
        """Run the forward pass for the current slots and return their logits: `[slots, vocabulary on this
        rank]`. The next pass overwrites the result."""
        self._passes[self._size(len(self._current))].replay()
        return self._logits[: len(self._current)]

    def positions(self) -> torch.Tensor:
        """Return the positions of the tokens that will be sampled from the logits of `forward`: `[slots]`
        int64."""
        return self._decodes.lens[: len(self._current)]

    def slots(self) -> torch.Tensor:
        """Return the current slots as a device tensor: `[slots]` int64."""
        return self._slots[: len(self._current)]

    def sample(self, variant: Variant) -> torch.Tensor:
        """Sample a token for each slot, store it as the slot's next input, and return the tokens.

        The result is `[slots]` int64, with BAD_TOKEN where no token could be sampled. The next call
        overwrites the result.
        """
        captured = self._samples[self._size(len(self._current)), variant]
        captured.graph.replay()
        return captured.token_ids[: len(self._current)]

    def _size(self, decodes: int) -> int:
        return size_for(decodes, self.sizes)

    # ── captured code ─────────────────────────────────────────────────────────────────────────

    def _forward(self, size: int, decoder: Decoder, kv: list[KvPool]) -> None:
        tables, slots, decodes = self._tables, self._slots[:size], self._decodes.first(size)
        place(slots, tables.last_tokens, tables.lengths, tables.block_table, decodes)
        table = tables.block_table
        inputs = ForwardInput(
            token_ids=decodes.token_ids,
            positions=decodes.positions,
            kv_slots=decodes.kv_slots,
            attention=AttentionInput(table, decodes.slots, decodes.lens, table.shape[1], []),
        )
        decoder.logits(decoder.forward(inputs, kv), out=self._logits[:size])

    def _sample(self, size: int, variant: Variant) -> torch.Tensor:
        tables, slots, positions = self._tables, self._slots[:size], self._decodes.lens[:size]
        draws = tables.sampling.draws(slots, positions)
        token_ids = self._sampler.draw(self._logits[:size], variant, draws)
        advance(slots, token_ids, positions, tables.last_tokens, tables.lengths)
        return token_ids
