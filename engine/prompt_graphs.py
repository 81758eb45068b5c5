"""Short passes of prompts as CUDA graphs: at a few hundred tokens the host takes longer to launch a pass,
kernel by kernel, than the device to compute it.

A pass is padded to the next captured number of tokens. Padding has slot -1, so it is written nowhere, and no
tile of attention, so it is read by nobody.

An FP8 cache is read as it is, not expanded first: what is expanded depends on the plan. That is slower where
much is read, so passes with long contexts have no graph (`MOST_FP8_KEYS`); the host is ahead of those anyway.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.batch import RowTables
from engine.forward import ForwardInput
from engine.messages import StepPlan
from engine.model.decoder import Decoder
from engine.sizing import prompt_ladder, size_for
from engine.transfer import upload
from kernels import AttentionInput, ChunkSpan, KvPool
from kernels.triton.attention_prefill import plan_tiles, tile_tokens

MOST_CHUNKS = 4
"""Prompts in one pass."""

MOST_FP8_KEYS = 4096
"""Tokens of an FP8 cache that the prompts of one pass may read. Over more, attention of 512 tokens of an 8B
model takes the device as long as the host takes to launch the pass."""


class PromptGraphs:
    """Captured passes of one rank in which nobody decodes. `capture` once; then `stage` and `forward` for
    each plan that `fits`."""

    def __init__(self, decoder: Decoder, kv: list[KvPool], tables: RowTables, step_tokens: int) -> None:
        self._decoder, self._kv, self._tables = decoder, kv, tables
        self.sizes = prompt_ladder(step_tokens)
        shard = decoder.shard
        self._heads = (shard.heads, shard.kv_heads)
        self._tile_tokens = tile_tokens(*self._heads)
        self._windows = list(dict.fromkeys(decoder.config.sliding_windows))
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._staged = (0, 0)
        """The captured size of what was staged, and its chunks."""
        self._most = self.sizes[-1] if self.sizes else 0
        # One chunk a row, so that logits have no more rows than those of decode steps.
        self._most_chunks = min(MOST_CHUNKS, len(tables.lengths))
        # One buffer, so that one transfer fills it: token ids, positions and slots; the tiles of each window
        # (four int32 each, so 16 bytes, on which kernels may rely); of each chunk its last token, its row of
        # the block table and its tokens in the cache.
        self._tiles_at = 3 * self._most
        self._ends_at = self._tiles_at + 2 * len(self._windows) * self._most_tiles(self._most)
        size = self._ends_at + 3 * self._most_chunks
        self._inputs = torch.zeros(size, dtype=torch.int64, device=tables.device)
        self._logits = torch.empty(
            (self._most_chunks, shard.vocab), dtype=decoder.dtype, device=tables.device
        )

    def capture(self) -> None:
        """Capture every size, the largest first."""
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for size in reversed(self.sizes):
                self._send([], size)
                self._run(size)
                self._graphs[size] = torch.cuda.CUDAGraph()
                self._graphs[size].capture_begin(pool=pool)
                self._run(size)
                self._graphs[size].capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def launch(self) -> None:
        """Launch every kernel that `capture` captures, without capturing."""
        for size in self.sizes:
            self._run(size)

    def fits(self, plan: StepPlan) -> bool:
        """Whether a plan has a graph: few prompts, of few tokens, each to its end, and nothing else."""
        chunks = plan.chunks
        keys = sum(chunk.start + len(chunk.token_ids) for chunk in chunks)
        return (
            not plan.decodes
            and 0 < len(chunks) <= self._most_chunks
            and sum(len(chunk.token_ids) for chunk in chunks) <= self._most
            and not (self._decoder.kv_fp8 and keys > MOST_FP8_KEYS)
            and all(chunk.sample_rows and chunk.prompt_logprobs is None for chunk in chunks)
        )

    def stage(self, plan: StepPlan) -> None:
        """Send what the plan's pass reads."""
        parts, spans, first = [], [], 0
        for chunk in plan.chunks:
            parts.append(self._tables.chunk_inputs(chunk))
            spans.append(ChunkSpan(first, len(chunk.token_ids), chunk.start, chunk.row))
            first += len(chunk.token_ids)
        self._staged = (size_for(first, self.sizes), len(spans))
        self._send(spans, self._staged[0], np.concatenate(parts, axis=1))

    def forward(self) -> torch.Tensor:
        """Run the pass that was staged: `[chunks, vocabulary on this rank]` logits of each chunk's last
        token, which the next pass overwrites."""
        size, chunks = self._staged
        self._replay(size)
        return self._logits[:chunks]

    def _replay(self, size: int) -> None:
        self._graphs[size].replay()

    def _most_tiles(self, size: int) -> int:
        return -(-size // self._tile_tokens) + self._most_chunks

    def _send(self, spans: list[ChunkSpan], size: int, tokens: np.ndarray | None = None) -> None:
        """tokens: `[3, count]` int64, as `RowTables.chunk_inputs`."""
        most, tiles = self._most, self._most_tiles(size)
        staged = np.zeros(len(self._inputs), dtype=np.int64)
        staged[2 * most : 3 * most] = -1
        if tokens is not None:
            staged[: 3 * most].reshape(3, most)[:, : tokens.shape[1]] = tokens
        ends = staged[self._ends_at :].reshape(3, self._most_chunks)
        for i, span in enumerate(spans):
            ends[:, i] = span.last, span.slot, span.end
        for i, window in enumerate(self._windows):
            made = plan_tiles(spans, *self._heads, window)
            at = self._tiles_at + 2 * i * tiles
            staged[at : at + 2 * len(made)] = np.ascontiguousarray(made).view(np.int64).reshape(-1)
        self._inputs.copy_(upload(staged, self._inputs.device), non_blocking=True)

    # ── what is captured ─────────────────────────────────────────────────────────────────────────

    def _run(self, size: int) -> None:
        most = self._most
        queries, rows, lens = self._inputs[self._ends_at :].view(3, self._most_chunks).unbind()
        table = self._tables.block_table
        inputs = ForwardInput(
            token_ids=self._inputs[:size],
            positions=self._inputs[most : most + size],
            slots=self._inputs[2 * most : 2 * most + size],
            attention=self._attention(size),
            ends=AttentionInput(table, rows, lens, table.shape[1], [], queries=queries),
        )
        self._decoder.logits(self._decoder.forward(inputs, self._kv), out=self._logits)

    def _attention(self, size: int) -> AttentionInput:
        tiles = self._most_tiles(size)
        by_window = {}
        for i, window in enumerate(self._windows):
            at = self._tiles_at + 2 * i * tiles
            by_window[window] = self._inputs[at : at + 2 * tiles].view(torch.int32).view(tiles, 4)
        nobody = self._inputs[:0]
        return AttentionInput(self._tables.block_table, nobody, nobody, 0, [], by_window)
