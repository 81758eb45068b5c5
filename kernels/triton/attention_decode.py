"""Paged attention of one new token for each sequence, split over the cache (Flash-Decoding, Dao et al. 2023).

Every program finds its item of work for itself, from the lengths on the device: sequences are cut into pieces
of at most so many pages that all pieces of the batch fit the grid (as FlashInfer plans on the host, Ye et al.
2025). The grid depends on the number of sequences alone, so a CUDA graph replays it at any lengths, a short
sequence is one piece, and a long one among them is spread over as many programs as it needs. A sequence that
is one piece is finished there; of one that is cut, each piece leaves its sums in the workspace, and the last
to arrive adds them up, in the order of the cache: one kernel, and the same bits every time.

The query heads of a KV head are the rows of one tensor-core tile (16 or more). FP8 tiles are converted to
float16: on Hopper one instruction for two values, where bfloat16 takes several.

With a `Rotation`, what comes in is the product of q, k and v: the kernel norms and rotates what it reads of
it, and whoever has a sequence's last page writes the new key and value there and adds them to the sums out of
registers. So no launch stands between that product and attention, and what does not come from it (lengths,
rows, angles) is read before it has ended.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels import PAGE_TOKENS, Rotation
from kernels.triton.new_tokens import angles, rounded, turned

_LOG2_E = 1.4426950408889634

_LIFT = tl.constexpr(8.0)
"""With FP8, weights are computed times 2**8, so that the small ones of a long sequence stay clear of
float16's subnormals; it cancels in the quotient."""

_MAX_AT_ONCE = 32
"""Most pieces whose sums are read together. The loop over them is unrolled: of 128, as small heads would have
room for, a kernel takes a minute to compile."""


@triton.jit
def _pages_of(length, WINDOW: tl.constexpr):
    """First page that is seen, and the number of pages."""
    last = (length + 63) // 64
    first = tl.maximum(length - WINDOW, 0) // 64 if WINDOW > 0 else length * 0
    return first, last - first


