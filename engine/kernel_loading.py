"""Loading a GPU's kernels before anybody waits for them.

The driver loads a kernel when it is first launched, for which it waits until the device has nothing to do: in
a step of prompts, a stall of a tenth of a second for everybody who decodes. cuBLAS picks another kernel at
many numbers of rows, and so does our attention: passes with prompts are padded to those that were met here
(`engine.batch.Padding`), and decodes of one rank are captured. Several ranks' decodes are neither: they may
still meet a kernel at a number of rows between these.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from engine.forward import ForwardInput
from engine.messages import BLOCK_TOKENS
from engine.model.decoder import Decoder
from engine.sampler import LOGPROB_ROWS
from engine.sizing import product_ladder
from kernels import AttentionInput, ChunkSpan, KvPool, Residual


def load_kernels(
    decoder: Decoder, kv: list[KvPool], block_table: torch.Tensor, step_tokens: int, max_rows: int
) -> None:
    """Run the products of steps of prompts, the attention of their ends at every number of rows that those
    pad to (`sizing.product_ladder`), and that of long prompts; all else is loaded by the graphs and by steps
    that nobody asked for (`engine.rehearsal`). Every rank must call it; nothing is kept of it, the cache
    stays as it is, and it does not wait for the device."""
    load_products(decoder, step_tokens, max_rows)
    load_attention(decoder, kv, block_table, max_rows)
    load_long_prompts(decoder, kv, block_table)


def load_products(decoder: Decoder, step_tokens: int, max_rows: int) -> None:
    """Run a layer's products for numbers of tokens up to `step_tokens`, and the output matrix for those up to
    `max_rows`, or as many as are scored at once. Every rank must call it; nothing is kept of it, and it does
    not wait for the device."""
    config, shard, layer = decoder.config, decoder.shard, decoder.layers[0]
    eps, ranks = config.rms_norm_eps, decoder.ranks

    def zeros(rows: int, width: int) -> torch.Tensor:
        return torch.zeros((rows, width), dtype=decoder.dtype, device=decoder.device)

    rows = {*_few(max_rows), *product_ladder(step_tokens), *product_ladder(max_rows)}
    # The most first, so that torch's allocator finds room for all others in what it then has: upwards, each
    # would take memory of its own, some gigabytes together.
    for tokens in sorted(rows, reverse=True):
        residual = Residual(zeros(tokens, config.hidden_size))
        layer.attention.qkv.after_norm(residual, layer.input_norm, eps)
        attended = zeros(tokens, shard.heads * config.head_dim)
        residual = layer.attention.o.add_to(residual, attended, layer.post_norm, ranks)
        activated = layer.mlp.activate(residual, layer.post_norm, eps)
        layer.mlp.down.add_to(residual, activated, None, ranks)
    of_logits = {*_few(max_rows), *product_ladder(max(max_rows, LOGPROB_ROWS))}
    for count in sorted(of_logits, reverse=True):
        decoder.logits(zeros(count, config.hidden_size))


def load_attention(decoder: Decoder, kv: list[KvPool], block_table: torch.Tensor, max_rows: int) -> None:
    """Run the attention of decodes, and of decodes and ends of prompts in a pass with prompts, of padding
    alone."""
    for rows in {*_few(max_rows), *product_ladder(max_rows)}:
        nobody = torch.zeros(rows, dtype=torch.int64, device=decoder.device)
        decodes = AttentionInput(block_table, nobody, nobody, block_table.shape[1], [])
        for attended in (decodes, replace(decodes, queries=nobody)):
            _attend(decoder, kv, attended, rows)


def load_long_prompts(decoder: Decoder, kv: list[KvPool], block_table: torch.Tensor) -> None:
    """Run the attention of a chunk of padding far behind its prompt's beginning, where sequences get so long:
    a Hopper has a kernel of its own for these, which no other step need meet."""
    # Here, since a CPU can do without Triton.
    from kernels.triton.attention_prefill import EXPAND_FROM, HOPPER_ABOVE

    # Of so many tokens that an FP8 cache is expanded for them.
    if block_table.shape[1] * BLOCK_TOKENS < HOPPER_ABOVE + EXPAND_FROM:
        return
    nobody = torch.zeros(0, dtype=torch.int64, device=decoder.device)
    late = ChunkSpan(0, EXPAND_FROM, HOPPER_ABOVE, 0)
    _attend(decoder, kv, AttentionInput(block_table, nobody, nobody, 0, [late]), EXPAND_FROM)


def _attend(decoder: Decoder, kv: list[KvPool], attended: AttentionInput, tokens: int) -> None:
    """Run a layer's attention of each window in a pass of so many tokens of padding."""
    by_window = {
        layer.attention.window: (layer, pool) for layer, pool in zip(decoder.layers, kv, strict=True)
    }
    width = (decoder.shard.heads + 2 * decoder.shard.kv_heads) * decoder.config.head_dim
    nobody = torch.zeros(tokens, dtype=torch.int64, device=decoder.device)
    inputs = ForwardInput(nobody, nobody, nobody - 1, attended)  # slot -1: written nowhere
    for layer, pool in by_window.values():
        qkv = torch.zeros((tokens, width), dtype=decoder.dtype, device=decoder.device)
        layer.attention(qkv, inputs, decoder.ops.plan_attention(attended), pool, decoder.cos_sin)


def _few(most: int) -> set[int]:
    """Numbers of rows, up to `most`, in the first step of a ladder, that kernels tell apart."""
    return {rows for rows in (1, 2, 4) if rows <= most}
