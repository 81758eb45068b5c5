"""Every launch of serving a model, on meta tensors: what `compiling.record` is to note.

The passes of a decoder at every number of tokens at which some launcher decides differently, and each way to
sample. Which kernels those are, and how they are specialised, is left to the operations themselves.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import torch

from kernels import (
    PAGE_TOKENS,
    Activation,
    AttentionInput,
    ChunkSpan,
    Fp8Weight,
    KvPool,
    Residual,
    Rotation,
    Weight,
)
from kernels.compiling import Gpu
from kernels.cuda import CudaOps
from kernels.dimensions import Dimensions
from kernels.draws import Draws, Logits
from kernels.triton import sampling
from kernels.triton.attention_prefill import EXPAND_FROM, HOPPER_ABOVE
from kernels.triton.decode_step import advance, empty_decodes, place
from kernels.triton.linear_table import Table

_META = torch.device("meta")
_EPS = 1e-5
_EVERY = 130
"""All numbers of tokens up to here are tried: products of few rows change from one to the next."""
_BLOCKS = 64
"""Of the KV pool, and of the expansion of an FP8 one: kernels do not depend on how many."""
_MULTIPROCESSORS = 132
"""Nor on this."""


def launch_all(dimensions: Dimensions, table: Table, gpu: Gpu) -> None:
    """Launch what any rank that serves `dimensions` launches on such a GPU."""
    layers = _Layers(dimensions, table, gpu)
    for tokens in _token_counts(dimensions):
        for window in dimensions.windows:
            if tokens <= dimensions.max_rows:
                layers.launch(tokens, window, _decodes(dimensions, tokens))
                layers.launch(tokens, window, _ends(dimensions, tokens))
            layers.launch(tokens, window, _chunk(dimensions, tokens))
    for window in dimensions.windows:
        layers.launch(EXPAND_FROM, window, _chunk(dimensions, EXPAND_FROM, HOPPER_ABOVE))
    for rows in {1, min(2, dimensions.max_rows), dimensions.max_rows}:
        for rank in range(dimensions.tensor_parallel):
            _launch_sampling(dimensions, rank, rows)
        _launch_rows(dimensions, rows)


def _token_counts(dimensions: Dimensions) -> list[int]:
    """Beyond the small ones, powers of two and the numbers after them."""
    most = max(dimensions.max_rows, dimensions.step_tokens)
    powers = [1 << bits for bits in range(most.bit_length())]
    counts = {*range(1, _EVERY), *powers, *(power + 1 for power in powers), most, dimensions.max_rows}
    return sorted(count for count in counts if count <= most)


# ── a pass ───────────────────────────────────────────────────────────────────────────────────────────


class _Layers:
    """One layer and the output matrix, as `engine.model.decoder` runs them."""

    def __init__(self, dimensions: Dimensions, table: Table, gpu: Gpu) -> None:
        self._d = dimensions
        expansion_blocks = _BLOCKS if dimensions.kv_fp8 else 0
        multiprocessors = _MULTIPROCESSORS if gpu.hopper else 0
        self._ops = CudaOps(expansion_blocks, table, pdl=gpu.pdl, hopper_multiprocessors=multiprocessors)
        self._weights = {
            name: _weight(dimensions, n, k, dimensions.fp8 and name != "lm_head")
            for name, (n, k) in dimensions.products.items()
        }
        self._gain = self._numbers(dimensions.hidden)
        head_gain = self._numbers(dimensions.head_dim) if dimensions.qk_norm else None
        cos_sin = torch.empty((2 * _BLOCKS, dimensions.head_dim), dtype=torch.float32, device=_META)
        self._rotation = Rotation(cos_sin, head_gain, head_gain, _EPS)
        pool = (_BLOCKS, dimensions.rank_kv_heads, PAGE_TOKENS, dimensions.head_dim)
        dtype = torch.float8_e4m3fn if dimensions.kv_fp8 else dimensions.torch_dtype
        self._pool = KvPool(*(torch.empty(pool, dtype=dtype, device=_META) for _ in range(2)))
        if dimensions.kv_fp8:
            scales = (torch.empty(pool[:3], dtype=torch.float32, device=_META) for _ in range(2))
            self._pool.k_scales, self._pool.v_scales = scales

    def launch(self, tokens: int, window: int | None, attention: AttentionInput) -> None:
        """One pass of `tokens` tokens through the layer, as the first and as one of many, and the output
        matrix."""
        d, ops, weights = self._d, self._ops, self._weights
        residual = Residual(self._numbers(tokens, d.hidden))
        of_qkv = (self._gain, _EPS, weights["qkv"], self._bias("qkv", d.qkv_bias))
        qkv = ops.norm_linear(residual, *of_qkv)
        positions, slots = (torch.empty(tokens, dtype=torch.int64, device=_META) for _ in range(2))
        cached = (self._rotation, self._pool, d.rank_heads)
        seen = (ops.plan_attention(attention), d.head_dim**-0.5, window)
        attended = ops.attend(qkv, positions, slots, *cached, *seen)
        residual = self._add(attended.view(tokens, -1), "o", residual, d.o_bias, self._gain)
        up_bias = self._bias("gate_up", d.mlp_bias)
        activated = ops.norm_gate_up(residual, self._gain, _EPS, weights["gate_up"], up_bias)
        ops.norm_linear(self._add(activated, "down", residual, d.mlp_bias, self._gain), *of_qkv)
        last = self._add(activated, "down", residual, d.mlp_bias, None)
        if tokens <= d.max_rows:
            ops.norm_linear(last, self._gain, _EPS, weights["lm_head"], None)

    def _add(
        self, x: Activation, name: str, residual: Residual, biased: bool, next_gain: torch.Tensor | None
    ) -> Residual:
        """A product that ends a half of the layer. Split models sum it over the ranks, of which the first
        adds the bias."""
        weight, bias = self._weights[name], self._bias(name, biased)
        if self._d.tensor_parallel == 1:
            return self._ops.linear_add(x, weight, bias, residual, next_gain)
        for one in {bias, None}:
            self._ops.linear(x, weight, one)
        return Residual(residual.values)

    def _bias(self, name: str, biased: bool) -> torch.Tensor | None:
        return self._numbers(self._d.products[name][0]) if biased else None

    def _numbers(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._d.torch_dtype, device=_META)


def _weight(dimensions: Dimensions, n: int, k: int, fp8: bool) -> Weight:
    if not fp8:
        return torch.empty((n, k), dtype=dimensions.torch_dtype, device=_META)
    values = torch.empty((n, k), dtype=torch.float8_e4m3fn, device=_META)
    return Fp8Weight(values, torch.empty(n, dtype=torch.float32, device=_META))


def _decodes(dimensions: Dimensions, tokens: int) -> AttentionInput:
    rows, lens = (torch.empty(tokens, dtype=torch.int64, device=_META) for _ in range(2))
    return AttentionInput(_block_table(dimensions), rows, lens, _BLOCKS, [])


def _ends(dimensions: Dimensions, tokens: int) -> AttentionInput:
    """Decodes, and the ends of prompts, in a pass with prompts: all of what is cached is there already."""
    queries = torch.empty(tokens, dtype=torch.int64, device=_META)
    return replace(_decodes(dimensions, tokens), queries=queries)


def _chunk(dimensions: Dimensions, tokens: int, context: int = 0) -> AttentionInput:
    nobody = torch.empty(0, dtype=torch.int64, device=_META)
    # The longer ones have no room in the expansion of an FP8 cache, and read that themselves.
    return AttentionInput(_block_table(dimensions), nobody, nobody, 0, [ChunkSpan(0, tokens, context, 0)])


def _block_table(dimensions: Dimensions) -> torch.Tensor:
    return torch.empty((dimensions.max_rows, _BLOCKS), dtype=torch.int64, device=_META)


# ── sampling and the tables ──────────────────────────────────────────────────────────────────────────


def _launch_sampling(dimensions: Dimensions, rank: int, rows: int) -> None:
    """Every way to sample, from a rank's logits and, of a split model, from all."""
    d, ranks = dimensions, dimensions.tensor_parallel
    indices = torch.empty(rows, dtype=torch.int64, device=_META)
    floats = torch.empty((d.max_rows, 7), dtype=torch.float32, device=_META)
    tables = (torch.empty(d.max_rows, dtype=torch.int64, device=_META) for _ in range(2))
    draws = Draws(indices, indices, next(tables), floats, next(tables))
    hashes = torch.empty(d.vocab, dtype=torch.int32, device=_META)

    def logits(columns: int, width: int, first: int, indexed: bool) -> Logits:
        values = torch.empty((rows, width), dtype=d.torch_dtype, device=_META)
        index = indices if indexed else None
        return Logits(values, columns, first, hashes[first : first + columns], index)

    if ranks > 1:
        first = min(rank * d.rank_vocab, d.vocab)
        for indexed in (False, True):
            part = logits(min(d.rank_vocab, d.vocab - first), d.rank_vocab, first, indexed)
            sampling.greedy(part)
            sampling.plain(part, draws)
    slots = torch.empty(rows, dtype=torch.int64, device=_META)
    counts = torch.empty((1, d.vocab), dtype=torch.int32, device=_META)
    values = torch.empty(rows, dtype=torch.float32, device=_META)
    edited = torch.empty((rows, d.vocab), dtype=torch.float32, device=_META)
    for indexed in (False, True):
        whole = logits(d.vocab, d.rank_vocab * ranks, 0, indexed)
        for kept, of_rows in ((None, None), (counts, None), (counts, slots)):
            sampling.edit(
                whole, draws, indices, kept, of_rows, (indices, indices, values), (indices, indices)
            )
        changed = Logits(whole.values, whole.columns, 0, hashes, whole.index, edited, indices)
        for source, way in product((whole, changed), (sampling.plain, sampling.full)):
            way(source, draws)
        for source in (whole, changed):
            sampling.greedy(source)


def _launch_rows(dimensions: Dimensions, rows: int) -> None:
    indices = torch.empty(rows, dtype=torch.int64, device=_META)
    tokens, lengths = (torch.empty(dimensions.max_rows, dtype=torch.int64, device=_META) for _ in range(2))
    decodes = empty_decodes(rows, _META)
    place(indices, tokens, lengths, _block_table(dimensions), decodes)
    advance(indices, decodes.token_ids, decodes.lens, tokens, lengths)
