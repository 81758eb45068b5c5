# mypy: allow-untyped-defs, disable-error-code="assignment"
"""All-reduce of small messages between the GPUs of one host, fused with the residual add.

A push protocol, as in NCCL's LL and TensorRT-LLM's Lamport kernels. Every rank owns an *arena*, device memory
that all ranks have mapped. A rank writes its part of a message into the arenas of its peers and polls its own
arena until the parts of its peers are there. A 32-bit word that has not arrived holds a reserved value, so
data and flag are one store, and no barrier or fence is needed. Sums are taken in rank order in float32, so
all ranks get the same bits.

Why an arena can be used again at once:
- Each program (CUDA block) of the grid uses a region of its own, which no other program reads or writes, and
  counts its calls in device memory. The parity of the count selects one of the region's two halves, so
  replays of a CUDA graph need nothing from the host. All ranks must launch the same grids in the same order.
- The thread that reads a word writes the reserved value back at once. A peer writes that word again two calls
  later, and only after it has received this rank's part of the call between, which this rank sends after the
  call with the write-back has ended.

A peer that stops would leave the others polling for ever, so the poll loop also reads a word that the host
can set. Once it is set, results are undefined and every later call ends soon; the group of ranks has to be
formed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EMPTY_WORD = -(1 << 31)
"""The word that marks "not arrived": in 16-bit floats a pair of +0.0 and -0.0. Payload words of this value
are sent as zero."""

PROGRAMS = 528
"""The largest grid. All programs must be resident at once, since they wait for each other's counterparts on
other GPUs: four per multiprocessor of an H100 or H200."""

_WARPS = 4
_BLOCK = 512
"""Words of one item: 16 bytes per thread."""
_MIN_BLOCK = 128


@dataclass(frozen=True, slots=True)
class Arena:
    """One rank's view of the memory through which a group of ranks exchanges messages."""

    rank: int
    world: int
    addresses: torch.Tensor
    """[world] int64 on the device: where each rank's arena begins."""
    calls: torch.Tensor
    """[PROGRAMS] int32 on the device: how many calls each program of the grid has taken part in."""
    stop_address: int
    """Address, on host or device, of an int32 word that ends all waiting when it is not 0."""
    items: int
    """Items of up to _BLOCK words that one program can exchange in a call."""

    @property
    def max_words(self) -> int:
        """The largest message in 32-bit words, where its rows divide into items of _BLOCK words."""
        return self.items * PROGRAMS * _BLOCK


def arena_words(world: int, items: int) -> int:
    """Return the size of an arena in 32-bit words. It must hold EMPTY_WORD throughout before the first
    call."""
    return PROGRAMS * 2 * world * items * _BLOCK


def block_words(words: int) -> int | None:
    """Return the words of one item for rows of `words` 32-bit words, or None if such rows cannot be sent."""
    block = _BLOCK
    while block >= _MIN_BLOCK:
        if words % block == 0:
            return block
        block //= 2
    return None


