"""Implements causal paged attention for prompt chunks (prefill), based on FlashAttention-2's loop (Dao 2023).

A tile's 128 rows contain the query heads of one KV head, for as many tokens as fit. Even a short chunk
therefore fills the tensor cores, and tiles on the diagonal waste little work. One launch computes all of a
pass's tiles, those with the most keys first. The host builds the tile list once per step for all layers
(`plan_tiles`). A tensor descriptor reads each page of a KV head as one contiguous tile. Pages that are
visible to every row of a tile are not masked.

With an FP8 cache, the pages that a pass reads are first expanded to the model's dtype, in a scratch pool
(`plan_expansion`, `expand`). Each page is therefore converted only once, instead of once per tile. Short
chunks, and chunks that do not fit into the scratch pool, read the FP8 pages directly and convert them to
float16. On Hopper, one instruction converts two values to float16, whereas a conversion to bfloat16 takes
several instructions.

On Hopper, long prompts use a different kernel, `attention_prefill_hopper`, with the same tiles
(`suits_hopper`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import PAGE_TOKENS, ChunkSpan

_LOG2_E = 1.4426950408889634

_LIFT = tl.constexpr(8.0)
"""Binary exponent of a factor (2**8) applied to float16 softmax weights, so that small weights do not become
subnormal in float16."""

_LOWEST = tl.constexpr(-1.0e30)
"""A row's initial running maximum. It is finite, so that a page without visible keys does not produce NaN.
Masked scores must be -inf, not this value. The compiler fuses `score × scale - largest` into one instruction
that does not round the product, so with this value, the difference could be about 1e20 instead of 0."""


@triton.jit(do_not_specialize=["table_stride"])
def _prefill_kernel(
    q,
    k_tiles,
    v_tiles,
    k_scales,
    v_scales,
    table,
    tiles,
    out,
    table_stride,
    q_stride,
    out_stride,
    scale,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
    EXPANDED: tl.constexpr,
    REREAD: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(0) % KV_HEADS
    record = tiles + tl.program_id(0) // KV_HEADS * 4
    first_token = tl.load(record)
    count = tl.load(record + 1)
    first_position = tl.load(record + 2)
    if EXPANDED:
        base = tl.load(record + 3)
    else:
        blocks = table + tl.load(record + 3).to(tl.int64) * table_stride

    row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, HEAD_DIM)
    real = (row < count * HEADS)[:, None]
    position = first_position + row // HEADS
    token = (first_token + row // HEADS).to(tl.int64)
    head = kv_head * HEADS + row % HEADS
    query = tl.load(
        q + token[:, None] * q_stride + (head * HEAD_DIM)[:, None] + dim[None, :], mask=real, other=0.0
    )
    query = query.to(COMPUTE)

    last_position = first_position + count - 1
    pages = last_position // 64 + 1
    # Pages `[inside, whole)` are visible to every row of the tile and need no mask.
    whole = (first_position + 1) // 64
    if WINDOW > 0:
        first = tl.maximum(first_position - WINDOW + 1, 0) // 64
        inside = tl.maximum(last_position - WINDOW + 64, 0) // 64
    else:
        first = first_position * 0
        inside = first
    LIFT: tl.constexpr = _LIFT if tl.float16 == COMPUTE else 0.0
    key = tl.arange(0, 64)
    m = tl.full([TILE_ROWS], _LOWEST, tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    acc = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)
    for page in tl.range(first, pages, num_stages=STAGES):
        if EXPANDED:
            tile = ((base + page) * KV_HEADS + kv_head) * 64
        else:
            tile = (tl.load(blocks + page).to(tl.int32) * KV_HEADS + kv_head) * 64
        k = k_tiles.load([tile, 0])
        scores = tl.dot(query, k.to(COMPUTE).T, input_precision=PRECISION)
        if SCALED:
            scores = scores * tl.load(k_scales + tile + key)[None, :]
        if (page >= whole) | (page < inside):
            place = page * 64 + key
            seen = place[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (place[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        m_new = tl.maximum(m, tl.max(scores, 1) * scale)
        old = tl.exp2(m - m_new)
        weights = tl.exp2(scores * scale - (m_new - LIFT)[:, None])
        total = total * old + tl.sum(weights, 1)
        if SCALED:
            weights = weights * tl.load(v_scales + tile + key)[None, :]
        acc = acc * old[:, None]
        v = v_tiles.load([tile, 0])
        acc = tl.dot(weights.to(COMPUTE), v.to(COMPUTE), acc, input_precision=PRECISION)
        m = m_new
    # Rows past the last token may have no visible key. Such rows contain NaN and are not stored.
    acc = acc / total[:, None]
    if REREAD:
        # Reload the tile's first token and token count, because keeping them would leave too few registers
        # for the loop. The different cache modifier keeps the compiler from merging these loads with the
        # earlier ones.
        count = tl.load(record + 1, cache_modifier=".ca")
        token = (tl.load(record, cache_modifier=".ca") + row // HEADS).to(tl.int64)
        real = (row < count * HEADS)[:, None]
    place = out + token[:, None] * out_stride + (head * HEAD_DIM)[:, None] + dim[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=real)


def tile_tokens(heads: int, kv_heads: int, tile_rows: int = 128) -> int:
    """Return the number of tokens in a full tile."""
    return max(1, tile_rows // (heads // kv_heads))


def plan_tiles(
    chunks: Sequence[ChunkSpan], heads: int, kv_heads: int, window: int | None = None, tile_rows: int = 128
) -> np.ndarray:
    """Return a pass's tiles, those with the most keys first: `[tiles, 4]` int32. The columns are the index of
    the first token in the pass, the number of tokens, the position of the first token, and the slot (row of
    the block table). The tiles are valid for every layer with this attention window."""
    step = tile_tokens(heads, kv_heads, tile_rows)
    parts = [np.empty((0, 4), dtype=np.int32)]
    for chunk in chunks:
        offset = np.arange(0, chunk.count, step, dtype=np.int32)
        part = np.empty((len(offset), 4), dtype=np.int32)
        part[:, 0] = chunk.first + offset
        part[:, 1] = np.minimum(step, chunk.count - offset)
        part[:, 2] = chunk.context + offset
        part[:, 3] = chunk.slot
        parts.append(part)
    tiles = np.concatenate(parts)
    keys = tiles[:, 1] + (tiles[:, 2] if window is None else np.minimum(tiles[:, 2], window))
    return tiles[np.argsort(-keys, kind="stable")]


HOPPER_ABOVE = 1024
"""Average number of keys per tile above which a pass uses `attention_prefill_hopper`. On an H200, that kernel
takes 5 to 27 % less time than the general kernel above this limit, the same time at half the limit, and 5 to
22 % more below that. It runs only one program per multiprocessor, so no other program can use the
multiprocessor while a tile starts or ends."""


def suits_hopper(
    tiles: np.ndarray, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, window: int | None
) -> bool:
    """Return whether a Hopper GPU should compute `tiles` (from `plan_tiles`) with `attention_prefill_hopper`.
    That kernel must support the shape, and the tiles must have so many keys that it is faster than the
    general kernel. dtype: dtype of queries, keys and values."""
    group = heads // kv_heads
    served = head_dim == 128 and 64 % group == 0 and window is None
    if not served or dtype not in (torch.bfloat16, torch.float16) or not len(tiles):
        return False
    return bool((tiles[:, 1] + tiles[:, 2]).mean() > HOPPER_ABOVE)


EXPAND_FROM = 64
"""Minimum length, in tokens, of chunks for which attention is faster if their FP8 pages are first
expanded."""


@dataclass(frozen=True, slots=True)
class Expansion:
    """Describes how a pass reads an FP8 cache. The three lists, of pages and tiles, are copied to the device
    and are valid for every layer with the same attention window."""

    pages: np.ndarray
    """Pages to expand, as (slot, block-table column) pairs: `[pages, 2]` int32. `expand` writes page i to
    scratch block i."""
    expanded: np.ndarray
    """Tiles (from `plan_tiles`) of the chunks that read the scratch pool. Their last column contains the
    scratch block of page 0 instead of the slot."""
    direct: np.ndarray
    """Tiles (from `plan_tiles`) of the chunks that read the FP8 pool directly."""


def plan_expansion(
    chunks: Sequence[ChunkSpan],
    heads: int,
    kv_heads: int,
    window: int | None,
    scratch_blocks: int,
    tile_rows: int = 128,
) -> Expansion:
    """Decide for each chunk of a pass whether it reads the scratch pool (of `scratch_blocks` blocks) or the
    FP8 pool."""
    direct, moved, pages, used = [], [], [], 0
    for chunk in chunks:
        first = 0 if window is None else max(0, chunk.context + 1 - window) // PAGE_TOKENS
        last = -(-chunk.end // PAGE_TOKENS)
        if chunk.count < EXPAND_FROM or used + last - first > scratch_blocks:
            direct.append(chunk)
            continue
        part = np.empty((last - first, 2), dtype=np.int32)
        part[:, 0] = chunk.slot
        part[:, 1] = np.arange(first, last, dtype=np.int32)
        pages.append(part)
        moved.append(ChunkSpan(chunk.first, chunk.count, chunk.context, used - first))
        used += last - first
    return Expansion(
        pages=np.concatenate(pages) if pages else np.empty((0, 2), dtype=np.int32),
        expanded=plan_tiles(moved, heads, kv_heads, window, tile_rows),
        direct=plan_tiles(direct, heads, kv_heads, window, tile_rows),
    )


@triton.jit(do_not_specialize=["table_stride"])
def _expand_kernel(
    keys,
    values,
    k_scales,
    v_scales,
    table,
    pages,
    out_keys,
    out_values,
    table_stride,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(0) % KV_HEADS
    page = tl.program_id(0) // KV_HEADS
    row = tl.load(pages + 2 * page).to(tl.int64)
    block = tl.load(table + row * table_stride + tl.load(pages + 2 * page + 1)).to(tl.int64)
    token = tl.arange(0, 64)
    place = token[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    tile = (block * KV_HEADS + kv_head) * 64
    target = (page * KV_HEADS + kv_head).to(tl.int64) * 64 * HEAD_DIM + place
    k = tl.load(keys + tile * HEAD_DIM + place).to(tl.float32) * tl.load(k_scales + tile + token)[:, None]
    v = tl.load(values + tile * HEAD_DIM + place).to(tl.float32) * tl.load(v_scales + tile + token)[:, None]
    tl.store(out_keys + target, k.to(out_keys.dtype.element_ty))
    tl.store(out_values + target, v.to(out_values.dtype.element_ty))


def expand(
    keys: torch.Tensor,
    values: torch.Tensor,
    k_scales: torch.Tensor,
    v_scales: torch.Tensor,
    block_table: torch.Tensor,
    pages: torch.Tensor,
    scratch_keys: torch.Tensor,
    scratch_values: torch.Tensor,
    pdl: bool = True,
) -> None:
    """Multiply FP8 pages by their scales and convert them to the queries' dtype. Page i of `pages`
    (`Expansion.pages` on the device) is written to scratch block i.

    keys, values: `[blocks, kv_heads, 64, head_dim]`, contiguous.
    k_scales, v_scales: `[blocks, kv_heads, 64]` float32.
    scratch_keys, scratch_values: `[scratch blocks, kv_heads, 64, head_dim]` in the queries' dtype.
    """
    _, kv_heads, _, head_dim = keys.shape
    if len(pages) > len(scratch_keys):
        raise ValueError(
            f"pages has {len(pages)} pages, but the scratch pool has only {len(scratch_keys)} blocks"
        )
    _expand_kernel[(len(pages) * kv_heads,)](
        keys,
        values,
        k_scales,
        v_scales,
        block_table,
        pages,
        scratch_keys,
        scratch_values,
        block_table.stride(0),
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        PDL=pdl,
        num_warps=4,
        launch_pdl=pdl,
    )


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """The prefill attention kernel's launch parameters."""

    tile_rows: int
    """Rows per tile, as passed to `plan_tiles`."""
    num_warps: int
    stages: int
    """Number of pipeline stages in the loop over pages. If a block table is read, some stages are used for
    page numbers and the rest for tiles."""
    maxnreg: int | None
    """Maximum number of registers per thread, or None for no limit."""


