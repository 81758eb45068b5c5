# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Implements causal prefill attention for Hopper GPUs. The softmax of one key block overlaps with the
tensor-core products of another.

The kernel implements FlashAttention-3's schedule (Shah et al. 2024) for a paged cache, in Gluon, Triton's
lower-level language. One producer warp loads the queries, keys and values of a tile with the copy engine
(TMA). Two consumer warpgroups each compute 64 of a tile's 128 rows. While a warpgroup computes the softmax
weights of 128 keys, the product of the previous weights and values is still running. Keys are processed from
last to first, so only the first steps of a tile need a mask.

The grid has one program per multiprocessor. Each program computes several tiles, the longest first, and loads
the queries and pages of its next tile while the current tile finishes. Barriers (mbarriers) in shared memory
with alternating phases signal full and empty buffers. The queries have one pair of barriers; each pipeline
stage has one pair for keys and one for values.
"""

from __future__ import annotations

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels import PAGE_TOKENS

_LOG2_E = 1.4426950408889634

_STAGES = 2
"""Number of pipeline stages for keys, which is also the number for values. Each stage takes 32 KiB; with the
queries, this adds up to 160 KiB of shared memory. At least two are needed, because the kernel waits for the
next keys before releasing the current values."""

_LIFT = gl.constexpr(8.0)
"""Binary exponent of a factor (2**8) applied to float16 softmax weights, so that small weights do not become
subnormal in float16."""


def prefill(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_table: torch.Tensor | None,
    tiles: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    multiprocessors: int,
    pdl: bool = True,
) -> torch.Tensor:
    """Compute `attention_prefill.prefill` on a Hopper GPU, for 16-bit tensors and without an attention
    window. Returns `out`, in which tokens outside all tiles keep their previous values.

    q: `[tokens, heads, 128]` bfloat16 or float16, heads contiguous, token stride a multiple of 16 bytes.
    keys, values: `[blocks, kv_heads, 64, 128]`, contiguous, of the same dtype; heads / kv_heads divides 64.
    block_table: `[slots, columns]` int32 or int64. Each row covers the context + count tokens of its chunk.
      If block_table is None, keys and values are the scratch pool, and tiles are `Expansion.expanded`.
    tiles: `plan_tiles` on the device, contiguous, each with at least one token.
    out: same shape and dtype as q.
    multiprocessors: number of multiprocessors of the GPU.

    The softmax is computed in float32.
    """
    _, heads, head_dim = q.shape
    blocks, kv_heads, _, _ = keys.shape
    group = heads // kv_heads
    lines = [blocks * kv_heads * PAGE_TOKENS, head_dim]
    half_page = [PAGE_TOKENS, 64]
    table = tiles if block_table is None else block_table
    items = len(tiles) * kv_heads
    _prefill_hopper[(min(items, multiprocessors),)](
        TensorDescriptor(q, list(q.shape), list(q.stride()), [64 // group, group, head_dim], _shared(3)),
        TensorDescriptor(keys, lines, [head_dim, 1], half_page, _shared(2)),
        TensorDescriptor(values, lines, [head_dim, 1], half_page, _shared(2)),
        table,
        tiles,
        out,
        items,
        table.stride(0),
        out.stride(0),
        scale * _LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        STAGES=_STAGES,
        EXPANDED=block_table is None,
        PDL=pdl,
        num_warps=4,
        maxnreg=168,
        launch_pdl=pdl,
    )
    return out


def _shared(rank: int) -> gl.NVMMASharedLayout:
    """Return the shared-memory layout for rows of 128 bytes, with the swizzling expected by the tensor
    cores."""
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


@gluon.jit
def _signal(text: gl.constexpr):
    gl.inline_asm_elementwise(text, "=r", [], gl.int32, False, 1)


@gluon.jit
def _item(turn):
    """Return the index of the work item (a tile and KV head) that this program computes in the given round.
    Odd rounds reverse the order of the programs to balance their work. The index may be past the last work
    item."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)


@gluon.jit
def _positions(record):
    """Return a tile's first position, its last position, and the number of blocks of 128 keys up to the last
    position."""
    first = gl.load(record + 2)
    last = first + gl.load(record + 1) - 1
    return first, last, last // 128 + 1


@gluon.jit
def _fetch_block(tiles, one, two, ready, empty, phase, smem, at):
    """Wait until a pipeline stage has been released and load 128 keys or values into it: two pages, each as
    two tiles of 64 dimensions."""
    mbarrier.wait(empty, phase ^ 1)
    mbarrier.expect(ready, 128 * 128 * 2)
    for panel in gl.static_range(2):
        to = at + panel * 2
        tma.async_copy_global_to_shared(tiles, [one, panel * 64], ready, smem.index(to))
        tma.async_copy_global_to_shared(tiles, [two, panel * 64], ready, smem.index(to + 1))