def fits(rows: int, hidden: int, arena: Arena) -> bool:
    """Return whether `all_reduce_add` can take a message of `[rows, hidden]` 16-bit numbers."""
    block = block_words(hidden // 2) if hidden % 2 == 0 else None
    return block is not None and rows * (hidden // 2 // block) <= PROGRAMS * arena.items


def all_reduce_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    arena: Arena,
    *,
    two_shot: bool,
    gain: torch.Tensor | None = None,
    scaled: torch.Tensor | None = None,
    squares: torch.Tensor | None = None,
    pdl: bool = True,
) -> None:
    """Add the sum of `x` over all ranks to `residual`, in place and with one rounding.

    x, residual: [rows, hidden] bfloat16 or float16, contiguous. `residual` must be equal on all ranks.
    two_shot: each item is summed by one rank, which sends the result to the others. That moves less data than
        one-shot, where every rank sends everything to all others, but waits twice.
    gain: [hidden], the weight of the RMSNorm that reads the residual next; with it come its two results:
    scaled: [rows, hidden], residual × gain, and
    squares: [parts, rows] float32, sums of residual² over `squares_parts` equal parts of each row.
    Raises ValueError where `fits` is False. Every rank must make the same calls in the same order.
    """
    rows, hidden = x.shape
    if not fits(rows, hidden, arena):
        raise ValueError(
            f"a message of {rows} × {hidden} numbers does not fit an arena of {arena.max_words} words; "
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
        REGION_BLOCK=_BLOCK,
        FLOAT=gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16,
        NORM=gain is not None,
        TWO_SHOT=two_shot,
        WARPS=max(1, _WARPS * block // _BLOCK),
        PDL=pdl,
        num_warps=max(1, _WARPS * block // _BLOCK),
        launch_pdl=pdl,
    )


def squares_parts(hidden: int) -> int:
    """Return into how many parts `all_reduce_add` divides a row for its sums of squares."""
    block = block_words(hidden // 2)
    assert block is not None
    return hidden // 2 // block


# ── the kernel ───────────────────────────────────────────────────────────────────────────────────────

_EMPTY = gl.constexpr(EMPTY_WORD)

_POLL = gl.constexpr("""{
.reg .pred missing;
.reg .u32 polls, stop;
mov.u32 polls, 0;
again:
ld.relaxed.sys.global.v4.u32 {$0, $1, $2, $3}, [$4];
setp.eq.u32 missing, $0, 0x80000000;
setp.eq.or.u32 missing, $1, 0x80000000, missing;
setp.eq.or.u32 missing, $2, 0x80000000, missing;
setp.eq.or.u32 missing, $3, 0x80000000, missing;
@!missing bra done;
add.u32 polls, polls, 1;
and.b32 stop, polls, 0x3ff;
setp.ne.u32 missing, stop, 0;
@missing bra again;
ld.relaxed.sys.global.u32 stop, [$8];
setp.eq.u32 missing, stop, 0;
@missing bra again;
done:
}""")
"""Four words at once, since a thread owns four in a row; the host's word is read every 1,024th time."""

_PUSH = gl.constexpr("""{
st.relaxed.sys.global.v4.b32 [$4], {$8, $9, $10, $11};
mov.u32 $0, 0; mov.u32 $1, 0; mov.u32 $2, 0; mov.u32 $3, 0;
}""")


@gluon.jit
def _receive(address, stop):
    """Wait until four words a thread have arrived, and return them."""
    return gl.inline_asm_elementwise(
        _POLL, "=&r,=&r,=&r,=&r,l,l,l,l,l,l,l,l", [address, stop], gl.int32, False, 4
    )


@gluon.jit
def _send(address, words):
    """Store four words a thread in any rank's arena."""
    gl.inline_asm_elementwise(_PUSH, "=r,=r,=r,=r,l,l,l,l,r,r,r,r", [address, words], gl.int32, False, 4)


@gluon.jit
def _signal(text: gl.constexpr):
    gl.inline_asm_elementwise(text, "=r", [], gl.int32, False, 1)


@gluon.jit
def _low(words, FLOAT: gl.constexpr):
    """The first number of each word, in float32."""
    return (words & 0xFFFF).to(gl.int16).to(FLOAT, bitcast=True).to(gl.float32)


@gluon.jit
def _high(words, FLOAT: gl.constexpr):
    """The second number of each word, in float32."""
    return (words >> 16).to(gl.int16).to(FLOAT, bitcast=True).to(gl.float32)


@gluon.jit
def _pack(low, high, FLOAT: gl.constexpr):
    """Words of two numbers each, rounded from float32."""
    first = low.to(FLOAT).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return (high.to(FLOAT).to(gl.int16, bitcast=True).to(gl.int32) << 16) | first


@gluon.jit
def _sum(
    own_words, received, first, stride, stop, RANK: gl.constexpr, WORLD: gl.constexpr, FLOAT: gl.constexpr
):
    """Receive an item from every peer and add all parts in rank order: the two halves of each word."""
    low = (own_words * 0).to(gl.float32)
    high = low
    for source in gl.static_range(WORLD):
        if source == RANK:
            words = own_words
        else:
            at = received + source * stride + first
            words = _receive(at, stop)
            _send(at, own_words * 0 + _EMPTY)
        low += _low(words, FLOAT)
        high += _high(words, FLOAT)
    return low, high


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
    """Store an item of the new residual, and what the next norm needs of it."""
    gl.store(residual + item * BLOCK + lane, words)
    if NORM:
        weights = gl.load(gain + (item % PARTS) * BLOCK + lane)
        low = _low(words, FLOAT)
        high = _high(words, FLOAT)
        product = _pack(low * _low(weights, FLOAT), high * _high(weights, FLOAT), FLOAT)
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
    NORM: gl.constexpr,
    TWO_SHOT: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Program i exchanges items i, i + programs, …; an item is BLOCK words of one row."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    PARTS: gl.constexpr = WORDS // BLOCK
    program = gl.program_id(0)
    programs = gl.num_programs(0)
    lane = gl.arange(0, BLOCK, layout=layout)
    stop = (lane * 0).to(gl.int64) + stop_address.to(gl.int64)
    own = gl.load(addresses + RANK)
    if PDL:
        _signal("griddepcontrol.launch_dependents; mov.u32 $0, 0;")
        _signal("griddepcontrol.wait; mov.u32 $0, 0;")
    call = gl.load(calls + program)
    # In bytes: of one source in a half of the region, and where this call's half begins.
    source_bytes = region_items.to(gl.int64) * (REGION_BLOCK * 4)
    half = (program.to(gl.int64) * 2 + (call & 1)) * (WORLD * source_bytes)
    received = lane.to(gl.int64) * 4 + own + half
    sent = lane.to(gl.int64) * 4 + half + RANK * source_bytes
    items = rows * PARTS

    item = program
    place = call * 0
    while item < items:
        words = gl.load(x + item * BLOCK + lane)
        words = gl.where(words == _EMPTY, 0, words)
        at = sent + place.to(gl.int64) * (BLOCK * 4)
        if TWO_SHOT:
            if place % WORLD != RANK:
                _send(at + gl.load(addresses + place % WORLD), words)
        else:
            for hop in gl.static_range(1, WORLD):
                _send(at + gl.load(addresses + (RANK + hop) % WORLD), words)
        item += programs
        place += 1

    item = program
    place = call * 0
    while item < items:
        if not TWO_SHOT or place % WORLD == RANK:
            words = gl.load(x + item * BLOCK + lane)
            old = gl.load(residual + item * BLOCK + lane)
            first = place.to(gl.int64) * (BLOCK * 4)
            low, high = _sum(words, received, first, source_bytes, stop, RANK, WORLD, FLOAT)
            words = _pack(low + _low(old, FLOAT), high + _high(old, FLOAT), FLOAT)
            words = gl.where(words == _EMPTY, 0, words)
            if TWO_SHOT:
                for hop in gl.static_range(1, WORLD):
                    _send(sent + first + gl.load(addresses + (RANK + hop) % WORLD), words)
            _finish(words, item, lane, residual, gain, scaled, squares, rows, PARTS, BLOCK, FLOAT, NORM)
        item += programs
        place += 1

    if TWO_SHOT:
        item = program
        place = call * 0
        while item < items:
            if place % WORLD != RANK:
                at = received + (place % WORLD).to(gl.int64) * source_bytes + place.to(gl.int64) * (BLOCK * 4)
                words = _receive(at, stop)
                _send(at, words * 0 + _EMPTY)
                _finish(words, item, lane, residual, gain, scaled, squares, rows, PARTS, BLOCK, FLOAT, NORM)
            item += programs
            place += 1
    gl.store(calls + program, call + 1)
