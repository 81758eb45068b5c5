# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Implements an all-reduce of small messages between the GPUs of one host, fused with the residual add.

The all-reduce uses the push protocol of `kernels.triton.peer_arena`. Sums are computed in rank order in
float32, so results are bit-identical on all ranks.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.peer_arena import (
    PROGRAMS,
    REGION_BLOCK,
    Arena,
    begin_call,
    payload,
    receive,
    send,
    send_to_peers,
)

_WARPS = 4
_MIN_BLOCK = 128


def block_words(words: int) -> int | None:
    """Return how many words of a row are sent as one item, or None if rows of this length cannot be sent.

    words: length of a row in 32-bit words.
    """
    block = REGION_BLOCK
    while block >= _MIN_BLOCK:
        if words % block == 0:
            return block
        block //= 2
    return None


def max_rows(hidden: int, arena: Arena) -> int:
    """Return the maximum number of rows that `all_reduce_add` supports, or 0 if rows of this length cannot be
    sent.

    hidden: length of a row in 16-bit numbers.
    """
    block = block_words(hidden // 2) if hidden % 2 == 0 else None
    return 0 if block is None else PROGRAMS * arena.items // (hidden // 2 // block)


def fits(rows: int, hidden: int, arena: Arena) -> bool:
    """Return whether `all_reduce_add` supports a message of `[rows, hidden]` 16-bit numbers."""
    return rows <= max_rows(hidden, arena)


def all_reduce_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    arena: Arena,
    *,
    two_shot: bool,
    add: bool = True,
    gain: torch.Tensor | None = None,
    scaled: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    pdl: bool = True,
) -> None:
    """Add the sum of `x` over all ranks to `residual`, in place and with one rounding. With `add=False`, the
    sum replaces `residual`.

    x, residual: [rows, hidden] bfloat16 or float16, contiguous. `residual` must be identical on all ranks.
    two_shot: if true, each item is summed by one rank, which sends the result to the others; the items are
      divided evenly among the ranks. If false (one-shot), every rank sends all items to all others. Two-shot
      mode transfers less data but waits twice.
    gain: [hidden], gain of the RMSNorm that follows. If given, the call also computes `scaled` and `squares`.
    scaled: [rows, hidden], residual × gain.
    squares: [parts, rows] float32, sums of residual² over `squares_parts` equal parts of each row.

    Raises ValueError if `fits` is False. Every rank must make the same calls in the same order.
    """
    rows, hidden = x.shape
    if not fits(rows, hidden, arena):
        raise ValueError(
            f"a message of {rows} × {hidden} numbers does not fit into an arena of {arena.max_words} words; "
            "use another collective"
        )
    words = hidden // 2
    block = block_words(words)
    assert block is not None
    _all_reduce_add[(min(rows * (words // block), PROGRAMS),)](
        x.view(torch.int32),
        residual.view(torch.int32),
        None if gain is None else gain.view(torch.int32),
        None if scaled is None else scaled.view(torch.int32),
        squares,
        arena.addresses,
        arena.calls,
        arena.stop_address,
        rows,
        arena.items,
        RANK=arena.rank,
        WORLD=arena.world,
        WORDS=words,
        BLOCK=block,
        REGION_BLOCK=REGION_BLOCK,
        FLOAT=gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16,
        ADD=add,
        NORM=gain is not None,
        TWO_SHOT=two_shot,
        WARPS=max(1, _WARPS * block // REGION_BLOCK),
        PDL=pdl,
        num_warps=max(1, _WARPS * block // REGION_BLOCK),
        launch_pdl=pdl,
    )


def squares_parts(hidden: int) -> int:
    """Return the number of parts into which `all_reduce_add` divides a row for its sums of squares."""
    block = block_words(hidden // 2)
    assert block is not None
    return hidden // 2 // block


# ── the kernel, and functions shared with `all_reduce_norm` ──────────────────────────────────────────────


@gluon.jit
def low_half(words, FLOAT: gl.constexpr):
    """Unpack the lower 16-bit value of each packed 32-bit word, as float32."""
    return (words & 0xFFFF).to(gl.int16).to(FLOAT, bitcast=True).to(gl.float32)


@gluon.jit
def high_half(words, FLOAT: gl.constexpr):
    """Unpack the upper 16-bit value of each packed 32-bit word, as float32."""
    return (words >> 16).to(gl.int16).to(FLOAT, bitcast=True).to(gl.float32)


@gluon.jit
def _pack(low, high, FLOAT: gl.constexpr):
    """Round two float32 tensors to 16-bit numbers and pack each pair into a 32-bit word."""
    first = low.to(FLOAT).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return (high.to(FLOAT).to(gl.int16, bitcast=True).to(gl.int32) << 16) | first


@gluon.jit
def receive_sum(
    own_words,
    residual,
    received,
    stride,
    stop,
    RANK: gl.constexpr,
    WORLD: gl.constexpr,
    FLOAT: gl.constexpr,
    ADD: gl.constexpr,
):
    """Receive one item from every peer and add all ranks' items in rank order. If ADD is set, also add
    `residual`. Returns the rounded sums.

    received: address of rank 0's item.
    stride: number of bytes from one rank's item to the next.
    """
    low = (own_words * 0).to(gl.float32)
    high = low
    for source in gl.static_range(WORLD):
        words = own_words if source == RANK else receive(received + source * stride, stop)
        low += low_half(words, FLOAT)
        high += high_half(words, FLOAT)
    if ADD:
        low += low_half(residual, FLOAT)
        high += high_half(residual, FLOAT)
    return payload(_pack(low, high, FLOAT))


@gluon.jit
def _finish(
    words,
    item,
    lane,
    residual,
    gain,
    scaled,
    squares,
    rows,
    PARTS: gl.constexpr,
    BLOCK: gl.constexpr,
    FLOAT: gl.constexpr,
    NORM: gl.constexpr,
):
    """Store an item of the new residual and, if NORM is set, the scaled values and sum of squares of a
    deferred norm."""
    gl.store(residual + item * BLOCK + lane, words)
    if NORM:
        weights = gl.load(gain + (item % PARTS) * BLOCK + lane)
        low = low_half(words, FLOAT)
        high = high_half(words, FLOAT)
        product = _pack(low * low_half(weights, FLOAT), high * high_half(weights, FLOAT), FLOAT)
        gl.store(scaled + item * BLOCK + lane, product)
        gl.store(squares + (item % PARTS) * rows + item // PARTS, gl.sum(low * low + high * high, axis=0))


@gluon.jit(do_not_specialize=["rows", "stop_address"])
def _all_reduce_add(
    x,
    residual,
    gain,
    scaled,
    squares,
    addresses,
    calls,
    stop_address,
    rows,
    region_items,
    RANK: gl.constexpr,
    WORLD: gl.constexpr,
    WORDS: gl.constexpr,
    BLOCK: gl.constexpr,
    REGION_BLOCK: gl.constexpr,
    FLOAT: gl.constexpr,
    ADD: gl.constexpr,
    NORM: gl.constexpr,
    TWO_SHOT: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Exchange a message's items, each of which is BLOCK words of one row. Program i exchanges items i, i +
    programs, i + 2 × programs, …."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    PARTS: gl.constexpr = WORDS // BLOCK
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    lane = gl.arange(0, BLOCK, layout=layout)
    stop = (lane * 0).to(gl.int64) + stop_address.to(gl.int64)
    call, received, sent, source_bytes = begin_call(
        addresses, calls, lane, region_items, RANK, WORLD, REGION_BLOCK, PDL
    )
    items = rows * PARTS

    item = program
    place = call * 0
    while item < items:
        words = payload(gl.load(x + item * BLOCK + lane))
        at = sent + place.to(gl.int64) * (BLOCK * 4)
        if TWO_SHOT:
            owner = (program + place) % WORLD
            if owner != RANK:
                send(at + gl.load(addresses + owner), words)
        else:
            send_to_peers(addresses, at, words, RANK, WORLD)
        item += programs
        place += 1

    item = program
    place = call * 0
    while item < items:
        if not TWO_SHOT or (program + place) % WORLD == RANK:
            words = gl.load(x + item * BLOCK + lane)
            old = gl.load(residual + item * BLOCK + lane) if ADD else words
            first = place.to(gl.int64) * (BLOCK * 4)
            words = receive_sum(words, old, received + first, source_bytes, stop, RANK, WORLD, FLOAT, ADD)
            if TWO_SHOT:
                send_to_peers(addresses, sent + first, words, RANK, WORLD)
            _finish(words, item, lane, residual, gain, scaled, squares, rows, PARTS, BLOCK, FLOAT, NORM)
        item += programs
        place += 1

    if TWO_SHOT:
        item = program
        place = call * 0
        while item < items:
            owner = (program + place) % WORLD
            if owner != RANK:
                at = received + owner.to(gl.int64) * source_bytes + place.to(gl.int64) * (BLOCK * 4)
                words = receive(at, stop)
                _finish(words, item, lane, residual, gain, scaled, squares, rows, PARTS, BLOCK, FLOAT, NORM)
            item += programs
            place += 1
    gl.store(calls + program, call + 1)
