# mypy: allow-untyped-defs, disable-error-code="assignment"
"""Implements an all-reduce of a few rows, fused with the residual add, the RMSNorm that follows, and the
quantisation of the normalised rows.

A quantised row's scale depends on the whole row, so each program exchanges and normalises a whole row. The
exchange is one-shot. Sums are computed in the same order as in `kernels.triton.all_reduce`, so results are
bit-identical on all ranks.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from kernels.triton.all_reduce import high_half, low_half, receive_sum
from kernels.triton.fused import FP8
from kernels.triton.peer_arena import PROGRAMS, REGION_BLOCK, Arena, begin_call, payload, send_to_peers

_MAX_BLOCK = 2048
"""Maximum number of words that a program loads at a time: 16 bytes per thread of 16 warps."""
_MIN_BLOCK = 128


def fits(rows: int, hidden: int, arena: Arena) -> bool:
    """Return whether `all_reduce_norm_fp8` supports a message of `[rows, hidden]` 16-bit numbers."""
    words = hidden // 2
    return 0 < rows <= PROGRAMS and hidden % (2 * _MIN_BLOCK) == 0 and words <= arena.items * REGION_BLOCK


def all_reduce_norm_fp8(
    x: torch.Tensor,
    residual: torch.Tensor,
    gain: torch.Tensor,
    eps: float,
    arena: Arena,
    *,
    pdl: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the sum of `x` over all ranks to `residual`, in place and with one rounding. Return the quantised
    RMSNorm of the result: values `[rows, hidden]` e4m3 and scales `[rows, 1]` float32. Results are rounded as
    in `fused.rms_norm_fp8`.

    x, residual: [rows, hidden] bfloat16 or float16, contiguous. `residual` must be identical on all ranks.
    gain: [hidden].

    Raises ValueError if `fits` is False. Every rank must make the same calls in the same order.
    """
    rows, hidden = x.shape
    if not fits(rows, hidden, arena):
        raise ValueError(
            f"a message of {rows} × {hidden} numbers exceeds {PROGRAMS} rows of "
            f"{arena.items * REGION_BLOCK} words; use all_reduce_add and a separate norm"
        )
    values = torch.empty((rows, hidden), dtype=FP8, device=x.device)
    scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = block_words(hidden // 2)
    warps = block // _MIN_BLOCK
    _all_reduce_norm[(rows,)](
        x.view(torch.int32),
        residual.view(torch.int32),
        gain.view(torch.int32),
        values,
        scales,
        arena.addresses,
        arena.calls,
        arena.stop_address,
        eps,
        arena.items,
        RANK=arena.rank,
        WORLD=arena.world,
        WORDS=hidden // 2,
        BLOCK=block,
        REGION_BLOCK=REGION_BLOCK,
        FLOAT=gl.bfloat16 if x.dtype == torch.bfloat16 else gl.float16,
        QUANTISED=gl.float8e4nv,
        WARPS=warps,
        PDL=pdl,
        num_warps=warps,
        launch_pdl=pdl,
    )
    return values, scales


def block_words(words: int) -> int:
    """Return how many words of a row a program loads at a time: a multiple of _MIN_BLOCK. words: the row's
    length."""
    block = _MAX_BLOCK
    while words % block:
        block //= 2
    return block


@gluon.jit(do_not_specialize=["stop_address"])
def _all_reduce_norm(
    x,
    residual,
    gain,
    values,
    scales,
    addresses,
    calls,
    stop_address,
    eps,
    region_items,
    RANK: gl.constexpr,
    WORLD: gl.constexpr,
    WORDS: gl.constexpr,
    BLOCK: gl.constexpr,
    REGION_BLOCK: gl.constexpr,
    FLOAT: gl.constexpr,
    QUANTISED: gl.constexpr,
    WARPS: gl.constexpr,
    PDL: gl.constexpr,
):
    """Exchange, add and normalise one row per program, in parts of BLOCK words."""
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    numbers: gl.constexpr = gl.BlockedLayout([8], [32], [WARPS], [0])
    PARTS: gl.constexpr = WORDS // BLOCK
    row = gl.program_id(0)
    lane = gl.arange(0, BLOCK, layout=layout)
    column = gl.arange(0, 2 * BLOCK, layout=numbers)
    stop = (lane * 0).to(gl.int64) + stop_address.to(gl.int64)
    gains = ()
    for part in gl.static_range(PARTS):
        gains = gains + (gl.load(gain + part * BLOCK + lane),)  # noqa: RUF005 (a kernel's tuples know + alone)
    call, received, sent, source_bytes = begin_call(
        addresses, calls, lane, region_items, RANK, WORLD, REGION_BLOCK, PDL
    )

    own_parts = ()
    before = ()
    for part in gl.static_range(PARTS):
        at = row * WORDS + part * BLOCK + lane
        words = payload(gl.load(x + at))
        own_parts = own_parts + (words,)  # noqa: RUF005
        before = before + (gl.load(residual + at),)  # noqa: RUF005
        send_to_peers(addresses, sent + part * (BLOCK * 4), words, RANK, WORLD)

    sums = ()
    squares = 0.0
    for part in gl.static_range(PARTS):
        at = received + part * (BLOCK * 4)
        words = receive_sum(own_parts[part], before[part], at, source_bytes, stop, RANK, WORLD, FLOAT, True)
        gl.store(residual + row * WORDS + part * BLOCK + lane, words)
        low = low_half(words, FLOAT)
        high = high_half(words, FLOAT)
        squares += gl.sum(low * low + high * high, axis=0)
        sums = sums + (words,)  # noqa: RUF005

    inverse = gl.rsqrt(squares / (2 * WORDS) + eps)
    lows = ()
    highs = ()
    largest = 0.0
    for part in gl.static_range(PARTS):
        low = (low_half(sums[part], FLOAT) * inverse * low_half(gains[part], FLOAT)).to(FLOAT).to(gl.float32)
        high = (
            (high_half(sums[part], FLOAT) * inverse * high_half(gains[part], FLOAT)).to(FLOAT).to(gl.float32)
        )
        largest = gl.maximum(largest, gl.max(gl.maximum(gl.abs(low), gl.abs(high)), axis=0))
        lows = lows + (low,)  # noqa: RUF005
        highs = highs + (high,)  # noqa: RUF005
    factor = gl.div_rn(448.0, gl.where(largest > 0.0, largest, 1.0))
    for part in gl.static_range(PARTS):
        pairs = gl.join(lows[part] * factor, highs[part] * factor)
        both = gl.convert_layout(gl.reshape(pairs, [2 * BLOCK]), numbers)
        gl.store(values + (row * WORDS + part * BLOCK) * 2 + column, both.to(QUANTISED))
    gl.store(scales + row, gl.div_rn(largest, 448.0))
    gl.store(calls + row, call + 1)