@gluon.jit
def _fetch(
    memory,
    table,
    tiles,
    items,
    table_stride,
    shared,
    bars,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    EXPANDED: gl.constexpr,
):
    """Run the producer warp, which loads the queries, keys and values of this program's tiles."""
    q_tiles, k_tiles, v_tiles = memory
    q_smem, k_smem, v_smem = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    step = 0
    turn = 0
    item = _item(turn)
    while item < items:
        kv_head = item % KV_HEADS
        record = tiles + item // KV_HEADS * 4
        _first, last, blocks = _positions(record)
        token = gl.load(record)
        row = gl.load(record + 3)
        mbarrier.wait(q_empty, (turn & 1) ^ 1)
        mbarrier.expect(q_full, 128 * 128 * 2)
        for half in gl.static_range(2):
            # Loads past the tensor's last token return zeros.
            at = [token + half * (64 // GROUP), kv_head * GROUP, 0]
            tma.async_copy_global_to_shared(q_tiles, at, q_full, q_smem.index(half))
        for back in range(blocks):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            page = (blocks - 1 - back) * 2
            # If there is no next page, load the last one again. All positions of the repeated page are
            # masked.
            next_page = gl.minimum(page + 1, last // 64)
            if EXPANDED:
                one = ((row + page) * KV_HEADS + kv_head) * 64
                two = ((row + next_page) * KV_HEADS + kv_head) * 64
            else:
                own = table + row.to(gl.int64) * table_stride
                one = (gl.load(own + page).to(gl.int32) * KV_HEADS + kv_head) * 64
                two = (gl.load(own + next_page).to(gl.int32) * KV_HEADS + kv_head) * 64
            at_stage = stage * 4
            _fetch_block(
                k_tiles, one, two, k_full.index(stage), k_empty.index(stage), phase, k_smem, at_stage
            )
            _fetch_block(
                v_tiles, one, two, v_full.index(stage), v_empty.index(stage), phase, v_smem, at_stage
            )
            step += 1
        turn += 1
        item = _item(turn)


@gluon.jit
def _masked(scores, block, position, MMA: gl.constexpr):
    key = block * 128 + gl.arange(0, 128, layout=gl.SliceLayout(0, MMA))
    return gl.where(key[None, :] <= position[:, None], scores, float("-inf"))


@gluon.jit
def _weights(scores, m, scale, LIFT: gl.constexpr):
    """Return the new running maximum, the factor that rescales earlier sums, and the softmax weights."""
    m_new = gl.maximum(m, gl.max(scores, axis=1) * scale)
    old = gl.exp2(m - m_new)
    weights = gl.exp2(scores * scale - (m_new - LIFT)[:, None])
    return m_new, old, weights


@gluon.jit
def _compute(
    out,
    tiles,
    items,
    out_stride,
    scale,
    shared,
    bars,
    HALF: gl.constexpr,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
):
    """Run one consumer warpgroup, which computes half of each tile's rows."""
    q_smem, k_operands, v_operands = shared
    q_full, q_empty, k_full, k_empty, v_full, v_empty = bars
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    dtype: gl.constexpr = out.dtype.element_ty
    LIFT: gl.constexpr = _LIFT if dtype == gl.float16 else 0.0
    q = q_smem.index(HALF).reshape([64, 128])
    row = HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, mma))
    dim = gl.arange(0, 128, layout=gl.SliceLayout(0, mma))
    none = gl.zeros([64, 128], gl.float32, layout=mma)
    step = 0
    turn = 0
    item = _item(turn)
    while item < items:
        kv_head = item % KV_HEADS
        record = tiles + item // KV_HEADS * 4
        first, _last, blocks = _positions(record)
        position = first + row // GROUP
        # The initial maximum is finite, so that a block without visible keys does not produce NaN (see
        # `attention_prefill._LOWEST`).
        m = gl.full([64], -1.0e30, gl.float32, layout=gl.SliceLayout(1, mma))
        acc = gl.zeros([64, 128], gl.float32, layout=mma)
        mbarrier.wait(q_full, turn & 1)

        stage = step % STAGES
        phase = (step // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        k = k_operands.index(stage).permute([1, 0])
        of_keys = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[of_keys])
        tl.debug_barrier()
        mbarrier.arrive(k_empty.index(stage), count=1)
        scores = _masked(scores, blocks - 1, position, mma)
        m, old, weights = _weights(scores, m, scale, LIFT)
        total = gl.sum(weights, axis=1)
        p = gl.convert_layout(weights.to(dtype), operand)
        mbarrier.wait(k_full.index((step + 1) % STAGES), ((step + 1) // STAGES) & 1, pred=blocks > 1)
        for back in range(1, blocks):
            block = blocks - 1 - back
            k_stage = (step + 1) % STAGES
            k = k_operands.index(k_stage).permute([1, 0])
            of_keys = warpgroup_mma(q, k, none, use_acc=False, is_async=True)
            mbarrier.wait(v_full.index(stage), phase)
            of_values = warpgroup_mma(p, v_operands.index(stage), acc, is_async=True)
            scores = warpgroup_mma_wait(1, deps=[of_keys])
            tl.debug_barrier()
            mbarrier.arrive(k_empty.index(k_stage), count=1)
            if block * 128 + 127 > first:
                scores = _masked(scores, block, position, mma)
            m, old, weights = _weights(scores, m, scale, LIFT)
            total = total * old + gl.sum(weights, axis=1)
            following = gl.convert_layout(weights.to(dtype), operand)
            # Wait for the next keys here, between the softmax and the wait for the value products. The
            # compiler does not move instructions across this wait. If this wait were elsewhere, the compiler
            # would place the softmax after the value products, and the two would not overlap.
            next_step = step + 2
            ahead = back + 1 < blocks
            mbarrier.wait(k_full.index(next_step % STAGES), (next_step // STAGES) & 1, pred=ahead)
            acc, following, p = warpgroup_mma_wait(0, deps=[of_values, following, p])
            tl.debug_barrier()
            mbarrier.arrive(v_empty.index(stage), count=1)
            acc = acc * old[:, None]
            p = following
            step += 1
            stage = step % STAGES
            phase = (step // STAGES) & 1
        # All of this tile's key products have finished, so its queries are no longer needed.
        mbarrier.arrive(q_empty, count=1)
        mbarrier.wait(v_full.index(stage), phase)
        of_values = warpgroup_mma(p, v_operands.index(stage), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[of_values])
        tl.debug_barrier()
        mbarrier.arrive(v_empty.index(stage), count=1)
        step += 1
        count = gl.load(record + 1)
        token = (gl.load(record) + row // GROUP).to(gl.int64)
        head = kv_head * GROUP + row % GROUP
        place = out + token[:, None] * out_stride + (head * 128)[:, None] + dim[None, :]
        real = row < count * GROUP
        gl.store(place, (acc / total[:, None]).to(dtype), mask=real[:, None])
        turn += 1
        item = _item(turn)


@gluon.jit(do_not_specialize=["table_stride", "items"])
def _prefill_hopper(
    q_tiles,
    k_tiles,
    v_tiles,
    table,
    tiles,
    out,
    items,
    table_stride,
    out_stride,
    scale,
    KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr,
    STAGES: gl.constexpr,
    EXPANDED: gl.constexpr,
    PDL: gl.constexpr,
):
    dtype: gl.constexpr = out.dtype.element_ty
    if PDL:
        _signal("griddepcontrol.wait; mov.u32 $0, 0;")
        _signal("griddepcontrol.launch_dependents; mov.u32 $0, 0;")
    whole: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [2, 64 // GROUP, GROUP, 128], q_tiles.layout)
    # A stage has two panels of 64 dimensions, with two pages each. Together, they form 128 swizzled rows of
    # 128 dimensions.
    k_smem = gl.allocate_shared_memory(dtype, [STAGES * 4, 64, 64], k_tiles.layout)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES * 4, 64, 64], v_tiles.layout)
    k_operands = k_smem._reinterpret(dtype, [STAGES, 128, 128], whole)
    v_operands = v_smem._reinterpret(dtype, [STAGES, 128, 128], whole)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    # A full barrier completes when all bytes have arrived. An empty barrier completes when both warpgroups
    # have released the buffer.
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(k_empty.index(stage), count=2)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(v_empty.index(stage), count=2)
    bars = (q_full, q_empty, k_full, k_empty, v_full, v_empty)
    memory, pages = (q_tiles, k_tiles, v_tiles), (q_smem, k_smem, v_smem)
    operands = (q_smem, k_operands, v_operands)
    gl.warp_specialize(
        [
            (_compute, (out, tiles, items, out_stride, scale, operands, bars, 0, KV_HEADS, GROUP, STAGES)),
            (_compute, (out, tiles, items, out_stride, scale, operands, bars, 1, KV_HEADS, GROUP, STAGES)),
            (
                _fetch,
                (memory, table, tiles, items, table_stride, pages, bars, KV_HEADS, GROUP, STAGES, EXPANDED),
            ),
        ],
        [4, 1],
        [240, 24],
    )