@triton.jit
def _spread(tile, SPREAD: tl.constexpr):
    """Column c of a `[64, n]` tile becomes column (c % SPREAD) × (n / SPREAD) + c / SPREAD. A thread that
    holds tiles of 8 columns n / SPREAD apart, as the tensor cores want them, then reads SPREAD neighbours at
    once: words instead of bytes."""
    n: tl.constexpr = tile.shape[1]
    return tile.reshape(tile.shape[0], n // SPREAD, SPREAD).permute(0, 2, 1).reshape(tile.shape[0], n)


@triton.jit
def _gather(tile, SPREAD: tl.constexpr):
    """Undoes `_spread`."""
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
    """The sum of `pieces` pieces, `[GROUP, HEAD_DIM]`, normalised; `partial` and `stats` point at the first.

    Piece by piece, since no thread then waits for another; the loads of AT_ONCE of them fly at once.
    """
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


@triton.jit(do_not_specialize=["sequences", "items", "table_stride"])
def _decode_kernel(
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
    LEAST: tl.constexpr,
    NEW: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL and not NEW:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(0) % KV_HEADS
    item = tl.program_id(0) // KV_HEADS

    # Which piece of which sequence this item is. Pieces have at most `most` pages: then all fit the grid.
    # Lengths and rows are another step's in the L1, perhaps, and this may be before the wait.
    if SCAN == 1:
        length = tl.load(lens, cache_modifier=".cg").to(tl.int32)
        row = tl.load(rows, cache_modifier=".cg").to(tl.int64)
        _, pages = _pages_of(length, WINDOW)
        most = tl.maximum((pages + items - 1) // items, LEAST)
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
        most = tl.maximum((tl.sum(all_pages, 0) + items - sequences) // (items - sequences + 1), LEAST)
        ends = tl.cumsum((all_pages + most - 1) // most, 0)
        before = ends <= item
        sequence = tl.sum(before.to(tl.int32), 0)
        first_item = tl.max(tl.where(before, ends, 0), 0)
        all_items = tl.max(ends, 0)
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
    if PDL and NEW:
        gdc_wait()
        gdc_launch_dependents()

    if empty:
        nothing = tl.zeros([TILE_ROWS, HEAD_DIM], out.dtype.element_ty)
        tl.store(out + item * (KV_HEADS * HEADS * HEAD_DIM) + place, nothing, mask=real)
    if item < all_items:
        first, pages = _pages_of(length, WINDOW)
        pieces = (pages + most - 1) // most
        each = (pages + pieces - 1) // pieces
        begin = (item - first_item) * each
        end = tl.minimum(begin + each, pages)
        blocks = table + row * table_stride + first
        own = q + sequence.to(tl.int64) * q_stride
        m = tl.full([TILE_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([TILE_ROWS], tl.float32)
        cached = length
        if NEW:
            # The new token counts here; the cache, in which it is not yet, has those before it.
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
        for page in tl.range(begin, end, num_stages=STAGES):
            tile = (tl.load(blocks + page).to(tl.int32) * KV_HEADS + kv_head) * 64
            k = k_tiles.load([tile, 0])
            v = v_tiles.load([tile, 0])
            scores = tl.dot(query, k.to(COMPUTE).T, input_precision=PRECISION)
            if SCALED:
                scores = scores * (tl.load(k_scales + tile + token) * scale)[None, :]
            else:
                scores = scores * scale
            position = (first + page) * 64 + token
            seen = position < cached
            if WINDOW > 0:
                seen = seen & (position >= length - WINDOW)
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
            m = m_new
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
            # Every thread's sums are written before one thread says so.
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


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What `decode` keeps between its programs. One for each stream; every layer of a model uses the same.

    Made for one number of KV heads, group and head_dim, and for at most `sequences` sequences.
    """

    partial: torch.Tensor
    """`[items, kv_heads, group, head_dim]` float32: sums of pieces."""
    stats: torch.Tensor
    """`[items, kv_heads, 2, group]` float32: their largest scores and sums of weights."""
    arrived: torch.Tensor
    """`[sequences, kv_heads]` int32: pieces that are there. Zero between launches."""


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """How a launch uses the GPU."""

    items: int
    """Programs for each KV head: the most pieces that the sequences are cut into; at least one for each."""
    stages: int
    """Of the pipeline over pages: page numbers and tiles are (stages - 1) / 2 iterations ahead each."""
    maxnreg: int | None = 128
    """Most registers of a thread."""
    at_once: int = 4096
    """Sums that are read together where pieces are added up."""
    num_warps: int = 4
    least_pages: int = 1
    """A sequence of no more is not cut: reading them one after another is cheaper than adding up sums."""


def config_for(
    sequences: int, kv_heads: int, head_dim: int, element_size: int, multiprocessors: int
) -> DecodeConfig:
    """For a batch of that many sequences, at whatever lengths.

    A single sequence of a 2-byte cache is best as one program a multiprocessor, since a launch that overlaps
    the one in front of it is not spread evenly; a few as two. FP8 wants more of them, to hide the conversion:
    where there is work for five at once, 96 registers let them in.
    """
    fp8 = element_size == 1
    waves = 4 if sequences > 16 or (fp8 and sequences > 1) else 2 if fp8 or sequences > 1 else 1
    items = max(sequences, sequences - 1 + waves * multiprocessors // kv_heads)
    stages = 5 if PAGE_TOKENS * head_dim * element_size <= 16384 else 3
    return DecodeConfig(
        items=items, stages=stages, maxnreg=96 if fp8 and sequences > 128 and head_dim <= 128 else 128
    )


def pieces_at_once(config: DecodeConfig, group: int, head_dim: int) -> int:
    """How many pieces of a sequence are read together where they are added up."""
    return min(_MAX_AT_ONCE, max(1, config.at_once // (group * head_dim)))


def config_on(keys: torch.Tensor, sequences: int) -> DecodeConfig:
    """`config_for` a cache, `[blocks, kv_heads, 64, head_dim]`, on its device."""
    _, kv_heads, _, head_dim = keys.shape
    return config_for(sequences, kv_heads, head_dim, keys.element_size(), multiprocessors_of(keys.device))


def max_items(sequences: int, kv_heads: int, multiprocessors: int) -> int:
    """Of `DecodeConfig.items`, that a workspace has room for."""
    return sequences + 4 * multiprocessors // kv_heads


def allocate_workspace(
    sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> DecodeWorkspace:
    """For `decode` of up to `sequences` sequences with these heads."""
    items = max_items(sequences, kv_heads, multiprocessors_of(device))
    group = triton.next_power_of_2(heads // kv_heads)
    return DecodeWorkspace(
        partial=torch.empty(items, kv_heads, group, head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(items, kv_heads, 2, group, dtype=torch.float32, device=device),
        arrived=torch.zeros(sequences, kv_heads, dtype=torch.int32, device=device),
    )


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    slots: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    window: int | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    rotation: Rotation | None = None,
    pdl: bool = True,
    config: DecodeConfig | None = None,
) -> torch.Tensor:
    """Attention of one new token for each sequence over its pages: `[sequences, heads, head_dim]`, as q.

    q: `[sequences, heads, head_dim]`, heads contiguous. With a `rotation`, the product of queries, keys and
    values, `[sequences, (heads + 2 kv_heads) × head_dim]`: the new keys and values are not in the cache yet
    and are written there; the cache must not be shared between sequences where their new tokens stand. Then
    slots, lens and cos_sin are read before the kernel in front has ended, so with PDL a kernel without it must
    stand between what wrote them and this one, as the embedding does in a decoder's pass.
    keys, values: `[blocks, kv_heads, 64, head_dim]`,
    contiguous, in q's dtype, or float8_e4m3fn with `k_scales`, `v_scales` `[blocks, kv_heads, 64]` float32.
    block_table: `[max_rows, columns]` int32 or int64. slots: `[sequences]`, the block table's row of each.
    lens: `[sequences]`, tokens in the cache, the new one included; 0: padding, whose result is zeros and of
    which nothing else is read. window: the token sees itself and the window - 1 before it.
    config: None: `config_for`. The result's last bits depend on its `items`.
    The softmax is in float32. Takes no lengths on the host, so a CUDA graph may hold it.
    """
    blocks, kv_heads, _, head_dim = keys.shape
    sequences, heads = q.shape[0], _query_heads(q, kv_heads, head_dim, rotation)
    group = heads // kv_heads
    gp = int(triton.next_power_of_2(group))
    scaled = k_scales is not None
    if out is None:
        out = torch.empty((sequences, heads, head_dim), dtype=q.dtype, device=q.device)
    if config is None:
        config = config_on(keys, sequences)
    items = config.items
    _check_workspace(workspace, sequences, items, (kv_heads, gp, head_dim))
    compute = q.dtype if keys.dtype == q.dtype else torch.float16
    lines = blocks * kv_heads * PAGE_TOKENS
    tile = [PAGE_TOKENS, head_dim]
    _decode_kernel[(items * kv_heads,)](
        q,
        TensorDescriptor(keys, [lines, head_dim], [head_dim, 1], tile),
        TensorDescriptor(values, [lines, head_dim], [head_dim, 1], tile),
        k_scales,
        v_scales,
        block_table,
        slots,
        lens,
        out,
        workspace.partial,
        workspace.stats,
        workspace.arrived,
        sequences,
        items,
        block_table.stride(0),
        q.stride(0),
        scale * _LOG2_E,
        keys,
        values,
        None if rotation is None else rotation.cos_sin,
        None if rotation is None else rotation.q_norm,
        None if rotation is None else rotation.k_norm,
        0.0 if rotation is None else rotation.eps,
        KV_HEADS=kv_heads,
        HEADS=group,
        HEAD_DIM=head_dim,
        GROUP=gp,
        TILE_ROWS=max(16, gp),
        SCAN=_scan_width(sequences),
        WINDOW=window or 0,
        SCALED=scaled,
        COMPUTE=_TRITON_DTYPES[compute],
        PRECISION="ieee" if compute == torch.float32 else "tf32",
        SPREAD=max(1, head_dim // (8 * config.num_warps)),
        STAGES=config.stages,
        AT_ONCE=pieces_at_once(config, gp, head_dim),
        LEAST=config.least_pages,
        NEW=rotation is not None,
        NORM=rotation is not None and rotation.q_norm is not None,
        PDL=pdl,
        num_warps=config.num_warps,
        launch_pdl=pdl,
        maxnreg=config.maxnreg,
    )
    return out


def _query_heads(q: torch.Tensor, kv_heads: int, head_dim: int, rotation: Rotation | None) -> int:
    """Raises ValueError for a product that these heads do not make."""
    if rotation is None:
        return q.shape[1]
    heads = q.shape[1] // head_dim - 2 * kv_heads
    if q.shape[1] % head_dim or heads < 1 or heads % kv_heads:
        raise ValueError(
            f"q has {q.shape[1]} columns, which are not (heads + 2 × {kv_heads}) × {head_dim} with heads a "
            f"multiple of {kv_heads}"
        )
    if (rotation.q_norm is None) != (rotation.k_norm is None):
        raise ValueError("q_norm and k_norm are given together or not at all")
    return heads


def _check_workspace(
    workspace: DecodeWorkspace, sequences: int, items: int, heads: tuple[int, int, int]
) -> None:
    most, *shape = workspace.partial.shape
    if tuple(shape) != heads:
        raise ValueError(
            f"workspace is for kv_heads, group and head_dim {tuple(shape)}, the batch has {heads}; "
            "make one with allocate_workspace"
        )
    if sequences > workspace.arrived.shape[0]:
        raise ValueError(
            f"workspace is for {workspace.arrived.shape[0]} sequences, the batch has {sequences}; "
            "make a larger one"
        )
    if not sequences <= items <= most:
        raise ValueError(
            f"items is {items}, not between the {sequences} sequences and the workspace's {most}"
        )


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _scan_width(sequences: int) -> int:
    """Few widths, since each is a kernel to compile."""
    for width in (1, 16, 128, 1024):
        if sequences <= width:
            return width
    return int(triton.next_power_of_2(sequences))


def multiprocessors_of(device: torch.device) -> int:
    """4 where the interpreter runs."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
