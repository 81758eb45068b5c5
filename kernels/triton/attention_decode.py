"""Paged attention of one new token for each sequence, split over the cache (Flash-Decoding, Dao et al. 2023;
equal shares of work as in Stream-K, Osama et al. 2023).

The pages of all sequences, in order, are one line of work, cut into equal shares that each program finds for
itself from the lengths on the device: the grid depends on the number of sequences alone, so a CUDA graph
replays it at any lengths, and a long sequence among short ones is spread over as many programs as it needs.
A program walks its share sequence by sequence. A sequence that lies in one share is finished there; of one
that is cut, each piece leaves its sums in the workspace, and the last piece to arrive adds them up, in the
order of the cache: one kernel, and the same bits every time.

The query heads of a KV head are the rows of one tensor-core tile (16 or more). FP8 tiles are converted to
float16: on Hopper one instruction for two values, where bfloat16 takes several.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

PAGE_TOKENS = 64

_LOG2_E = 1.4426950408889634

_LIFT = tl.constexpr(8.0)
"""With FP8, weights are computed times 2**8, so that the small ones of a long sequence stay clear of float16's
subnormals; it cancels in the quotient."""


@triton.jit
def _pages_of(length, WINDOW: tl.constexpr):
    """First page that is seen, and the number of pages."""
    last = (length + 63) // 64
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0) // 64
    else:
        first = length * 0
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
    partial, stats, base, pieces, odd, HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, SLOT_STRIDE: tl.constexpr
):
    """The sum of a sequence's pieces: `[GROUP, HEAD_DIM]`, normalised. Slots: base + odd, base + 2, base + 4…
    (in units of SLOT_STRIDE rows of GROUP)."""
    AT_ONCE: tl.constexpr = max(1, 4096 // (GROUP * HEAD_DIM))
    piece = tl.arange(0, AT_ONCE)
    group = tl.arange(0, GROUP)
    dim = tl.arange(0, HEAD_DIM)
    m = tl.full([GROUP], float("-inf"), tl.float32)
    total = tl.zeros([GROUP], tl.float32)
    acc = tl.zeros([GROUP, HEAD_DIM], tl.float32)
    for start in range(0, pieces, AT_ONCE):
        index = start + piece
        there = index < pieces
        slot = (base + 2 * index + tl.where(index == 0, odd, 0)) * SLOT_STRIDE
        at = slot[:, None] * (2 * GROUP) + group[None, :]
        top = tl.load(stats + at, mask=there[:, None], other=float("-inf"), cache_modifier=".cg")
        sums = tl.load(stats + at + GROUP, mask=there[:, None], other=0.0, cache_modifier=".cg")
        where = (slot[:, None, None] * GROUP + group[None, :, None]) * HEAD_DIM + dim[None, None, :]
        part = tl.load(partial + where, mask=there[:, None, None], other=0.0, cache_modifier=".cg")
        m_new = tl.maximum(m, tl.max(top, 0))
        old = tl.exp2(m - m_new)
        weight = tl.exp2(top - m_new[None, :])
        total = total * old + tl.sum(sums * weight, 0)
        acc = acc * old[:, None] + tl.sum(part * weight[:, :, None], 0)
        m = m_new
    return acc / total[:, None]


@triton.jit(do_not_specialize=["sequences", "shares"])
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
    shares,
    table_stride,
    q_stride,
    scale,
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
    PDL: tl.constexpr,
):
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(0) % KV_HEADS
    share = tl.program_id(0) // KV_HEADS

    # Where this share lies: pages of all sequences, counted through.
    if SCAN == 1:
        length = tl.load(lens).to(tl.int32)
        _, pages = _pages_of(length, WINDOW)
        total = pages
        zeros = pages == 0
        per_share = (total + shares - 1) // shares
        at = share * per_share
        sequence = 0
        start = 0
    else:
        index = tl.arange(0, SCAN)
        all_lens = tl.load(lens + index, mask=index < sequences, other=1).to(tl.int32)
        _, all_pages = _pages_of(all_lens, WINDOW)
        zeros = tl.min(all_lens, 0) == 0
        all_pages = tl.where(index < sequences, all_pages, 0)
        ends = tl.cumsum(all_pages, 0)
        total = tl.max(ends, 0)
        per_share = (total + shares - 1) // shares
        at = share * per_share
        before = ends <= at
        sequence = tl.sum(before.to(tl.int32), 0)
        start = tl.max(tl.where(before, ends, 0), 0)
    stop = tl.minimum(at + per_share, total)

    tile_row = tl.arange(0, TILE_ROWS)
    dim = tl.arange(0, HEAD_DIM)
    token = tl.arange(0, 64)
    head = kv_head * HEADS + tile_row
    real = (tile_row < HEADS)[:, None]
    place = head[:, None] * HEAD_DIM + dim[None, :]

    if zeros:
        for empty in range(share, sequences, shares):
            if tl.load(lens + empty) == 0:
                nothing = tl.zeros([TILE_ROWS, HEAD_DIM], out.dtype.element_ty)
                tl.store(out + empty * (KV_HEADS * HEADS * HEAD_DIM) + place, nothing, mask=real)

    while at < stop:
        length = tl.load(lens + sequence).to(tl.int32)
        row = tl.load(rows + sequence).to(tl.int64)
        first, pages = _pages_of(length, WINDOW)
        begin = at - start
        end = tl.minimum(stop - start, pages)
        if begin < end:
            blocks = table + row * table_stride + first
            query = tl.load(q + sequence.to(tl.int64) * q_stride + place, mask=real, other=0.0).to(COMPUTE)
            m = tl.full([TILE_ROWS], float("-inf"), tl.float32)
            total_weight = tl.zeros([TILE_ROWS], tl.float32)
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
                seen = position < length
                if WINDOW > 0:
                    seen = seen & (position >= length - WINDOW)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                m_new = tl.maximum(m, tl.max(scores, 1))
                old = tl.exp2(m - m_new)
                if SCALED:
                    weights = tl.exp2(scores - (m_new - _LIFT)[:, None])
                    total_weight = total_weight * old + tl.sum(weights, 1)
                    weights = weights * tl.load(v_scales + tile + token)[None, :]
                else:
                    weights = tl.exp2(scores - m_new[:, None])
                    total_weight = total_weight * old + tl.sum(weights, 1)
                if SCALED:
                    v = _spread(v, SPREAD)
                acc = tl.dot(weights.to(COMPUTE), v.to(COMPUTE), acc * old[:, None], input_precision=PRECISION)
                m = m_new
            if SCALED:
                acc = _gather(acc, SPREAD)
            out_row = out + sequence.to(tl.int64) * (KV_HEADS * HEADS * HEAD_DIM)
            if end - begin == pages:
                result = acc / total_weight[:, None]
                tl.store(out_row + place, result.to(out.dtype.element_ty), mask=real)
            else:
                # Of a share, only the first piece can go on from the share before, and only the last can go
                # on into the next: slots 2 × share and 2 × share + 1.
                slot = (2 * share + (begin == 0).to(tl.int32) * (at > share * per_share).to(tl.int32)) * KV_HEADS
                slot = (slot + kv_head).to(tl.int64)
                kept = tile_row < GROUP
                where = (slot * GROUP + tile_row[:, None]) * HEAD_DIM + dim[None, :]
                tl.store(partial + where, acc, mask=kept[:, None])
                tl.store(stats + slot * (2 * GROUP) + tile_row, m, mask=kept)
                tl.store(stats + slot * (2 * GROUP) + GROUP + tile_row, total_weight, mask=kept)
                first_share = start // per_share
                pieces = (start + pages - 1) // per_share - first_share + 1
                counter = arrived + sequence * KV_HEADS + kv_head
                # Every thread's sums are written before one thread says so.
                tl.debug_barrier()
                if tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == pieces - 1:
                    tl.store(counter, 0)
                    odd = (start > first_share * per_share).to(tl.int32)
                    base = partial + kv_head * GROUP * HEAD_DIM
                    result = _combine(
                        base,
                        stats + kv_head * 2 * GROUP,
                        2 * first_share,
                        pieces,
                        odd,
                        HEAD_DIM,
                        GROUP,
                        KV_HEADS,
                    )
                    group = tl.arange(0, GROUP)
                    spot = (kv_head * HEADS + group)[:, None] * HEAD_DIM + dim[None, :]
                    tl.store(
                        out_row + spot, result.to(out.dtype.element_ty), mask=(group < HEADS)[:, None]
                    )
        start += pages
        at = tl.minimum(start, stop)
        sequence += 1


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """What `decode` keeps between its programs. One for each stream; every layer of a model uses the same.

    Made for one number of KV heads, group and head_dim, and for at most `sequences` sequences.
    """

    partial: torch.Tensor
    """`[pieces, kv_heads, group, head_dim]` float32: sums of pieces."""
    stats: torch.Tensor
    """`[pieces, kv_heads, 2, group]` float32: their largest scores and sums of weights."""
    arrived: torch.Tensor
    """`[sequences, kv_heads]` int32: pieces that are there. Zero between launches."""


def shares_of(sequences: int, kv_heads: int, multiprocessors: int) -> int:
    """Shares that the work of a batch is cut into, for each KV head: about two waves of programs, so that the
    last ones to finish leave little of the GPU idle."""
    return max(1, min(1024, max(multiprocessors * 6 // kv_heads, sequences)))


def workspace_bytes(sequences: int, heads: int, kv_heads: int, head_dim: int, multiprocessors: int) -> int:
    """Bytes of a `DecodeWorkspace` for up to `sequences` sequences."""
    pieces = 2 * shares_of(sequences, kv_heads, multiprocessors)
    group = triton.next_power_of_2(heads // kv_heads)
    return 4 * kv_heads * (pieces * group * (head_dim + 2) + sequences)


def allocate_workspace(
    sequences: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> DecodeWorkspace:
    """For `decode` of up to `sequences` sequences with these heads."""
    pieces = 2 * shares_of(sequences, kv_heads, _multiprocessors(device))
    group = triton.next_power_of_2(heads // kv_heads)
    return DecodeWorkspace(
        partial=torch.empty(pieces, kv_heads, group, head_dim, dtype=torch.float32, device=device),
        stats=torch.empty(pieces, kv_heads, 2, group, dtype=torch.float32, device=device),
        arrived=torch.zeros(sequences, kv_heads, dtype=torch.int32, device=device),
    )


def decode(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor,
    rows: torch.Tensor,
    lens: torch.Tensor,
    scale: float,
    workspace: DecodeWorkspace,
    window: int | None = None,
    k_scales: torch.Tensor | None = None,
    v_scales: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    pdl: bool = True,
    shares: int | None = None,
    num_warps: int = 4,
    stages: int | None = None,
) -> torch.Tensor:
    """Attention of one new token for each sequence over its pages: `[sequences, heads, head_dim]`, as q.

    q: `[sequences, heads, head_dim]`, heads contiguous. keys, values: `[blocks, kv_heads, 64, head_dim]`,
    contiguous, in q's dtype, or float8_e4m3fn with `k_scales`, `v_scales` `[blocks, kv_heads, 64]` float32.
    block_table: `[max_rows, columns]` int32 or int64. rows: `[sequences]`, the block table's row of each.
    lens: `[sequences]`, tokens in the cache, the new one included; 0: padding, whose result is zeros and of
    which nothing else is read. window: the token sees itself and the window - 1 before it.
    The softmax is in float32. Takes no lengths on the host, so a CUDA graph may hold it.
    """
    sequences, heads, head_dim = q.shape
    blocks, kv_heads, _, _ = keys.shape
    group = heads // kv_heads
    scaled = k_scales is not None
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    shares = shares or shares_of(sequences, kv_heads, _multiprocessors(q.device))
    _check_workspace(workspace, sequences, shares, (kv_heads, int(triton.next_power_of_2(group)), head_dim))
    compute = q.dtype if keys.dtype == q.dtype else torch.float16
    lines = blocks * kv_heads * PAGE_TOKENS
    tile = [PAGE_TOKENS, head_dim]
    if stages is None:
        stages = max(2, min(4, 98304 // (2 * PAGE_TOKENS * head_dim * keys.element_size())))
    _decode_kernel[(shares * kv_heads,)](
        q,
        TensorDescriptor(keys, [lines, head_dim], [head_dim, 1], tile),
        TensorDescriptor(values, [lines, head_dim], [head_dim, 1], tile),
        k_scales,
        v_scales,
        block_table,
        rows,
        lens,
        out,
        workspace.partial,
        workspace.stats,
        workspace.arrived,
        sequences,
        shares,
        block_table.stride(0),
        q.stride(0),
        scale * _LOG2_E,
        KV_HEADS=kv_heads,
        HEADS=group,
        HEAD_DIM=head_dim,
        GROUP=triton.next_power_of_2(group),
        TILE_ROWS=max(16, triton.next_power_of_2(group)),
        SCAN=_scan_width(sequences),
        WINDOW=window or 0,
        SCALED=scaled,
        COMPUTE=_TRITON_DTYPES[compute],
        PRECISION="ieee" if compute == torch.float32 else "tf32",
        SPREAD=max(1, head_dim // (8 * num_warps)),
        STAGES=stages,
        PDL=pdl,
        num_warps=num_warps,
        launch_pdl=pdl,
    )
    return out


def _check_workspace(
    workspace: DecodeWorkspace, sequences: int, shares: int, heads: tuple[int, int, int]
) -> None:
    pieces, *shape = workspace.partial.shape
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
    if 2 * shares > pieces:
        raise ValueError(f"shares is {shares}, the workspace holds {pieces // 2}; make a larger one")


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def _scan_width(sequences: int) -> int:
    """Few widths, since each is a kernel to compile."""
    for width in (1, 16, 128, 1024):
        if sequences <= width:
            return width
    return int(triton.next_power_of_2(sequences))


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
