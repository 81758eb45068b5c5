"""Captures short forward passes of prompts as CUDA graphs and replays them. For passes of up to a few hundred
tokens, the host takes longer to launch the kernels one by one than the device takes to run them.

Each pass is padded to the next captured number of tokens. Padding tokens have KV slot -1, so nothing is
written to the cache for them. No attention tile contains them, so their attention is not computed.

Captured passes read an FP8 cache directly. They cannot expand the cache to the model's dtype first, because
the number of blocks to expand depends on the plan. Direct reads are slow for long contexts, so passes with
more than `MAX_FP8_KEYS` cached tokens do not use the graphs. Such passes do not need graphs, because the host
launches their kernels faster than the device runs them.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.device_tables import SlotTables
from engine.forward import ForwardInput
from engine.model.decoder import Decoder
from engine.plan import StepPlan
from engine.progress import ProgressCallback
from engine.rank_messages import Progress
from engine.sizing import prompt_capture_sizes, size_for
from engine.transfer import upload
from kernels import AttentionInput, ChunkSpan, KvPool
from kernels.triton.attention_prefill import plan_tiles, tile_tokens

MAX_CHUNKS = 4
"""Maximum number of prompts in a captured pass."""

MAX_FP8_KEYS = 4096
"""Maximum number of FP8 cache tokens read by a captured pass. At this limit, the device takes as long to
compute attention (8B model, 512 tokens) as the host takes to launch the pass."""


class PromptGraphs:
    """Captured forward passes of one rank, for plans without decodes. Call `capture` once, then `stage` and
    `forward` for each plan that `fits` accepts.
    """

    def __init__(
        self, decoder: Decoder, kv: list[KvPool], tables: SlotTables, max_num_batched_tokens: int
    ) -> None:
        self._decoder, self._kv, self._tables = decoder, kv, tables
        self.sizes = prompt_capture_sizes(max_num_batched_tokens)
        shard = decoder.shard
        self._heads = (shard.heads, shard.kv_heads)
        self._tile_tokens = tile_tokens(*self._heads)
        self._windows = list(dict.fromkeys(decoder.config.sliding_windows))
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._staged = (0, 0)
        """Number of tokens in the graph for the staged pass, and number of chunks in the pass."""
        self._max_tokens = self.sizes[-1] if self.sizes else 0
        # Each chunk has its own slot, so there are at most as many logit rows as slots.
        self._max_chunks = min(MAX_CHUNKS, len(tables.lengths))
        # All inputs are in one buffer, so that a single transfer fills them. The buffer contains token ids,
        # positions and KV slot indices, followed by the tiles of each attention window. A tile has four int32
        # and is aligned to 16 bytes, as the kernels require. At the end are each chunk's logits index, slot
        # and number of cached tokens.
        self._tiles_at = 3 * self._max_tokens
        self._logits_at = self._tiles_at + 2 * len(self._windows) * self._max_tiles(self._max_tokens)
        size = self._logits_at + 3 * self._max_chunks
        self._inputs = torch.zeros(size, dtype=torch.int64, device=tables.device)
        self._logits = torch.empty((self._max_chunks, shard.vocab), dtype=decoder.dtype, device=tables.device)

    def capture(self, progress: ProgressCallback) -> None:
        """Capture the graphs for all sizes, largest first. Before each capture, a pass of a few layers loads
        the kernels and allocates their workspaces."""
        few = self._decoder.representative(self._kv)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for done, size in enumerate(reversed(self.sizes)):
                progress(Progress("warm up", done, len(self.sizes), "graphs", "prompt passes"))
                self._send([], size)
                self._run(size, *few)
                self._graphs[size] = torch.cuda.CUDAGraph()
                self._graphs[size].capture_begin(pool=pool)
                self._run(size, self._decoder, self._kv)
                self._graphs[size].capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def launch(self) -> None:
        """Launch every kernel in the captured graphs once, without capturing a graph."""
        for size in self.sizes:
            self._run(size, self._decoder, self._kv)

    def fits(self, plan: StepPlan) -> bool:
        """Return whether the plan's forward pass can be replayed from a graph. The plan must have no decodes,
        and only a few short chunks that each complete their prompt."""
        chunks = plan.chunks
        keys = sum(chunk.start + len(chunk.token_ids) for chunk in chunks)
        return (
            not plan.decodes
            and 0 < len(chunks) <= self._max_chunks
            and sum(len(chunk.token_ids) for chunk in chunks) <= self._max_tokens
            and not (self._decoder.kv_fp8 and keys > MAX_FP8_KEYS)
            and all(chunk.sample_slots and chunk.prompt_logprobs is None for chunk in chunks)
        )

    def stage(self, plan: StepPlan) -> None:
        """Transfer the input for the plan's forward pass to the device."""
        parts, spans, first = [], [], 0
        for chunk in plan.chunks:
            parts.append(self._tables.chunk_inputs(chunk))
            spans.append(ChunkSpan(first, len(chunk.token_ids), chunk.start, chunk.slot))
            first += len(chunk.token_ids)
        self._staged = (size_for(first, self.sizes), len(spans))
        self._send(spans, self._staged[0], np.concatenate(parts, axis=1))

    def forward(self) -> torch.Tensor:
        """Run the staged forward pass and return the logits of each chunk's last token:
        `[chunks, vocabulary on this rank]`. The next pass overwrites the result."""
        size, chunks = self._staged
        self._replay(size)
        return self._logits[:chunks]

    def _replay(self, size: int) -> None:
        self._graphs[size].replay()

    def _max_tiles(self, size: int) -> int:
        return -(-size // self._tile_tokens) + self._max_chunks

    def _send(self, spans: list[ChunkSpan], size: int, tokens: np.ndarray | None = None) -> None:
        """Fill the input buffer. `tokens` is `[3, count]` int64, from `SlotTables.chunk_inputs`."""
        most, tiles = self._max_tokens, self._max_tiles(size)
        staged = np.zeros(len(self._inputs), dtype=np.int64)
        staged[2 * most : 3 * most] = -1
        if tokens is not None:
            staged[: 3 * most].reshape(3, most)[:, : tokens.shape[1]] = tokens
        last = staged[self._logits_at :].reshape(3, self._max_chunks)
        for i, span in enumerate(spans):
            last[:, i] = span.last, span.slot, span.end
        for i, window in enumerate(self._windows):
            made = plan_tiles(spans, *self._heads, window)
            at = self._tiles_at + 2 * i * tiles
            staged[at : at + 2 * len(made)] = np.ascontiguousarray(made).view(np.int64).reshape(-1)
        self._inputs.copy_(upload(staged, self._inputs.device), non_blocking=True)

    # ── captured code ─────────────────────────────────────────────────────────────────────────

    def _run(self, size: int, decoder: Decoder, kv: list[KvPool]) -> None:
        most = self._max_tokens
        queries, slots, lens = self._inputs[self._logits_at :].view(3, self._max_chunks).unbind()
        table = self._tables.block_table
        inputs = ForwardInput(
            token_ids=self._inputs[:size],
            positions=self._inputs[most : most + size],
            kv_slots=self._inputs[2 * most : 2 * most + size],
            attention=self._attention(size),
            logits_attention=AttentionInput(table, slots, lens, table.shape[1], [], queries=queries),
        )
        decoder.logits(decoder.forward(inputs, kv), out=self._logits)

    def _attention(self, size: int) -> AttentionInput:
        tiles = self._max_tiles(size)
        by_window = {}
        for i, window in enumerate(self._windows):
            at = self._tiles_at + 2 * i * tiles
            by_window[window] = self._inputs[at : at + 2 * tiles].view(torch.int32).view(tiles, 4)
        empty = self._inputs[:0]
        return AttentionInput(self._tables.block_table, empty, empty, 0, [], by_window)
