"""Short passes of prompts as CUDA graphs: at a few hundred tokens the host takes longer to launch a pass,
kernel by kernel, than the device to compute it.

A pass is padded to the next captured number of tokens. Padding has slot -1, so it is written nowhere, and no
tile of attention, so it is read by nobody.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import RowTables
from engine.forward import ForwardInput, KvPool
from engine.messages import StepPlan
from engine.model.decoder import Decoder
from engine.transfer import upload
from kernels import AttentionInput, ChunkSpan
from kernels.triton.attention_prefill import plan_tiles, tile_tokens

SIZES = (16, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024)
"""Tokens of the captured passes. Beyond, the device takes longer than the host."""

MOST_CHUNKS = 4
"""Prompts in one pass."""


class PromptGraphs:
    """Captured passes of one rank in which nobody decodes. `capture` once; then `forward` for each plan that
    `fits`."""

    def __init__(self, decoder: Decoder, kv: list[KvPool], tables: RowTables, step_tokens: int) -> None:
        self._decoder, self._kv, self._tables = decoder, kv, tables
        self.sizes = [size for size in SIZES if size <= step_tokens]
        shard = decoder.shard
        self._heads = (shard.heads, shard.kv_heads)
        self._tile_tokens = tile_tokens(*self._heads)
        self._windows = list(dict.fromkeys(decoder.config.sliding_windows))
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        most = self.sizes[-1] if self.sizes else 0
        # One buffer, so that one transfer fills it: token ids, positions and slots; which tokens' logits are
        # wanted; the tiles of each window (four int32 each).
        self._most = most
        self._tiles_at = 3 * most + MOST_CHUNKS
        size = self._tiles_at + 2 * len(self._windows) * self._most_tiles(most)
        self._inputs = torch.zeros(size, dtype=torch.int64, device=tables.device)
        self._logits = torch.empty((MOST_CHUNKS, shard.vocab), dtype=decoder.dtype, device=tables.device)

    def capture(self) -> None:
        """Capture every size, the largest first."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for size in reversed(self.sizes):
                self._stage([], size)
                self._run(size)
                self._graphs[size] = torch.cuda.CUDAGraph()
                self._graphs[size].capture_begin(pool=pool)
                self._run(size)
                self._graphs[size].capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def fits(self, plan: StepPlan) -> bool:
        """Whether a plan has a graph: few prompts, of few tokens, each to its end, and nothing else."""
        return (
            not plan.decodes
            and 0 < len(plan.chunks) <= MOST_CHUNKS
            and sum(len(chunk.token_ids) for chunk in plan.chunks) <= self._most
            and all(chunk.sample_rows and chunk.prompt_logprobs is None for chunk in plan.chunks)
        )

    def forward(self, plan: StepPlan) -> torch.Tensor:
        """Run the plan's pass: `[chunks, vocabulary on this rank]` logits of each chunk's last token, which
        the next pass overwrites."""
        parts, spans, first = [], [], 0
        for chunk in plan.chunks:
            parts.append(self._tables.chunk_inputs(chunk))
            spans.append(ChunkSpan(first, len(chunk.token_ids), chunk.start, chunk.row))
            first += len(chunk.token_ids)
        size = next(size for size in self.sizes if size >= first)
        self._stage(spans, size, np.concatenate(parts, axis=1))
        self._replay(size)
        return self._logits[: len(spans)]

    def _replay(self, size: int) -> None:
        self._graphs[size].replay()

    def _most_tiles(self, size: int) -> int:
        return -(-size // self._tile_tokens) + MOST_CHUNKS

    def _stage(self, spans: list[ChunkSpan], size: int, tokens: np.ndarray | None = None) -> None:
        """tokens: `[3, count]` int64, as `RowTables.chunk_inputs`."""
        most, tiles = self._most, self._most_tiles(size)
        staged = np.zeros(len(self._inputs), dtype=np.int64)
        staged[2 * most : 3 * most] = -1
        if tokens is not None:
            staged[: 3 * most].reshape(3, most)[:, : tokens.shape[1]] = tokens
        for i, span in enumerate(spans):
            staged[3 * most + i] = span.first + span.count - 1
        for i, window in enumerate(self._windows):
            made = plan_tiles(spans, *self._heads, window)
            at = self._tiles_at + 2 * i * tiles
            staged[at : at + 2 * len(made)] = np.ascontiguousarray(made).view(np.int64).reshape(-1)
        self._inputs.copy_(upload(staged, self._inputs.device), non_blocking=True)

    # ── what is captured ─────────────────────────────────────────────────────────────────────────

    def _run(self, size: int) -> None:
        most = self._most
        inputs = ForwardInput(
            token_ids=self._inputs[:size],
            positions=self._inputs[most : most + size],
            slots=self._inputs[2 * most : 2 * most + size],
            attention=self._attention(size),
            logit_index=self._inputs[3 * most : self._tiles_at],
        )
        hidden = self._decoder.forward(inputs, self._kv)
        self._decoder.logits(hidden.index_select(0, inputs.logit_index), out=self._logits)

    def _attention(self, size: int) -> AttentionInput:
        tiles = self._most_tiles(size)
        by_window = {}
        for i, window in enumerate(self._windows):
            at = self._tiles_at + 2 * i * tiles
            by_window[window] = self._inputs[at : at + 2 * tiles].view(torch.int32).view(tiles, 4)
        nobody = self._inputs[:0]
        return AttentionInput(self._tables.block_table, nobody, nobody, 0, [], by_window)
