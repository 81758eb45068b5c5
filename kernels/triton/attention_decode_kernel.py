# mypy: allow-untyped-defs
"""Contains the paged decode attention kernel and its helper functions, for
`kernels.triton.attention_decode`."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.triton.new_tokens import angles, rounded, turned

_LIFT = tl.constexpr(8.0)
"""With an FP8 cache, softmax weights are scaled by 2**8, so that a long sequence's small weights do not
become subnormal in float16. The factor cancels in the final division."""


@triton.jit
def _pages_of(length, WINDOW: tl.constexpr):
    """Return the index of the first page that a sequence's query attends to, and the number of such pages."""
    last = (length + 63) // 64
    first = tl.maximum(length - WINDOW, 0) // 64 if WINDOW > 0 else length * 0
    return first, last - first


@triton.jit
def _spread(tile, SPREAD: tl.constexpr):
    """Permute the columns of a `[64, n]` tile: column c moves to (c % SPREAD) × (n / SPREAD) + c / SPREAD. In
    the tensor-core layout, each thread's groups of 8 columns are n / SPREAD columns apart. The permutation
    lets a thread load SPREAD adjacent columns as words instead of single bytes."""
    n: tl.constexpr = tile.shape[1]
    return tile.reshape(tile.shape[0], n // SPREAD, SPREAD).permute(0, 2, 1).reshape(tile.shape[0], n)


@triton.jit
def _gather(tile, SPREAD: tl.constexpr):
    """Invert the permutation of `_spread`."""
    n: tl.constexpr = tile.shape[1]
    return tile.reshape(tile.shape[0], SPREAD, n // SPREAD).permute(0, 2, 1).reshape(tile.shape[0], n)


@triton.jit
def _combine(
    partial,
    stats,
    pieces,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    AT_ONCE: tl.constexpr,
):
    """Combine `pieces` splits of a sequence and normalise the result: `[GROUP, HEAD_DIM]`. `partial` and
    `stats` point to the first split. The loop processes one split at a time, so that threads need not
    synchronise. Up to AT_ONCE loads are in flight at a time."""
    group = tl.arange(0, GROUP)
    place = group[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :]
    m = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, HEAD_DIM], tl.float32)
    for start in range(0, pieces, AT_ONCE):
        for ahead in tl.static_range(AT_ONCE):
            slot = tl.minimum(start + ahead, pieces - 1) * (KV_HEADS * GROUP)
            part = tl.load(partial + slot * HEAD_DIM + place, cache_modifier=".cg")
            top = tl.load(stats + 2 * slot + group, cache_modifier=".cg")
            sums = tl.load(stats + 2 * slot + GROUP + group, cache_modifier=".cg")
            top = tl.where(start + ahead < pieces, top, float("-inf"))
            m_new = tl.maximum(m, top)
            old = tl.exp2(m - m_new)
            weight = tl.exp2(top - m_new)
            total = total * old + sums * weight
            acc = acc * old[:, None] + part * weight[:, None]
            m = m_new
    return acc / total[:, None]


