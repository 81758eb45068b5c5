# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Implements an all-gather of small messages between the GPUs of one host, and the selection of the best
token across all ranks. Both use the push protocol of `kernels.triton.peer_arena`. Calls to both may be mixed
with calls to `all_reduce_add` on the same arena.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.draws import BAD_TOKEN
from kernels.triton.peer_arena import (
    PROGRAMS,
    REGION_BLOCK,
    Arena,
    begin_call,
    payload,
    receive,
    send,
    send_to_peers,
    signal,
)

_WARP_WORDS = 128
"""Number of 32-bit words that a warp exchanges (four per thread)."""
_MAX_WARP_PROGRAMS = 8
"""Maximum number of single-warp programs. If a message would need more than this, its items are made larger
instead."""


def fits(words: int, arena: Arena) -> bool:
    """Return whether `all_gather` supports a message of `words` 32-bit words."""
    return 0 < words <= arena.max_words


def best_fits(rows: int) -> bool:
    """Return whether `best_of_ranks` supports `rows` rows."""
    return 0 < rows <= PROGRAMS * _WARP_WORDS


def all_gather(
    x: torch.Tensor,
    width: int,
    arena: Arena,
    *,
    out: torch.Tensor | None = None,
    pdl: bool = True,
    fence: bool = False,
) -> torch.Tensor:
    """Return all ranks' words: [rows, world, width] int32, where rows is count / width.

    x: [count] int32, contiguous, with the same count on every rank.
    width: number of words per row.
    out: contiguous tensor for the result; allocated if None.
    fence: if true, this call also makes all earlier memory writes on each rank's stream visible to the other
      ranks.

    A word with the value EMPTY_WORD is received as 0. For floats, this changes at most the sign of a zero.
    Raises ValueError if `fits` is False. Every rank must make the same calls in the same order.
    """
    count = x.numel()
    if not fits(count, arena):
        raise ValueError(
            f"a message of {count} words does not fit into an arena of {arena.max_words} words; "
            "use another collective"
        )
    block = _WARP_WORDS if count <= _WARP_WORDS * _MAX_WARP_PROGRAMS else REGION_BLOCK
    shape = (count // width, arena.world, width)
    result = torch.empty(shape, dtype=torch.int32, device=x.device) if out is None else out
    _all_gather[(min(-(-count // block), PROGRAMS),)](
        x,
        result,
        arena.addresses,
        arena.calls,
        arena.stop_address,
        count,
        width,
        arena.items,
        RANK=arena.rank,
        WORLD=arena.world,
        BLOCK=block,
        REGION_BLOCK=REGION_BLOCK,
        WARPS=block // _WARP_WORDS,
        FENCE=fence,
        PDL=pdl,
        num_warps=block // _WARP_WORDS,
        launch_pdl=pdl,
    )
    return result


def best_of_ranks(values: torch.Tensor, ids: torch.Tensor, arena: Arena, *, pdl: bool = True) -> torch.Tensor:
    """For each row, return the id of the largest value over all ranks: [rows] int64.

    values: [rows] float32.
    ids: [rows] int64 below 2³¹.

    Ties go to the lowest rank. The result is BAD_TOKEN if a value is NaN or the largest value is infinite.
    Every rank must make the same calls in the same order. `best_fits` must be True for the number of rows.
    """
    rows = len(values)
    result = torch.empty(rows, dtype=torch.int64, device=values.device)
    _best_of_ranks[(-(-rows // _WARP_WORDS),)](
        values,
        ids,
        result,
        arena.addresses,
        arena.calls,
        arena.stop_address,
        rows,
        arena.items,
        RANK=arena.rank,
        WORLD=arena.world,
        BLOCK=_WARP_WORDS,
        REGION_BLOCK=REGION_BLOCK,
        BAD=BAD_TOKEN,
        WARPS=1,
        PDL=pdl,
        num_warps=1,
        launch_pdl=pdl,
    )
    return result


@gluon.jit(do_not_specialize=["count", "width", "stop_address"])
def _all_gather(
    x,
    result,
    addresses,
    calls,
    stop_address,
    count,
    width,
    region_items,
    RANK: gl.constexpr,
    WORLD: gl.constexpr,
    BLOCK: gl.constexpr,
    REGION_BLOCK: gl.constexpr,
    WARPS: gl.constexpr,
    FENCE: gl.constexpr,
    PDL: gl.constexpr,
):
    """Exchange a message's items, each of which is BLOCK consecutive words. Program i exchanges items i, i +
    programs, i + 2 × programs, …. Lanes past the end of the message exchange zeros."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    lane = gl.arange(0, BLOCK, layout=layout)
    stop = (lane * 0).to(gl.int64) + stop_address.to(gl.int64)
    call, received, sent, source_bytes = begin_call(
        addresses, calls, lane, region_items, RANK, WORLD, REGION_BLOCK, PDL
    )
    if FENCE:
        signal("fence.acq_rel.sys; mov.u32 $0, 0;")

    item = program
    place = call * 0
    while item * BLOCK < count:
        index = item * BLOCK + lane
        words = payload(gl.load(x + index, mask=index < count, other=0))
        send_to_peers(addresses, sent + place.to(gl.int64) * (BLOCK * 4), words, RANK, WORLD)
        to = (index // width) * (width * WORLD) + RANK * width + index % width
        gl.store(result + to, words, mask=index < count)
        item += programs
        place += 1

    item = program
    place = call * 0
    while item * BLOCK < count:
        index = item * BLOCK + lane
        for hop in gl.static_range(1, WORLD):
            source = (RANK + hop) % WORLD
            at = received + source * source_bytes + place.to(gl.int64) * (BLOCK * 4)
            words = receive(at, stop)
            to = (index // width) * (width * WORLD) + source * width + index % width
            gl.store(result + to, words, mask=index < count)
        item += programs
        place += 1
    if FENCE:
        signal("fence.acq_rel.sys; mov.u32 $0, 0;")
    gl.store(calls + program, call + 1)


@gluon.jit(do_not_specialize=["rows", "stop_address"])
def _best_of_ranks(
    values,
    ids,
    result,
    addresses,
    calls,
    stop_address,
    rows,
    region_items,
    RANK: gl.constexpr,
    WORLD: gl.constexpr,
    BLOCK: gl.constexpr,
    REGION_BLOCK: gl.constexpr,
    BAD: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Exchange the values of BLOCK rows as one item and their ids as a second one, then select each row's
    best id."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    program = gl.program_id(0)
    lane = gl.arange(0, BLOCK, layout=layout)
    stop = (lane * 0).to(gl.int64) + stop_address.to(gl.int64)
    row = program * BLOCK + lane
    call, received, sent, source_bytes = begin_call(
        addresses, calls, lane, region_items, RANK, WORLD, REGION_BLOCK, PDL
    )

    own_bits = gl.load(values + row, mask=row < rows, other=0.0).to(gl.int32, bitcast=True)
    own_bits = payload(own_bits)
    own_ids = gl.load(ids + row, mask=row < rows, other=0).to(gl.int32)
    for hop in gl.static_range(1, WORLD):
        peer = sent + gl.load(addresses + (RANK + hop) % WORLD)
        send(peer, own_bits)
        send(peer + BLOCK * 4, own_ids)

    best_bits = own_bits
    best_ids = own_ids
    for source in gl.static_range(WORLD):
        if source == RANK:
            bits = own_bits
            token = own_ids
        else:
            at = received + source * source_bytes
            bits = receive(at, stop)
            token = receive(at + BLOCK * 4, stop)
        if source == 0:
            best_bits = bits
            best_ids = token
        else:
            value = bits.to(gl.float32, bitcast=True)
            # A NaN replaces any value, and no value replaces a NaN.
            better = (value > best_bits.to(gl.float32, bitcast=True)) | (value != value)
            best_bits = gl.where(better, bits, best_bits)
            best_ids = gl.where(better, token, best_ids)
    finite = (best_bits & 0x7F800000) != 0x7F800000
    gl.store(result + row, gl.where(finite, best_ids, BAD).to(gl.int64), mask=row < rows)
    gl.store(calls + program, call + 1)