def config_for(head_dim: int, direct: bool, expanded: bool) -> PrefillConfig:
    """Return the prefill attention kernel's launch parameters. direct: whether the kernel reads an FP8 pool.
    expanded: whether it reads the scratch pool.

    Two programs run per multiprocessor, so that one can compute its softmax while the other uses the tensor
    cores. With 8 warps each, this leaves at most 128 registers per thread. These are too few to do other
    work during a matrix multiply-accumulate, so the compiled code waits for each one to finish. With 4 warps,
    it does not wait, but loops that read a block table or convert FP8 values spill slightly more registers.
    """
    if head_dim > 128:
        return PrefillConfig(128, 8, 2 if expanded else 3, None)
    if expanded:
        return PrefillConfig(128, 4, 2, None)
    return PrefillConfig(128, 4, 3, None) if direct else PrefillConfig(128, 8, 3, 128)


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor | None,
    tiles: torch.Tensor,
    scale: float,
    window: int | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = True,
    config: PrefillConfig | None = None,
) -> torch.Tensor:
    """Compute causal attention for prompt chunks: `[tokens, heads, head_dim]` in q's dtype. The chunks' keys
    and values must already be in the cache. Tokens outside all tiles keep their previous values in `out`.

    q: `[tokens, heads, head_dim]`, heads contiguous.
    keys, values: `[blocks, kv_heads, 64, head_dim]`, contiguous, in q's dtype, or float8_e4m3fn with
      `k_scales`, `v_scales` `[blocks, kv_heads, 64]` float32.
    block_table: `[slots, columns]` int32 or int64. Each row covers the context + count tokens of its chunk.
      If block_table is None, keys and values are the scratch pool, and tiles are `Expansion.expanded`.
    tiles: `plan_tiles` on the device, contiguous.
    window: each token attends to itself and the window - 1 tokens before it.

    The softmax is computed in float32.
    """
    _, heads, head_dim = q.shape
    blocks, kv_heads, _, _ = keys.shape
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    compute = q.dtype if keys.dtype == q.dtype else torch.float16
    lines = blocks * kv_heads * PAGE_TOKENS
    tile = [PAGE_TOKENS, head_dim]
    direct = k_scales is not None
    expanded = block_table is None
    table = tiles if block_table is None else block_table
    config = config or config_for(head_dim, direct, expanded)
    _prefill_kernel[(len(tiles) * kv_heads,)](
        q,
        TensorDescriptor(keys, [lines, head_dim], [head_dim, 1], tile),
        TensorDescriptor(values, [lines, head_dim], [head_dim, 1], tile),
        k_scales,
        v_scales,
        table,
        tiles,
        out,
        table.stride(0),
        q.stride(0),
        out.stride(0),
        scale * _LOG2_E,
        KV_HEADS=kv_heads,
        HEADS=heads // kv_heads,
        HEAD_DIM=head_dim,
        TILE_ROWS=config.tile_rows,
        WINDOW=window or 0,
        SCALED=direct,
        COMPUTE=_TRITON_DTYPES[compute],
        PRECISION="ieee" if compute == torch.float32 else "tf32",
        STAGES=config.stages,
        EXPANDED=expanded,
        REREAD=config.num_warps == 4,
        PDL=pdl,
        num_warps=config.num_warps,
        launch_pdl=pdl,
        maxnreg=config.maxnreg,
    )
    return out


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