@triton.jit
def _attend(
    query,
    k,
    v,
    k_scales,
    v_scales,
    tile,
    start,
    cached,
    oldest,
    scale,
    m,
    total,
    acc,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Update the running maximum m, the softmax sum and the weighted values with the queries' attention to
    one page of keys and values `[64, HEAD_DIM]`. tile: index of the page's first row in the cache. start:
    position of the page's first token. cached: number of tokens in the cache. oldest: first position in the
    window."""
    token = tl.arange(0, 64)
    lift: tl.constexpr = _LIFT if SCALED else 0.0
    scores = tl.dot(query, k.to(COMPUTE).T, input_precision=PRECISION)
    if SCALED:
        scale = (tl.load(k_scales + tile + token) * scale)[None, :]
    scores = scores * scale
    position = start + token
    seen = position < cached
    if WINDOW > 0:
        seen = seen & (position >= oldest)
    scores = tl.where(seen[None, :], scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, 1))
    old = tl.exp2(m - m_new)
    if SCALED:
        weights = tl.exp2(scores - (m_new - lift)[:, None])
        total = total * old + tl.sum(weights, 1)
        weights = weights * tl.load(v_scales + tile + token)[None, :]
        v = _spread(v, SPREAD)
    else:
        weights = tl.exp2(scores - m_new[:, None])
        total = total * old + tl.sum(weights, 1)
    acc = tl.dot(weights.to(COMPUTE), v.to(COMPUTE), acc * old[:, None], input_precision=PRECISION)
    return m_new, total, acc


@triton.jit(do_not_specialize=["sequences", "items", "table_stride"])
def decode_kernel(
    q,
    k_tiles,
    v_tiles,
    k_scales,
    v_scales,
    table,
    rows,
    lens,
    out,
    partial,
    stats,
    arrived,
    sequences,
    items,
    table_stride,
    q_stride,
    scale,
    keys,
    values,
    cos_sin,
    q_norm,
    k_norm,
    eps,
    KV_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SCAN: tl.constexpr,
    WINDOW: tl.constexpr,
    SCALED: tl.constexpr,
    COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
    SPREAD: tl.constexpr,
    STAGES: tl.constexpr,
    AT_ONCE: tl.constexpr,
    MIN_PAGES: tl.constexpr,
    NEW: tl.constexpr,
    NORM: tl.constexpr,
    EARLY: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and not NEW:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS

    # Find this program's sequence and split. Splits are limited to `most` pages, so that all of them fit into
    # the grid. The loads bypass the L1 cache: they run before gdc_wait, when the cache may still contain an
    # earlier step's lengths and slots.
    if SCAN == 1:
        length = tl.load(lens, cache_modifier=".cg").to(tl.int32)
        row = tl.load(rows, cache_modifier=".cg").to(tl.int64)
        _, pages = _pages_of(length, WINDOW)
        most = tl.maximum((pages + items - 1) // items, MIN_PAGES)
        sequence = item * 0
        first_item = item * 0
        all_items = (pages + most - 1) // most
        empty = (length == 0) & (item == 0)
    else:
        index = tl.arange(0, SCAN)
        there = index < sequences
        all_lens = tl.load(lens + index, mask=there, other=0, cache_modifier=".cg").to(tl.int32)
        all_rows = tl.load(rows + index, mask=there, other=0, cache_modifier=".cg").to(tl.int32)
        _, all_pages = _pages_of(all_lens, WINDOW)
        most = tl.maximum((tl.sum(all_pages, 0) + items - sequences) // (items - sequences + 1), MIN_PAGES)
        item_ends = tl.cumsum((all_pages + most - 1) // most, 0)
        before = item_ends <= item
        sequence = tl.sum(before.to(tl.int32), 0)
        first_item = tl.max(tl.where(before, item_ends, 0), 0)
        all_items = tl.max(item_ends, 0)
        chosen = index == sequence
        row = tl.sum(tl.where(chosen, all_rows, 0), 0).to(tl.int64)
        length = tl.sum(tl.where(chosen, all_lens, 0), 0)
        empty = False
        if item < sequences:
            empty = tl.load(lens + item, cache_modifier=".cg") == 0

    lift: tl.constexpr = _LIFT if SCALED else 0.0
    tile_row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, HEAD_DIM)
    token = tl.arange(0, 64)
    real = (tile_row < HEADS)[:, None]
    place = (kv_head * HEADS + tile_row)[:, None] * HEAD_DIM + dim[None, :]
    if NEW:
        new_position = tl.maximum(length - 1, 0).to(tl.int64)
        cos, sin = angles(cos_sin + new_position * HEAD_DIM, HEAD_DIM)
    first, pages = _pages_of(length, WINDOW)
    pieces = (pages + most - 1) // most
    each = (pages + pieces - 1) // tl.maximum(pieces, 1)
    begin = (item - first_item) * each
    end = tl.minimum(begin + each, pages)
    blocks = table + row * table_stride + first
    if EARLY:
        active = item < all_items
        early_tile = (
            tl.load(blocks + begin, mask=active, other=0, cache_modifier=".cg").to(tl.int32) * KV_HEADS
            + kv_head
        ) * 64
        lines = (early_tile + token)[:, None].to(tl.int64) * HEAD_DIM + dim[None, :]
        early_k = tl.load(keys + lines, mask=active, other=0.0, cache_modifier=".cg")
        early_v = tl.load(values + lines, mask=active, other=0.0, cache_modifier=".cg")
    if PDL and NEW:
        gdc_wait()
        gdc_launch_dependents()

    if empty:
        nothing = tl.zeros([TILE_ROWS, HEAD_DIM], out.dtype.element_ty)
        tl.store(out + item * (KV_HEADS * HEADS * HEAD_DIM) + place, nothing, mask=real)
    if item < all_items:
        oldest = length - WINDOW
        own = q + sequence.to(tl.int64) * q_stride
        m = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        cached = length
        if NEW:
            # Compute attention to the new token from registers, because the cache contains only the tokens
            # before it.
            cached = length - 1
            newest = begin + each >= pages
            query = turned(own, kv_head * HEADS + tile_row, real, cos, sin, q_norm, eps, HEAD_DIM, NORM)
            query = query.to(q.dtype.element_ty).to(COMPUTE)
            k_head = KV_HEADS * HEADS + kv_head + tl.arange(0, 1)
            new_k = turned(own, k_head, newest, cos, sin, k_norm, eps, HEAD_DIM, NORM)
            new_v = tl.load(
                own + (k_head + KV_HEADS)[:, None] * HEAD_DIM + dim[None, :], mask=newest, other=0.0
            )
            kept_k, k_scale = rounded(new_k, keys, SCALED)
            kept_v, v_scale = rounded(new_v.to(tl.float32), values, SCALED)
            new_score = tl.sum(query.to(tl.float32) * kept_k.to(COMPUTE).to(tl.float32), 1) * (
                k_scale * scale
            )
            m = tl.where(newest, new_score, m)
            total = tl.where(newest, tl.exp2(total + lift), total)
            new_page = tl.load(blocks + pages - 1).to(tl.int64) * KV_HEADS + kv_head
        else:
            query = tl.load(own + place, mask=real, other=0.0).to(COMPUTE)
        acc = tl.zeros([TILE_ROWS, HEAD_DIM], tl.float32)
        if EARLY:
            m, total, acc = _attend(
                query, early_k, early_v, k_scales, v_scales, early_tile, (first + begin) * 64, cached, oldest,
                scale, m, total, acc, WINDOW, SCALED, COMPUTE, PRECISION, SPREAD,
            )  # fmt: skip
            begin += 1
        for page in tl.range(begin, end, num_stages=STAGES):
            tile = (tl.load(blocks + page).to(tl.int32) * KV_HEADS + kv_head) * 64
            k = k_tiles.load([tile, 0])
            v = v_tiles.load([tile, 0])
            m, total, acc = _attend(
                query, k, v, k_scales, v_scales, tile, (first + page) * 64, cached, oldest,
                scale, m, total, acc, WINDOW, SCALED, COMPUTE, PRECISION, SPREAD,
            )  # fmt: skip
        if SCALED:
            acc = _gather(acc, SPREAD)
        if NEW:
            weight = tl.exp2(new_score - m + lift) * v_scale
            if newest:
                acc += weight[:, None] * kept_v.to(COMPUTE).to(tl.float32)
                new_slot = new_page * 64 + new_position % 64
                at = new_slot * HEAD_DIM + dim[None, :]
                tl.store(keys + at, kept_k)
                tl.store(values + at, kept_v)
                if SCALED:
                    tl.store(k_scales + new_slot, k_scale)
                    tl.store(v_scales + new_slot, v_scale)
        out_row = out + sequence.to(tl.int64) * (KV_HEADS * HEADS * HEAD_DIM)
        if pieces == 1:
            tl.store(out_row + place, (acc / total[:, None]).to(out.dtype.element_ty), mask=real)
        else:
            slot = item * KV_HEADS + kv_head
            kept = tile_row < GROUP
            where = (slot * GROUP + tile_row)[:, None] * HEAD_DIM + dim[None, :]
            tl.store(partial + where, acc, mask=kept[:, None])
            tl.store(stats + slot * (2 * GROUP) + tile_row, m, mask=kept)
            tl.store(stats + slot * (2 * GROUP) + GROUP + tile_row, total, mask=kept)
            counter = arrived + sequence * KV_HEADS + kv_head
            # All threads must have stored their sums before any thread increments the counter.
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == pieces - 1:
                tl.store(counter, 0)
                slot = first_item * KV_HEADS + kv_head
                sums = stats + slot * (2 * GROUP)
                parts = partial + slot * (GROUP * HEAD_DIM)
                result = _combine(parts, sums, pieces, HEAD_DIM, GROUP, KV_HEADS, AT_ONCE)
                group = tl.arange(0, GROUP)
                spot = (kv_head * HEADS + group)[:, None] * HEAD_DIM + dim[None, :]
                tl.store(out_row + spot, result.to(out.dtype.element_ty), mask=(group < HEADS)[:, None])
