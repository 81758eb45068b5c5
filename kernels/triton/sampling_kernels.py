# mypy: allow-untyped-defs
"""Contains the noise functions, the logit loads, and the sampling kernels *scan*, *pick*, *edit* and
*scatter*. For the algorithm, see `kernels.triton.sampling`."""

from __future__ import annotations

import triton
import triton.language as tl

# ── noise ────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def noise_key(base, position):
    """Return the noise key splitmix64(base + position · 0x9E3779B97F4A7C15); see
    `kernels.sampling.noise_keys`."""
    x = base.to(tl.uint64, bitcast=True) + position.to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x += 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _fmix32(x):
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _log2(x, NVIDIA: tl.constexpr):
    """Return the base-2 logarithm, using NVIDIA's approximate hardware logarithm, which takes 1 instruction
    instead of 25. The error is at most 2^-22: absolute for arguments near 1, otherwise relative."""
    if NVIDIA:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.log2(x)
    return y


@triton.jit
def gumbel(key, token_hash, NVIDIA: tl.constexpr):
    """Return the same noise as `kernels.sampling.gumbel_noise`, to within 4e-6."""
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32) | 1
    bits = _fmix32((token_hash.to(tl.uint32, bitcast=True) ^ low) * high) & 0x7FFFFFFF
    # Compute (bits + ½) / 2^31. The multiplication is exact, so the result is rounded as in the reference.
    share = bits.to(tl.int32).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10
    share = tl.minimum(share, 1.0 - 5.9604645e-8)
    # Compute -ln(1 - share). For small shares, use a polynomial (Chebyshev fit, relative error 1.7e-7),
    # because 1 - share would lose digits.
    series = 0.14381851255893707 + share * 0.3399522006511688
    series = 0.2578205168247223 + share * series
    series = 0.3328547775745392 + share * series
    series = 0.5000105500221252 + share * series
    series = share * (0.9999999403953552 + share * series)
    wait = tl.where(share < 0.25, series, -0.6931471805599453 * _log2(1.0 - share, NVIDIA))
    return -0.6931471805599453 * _log2(wait, NVIDIA)


# ── loads ────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def place_of(stride, index, edited_index, columns, i, INDEXED: tl.constexpr, EDITED: tl.constexpr):
    """Return the offsets of the logits of sampling row `i` and of their edited copy. The second offset is
    negative if there is no copy."""
    at = i * stride
    if INDEXED:
        at = tl.load(index + i).to(tl.int64) * stride
    copy = tl.full((), -1, tl.int64)
    if EDITED:
        copy = tl.load(edited_index + i).to(tl.int64) * columns
    return at, copy


@triton.jit
def read(values, edited, at, copy, column, columns, EDITED: tl.constexpr):
    """Load logits as float32. Columns past the last one are loaded as -inf. NaN is replaced with infinity,
    because computing a maximum might ignore a NaN."""
    inside = column < columns
    if EDITED:
        if copy >= 0:
            x = tl.load(edited + copy + column, mask=inside, other=float("-inf"))
        else:
            x = tl.load(values + at + column, mask=inside, other=float("-inf")).to(tl.float32)
    else:
        x = tl.load(values + at + column, mask=inside, other=float("-inf")).to(tl.float32)
    return tl.where(x == x, x, float("inf"))


@triton.jit
def finite(x):
    """Replace -inf with 0, because subtracting -inf from -inf would give NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def flip(bits):
    """Map the bits of float32 numbers to integers that sort in the same order as the numbers. The function is
    its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def rank_of(x):
    """Map float32 numbers to integers that sort in the same order. Both zeros map to the same integer."""
    return tl.where(x == 0.0, 0, flip(x.to(tl.int32, bitcast=True)))


# ── scan and pick ────────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["rows"])
def scan_kernel(
    values,
    stride,
    index,
    edited,
    edited_index,
    columns,
    first,
    hashes,
    table_rows,
    positions,
    noise_base,
    floats,
    floats_stride,
    top_k,
    partials,
    groups,
    rows,
    chunks,
    DRAW: tl.constexpr,
    CHUNK: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    INDEXED: tl.constexpr,
    EDITED: tl.constexpr,
    NVIDIA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scan one chunk of one row. DRAW = 0 selects the largest logit, DRAW = 1 also adds noise, and DRAW = 2
    also stores the values needed by top-k, top-p and min-p."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    table_row = i
    if DRAW > 0:
        table_row = tl.load(table_rows + i).to(tl.int64)
        if table_row < 0:
            return
    at, copy = place_of(stride, index, edited_index, columns, i, INDEXED, EDITED)
    x = read(values, edited, at, copy, column, columns, EDITED)
    score = x
    out = partials + i * chunks + chunk
    plane = rows.to(tl.int64) * chunks
    if DRAW > 0:
        x *= tl.load(floats + table_row * floats_stride)
        noise = tl.load(floats + table_row * floats_stride + 1)
        score = x
        if noise != 0.0:
            key = noise_key(tl.load(noise_base + table_row), tl.load(positions + i))
            score = x + noise * gumbel(key, tl.load(hashes + column, mask=column < columns, other=0), NVIDIA)
    # Combine a chunk's reductions where possible, because each costs one or two barriers.
    if DRAW == 2:
        best, largest = tl.split(tl.max(tl.join(score, x), axis=0))
    else:
        best = tl.max(score, axis=0)
    token = tl.min(tl.where(score == best, first + column, 0x7FFFFFFF), axis=0)
    tl.store(out, best)
    tl.store(out + plane, token.to(tl.float32, bitcast=True))
    if DRAW == 2:
        mine = first + column == token
        logit = tl.where(mine, x, float("-inf"))
        second = tl.where(mine, float("-inf"), score)
        logit, second = tl.split(tl.max(tl.join(logit, second), axis=0))
        tl.store(out + 2 * plane, logit)
        tl.store(out + 3 * plane, largest)
        total = 0.0
        if tl.load(floats + table_row * floats_stride + 2) < 1.0:
            total = tl.sum(tl.exp(x - finite(largest)), axis=0)
        tl.store(out + 4 * plane, total)
        tl.store(out + 5 * plane, second)
        k = tl.load(top_k + table_row)
        if (k > 0) & (k <= FEW):
            count: tl.constexpr = CHUNK // GROUP
            at_groups = groups + (i * chunks + chunk) * count + tl.arange(0, count)
            tl.store(at_groups, tl.max(tl.reshape(x, [count, GROUP]), axis=1))


@triton.jit(do_not_specialize=["rows"])
def pick_kernel(
    partials,
    table_rows,
    out_values,
    out_ids,
    rows,
    chunks,
    DRAWN: tl.constexpr,
    PDL: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Select the best score among a row's chunks."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    if DRAWN:  # noqa: SIM102 (a constexpr guards a read)
        if tl.load(table_rows + i) < 0:
            tl.store(out_values + i, float("-inf"))
            tl.store(out_ids + i, -1)
            return
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    at = partials + i * chunks + chunk
    scores = tl.load(at, mask=there, other=float("-inf"))
    tokens = tl.load(at + rows.to(tl.int64) * chunks, mask=there, other=0.0).to(tl.int32, bitcast=True)
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(there & (scores == best), tokens, 0x7FFFFFFF), axis=0)
    tl.store(out_values + i, best)
    tl.store(out_ids + i, tl.where(tl.abs(best) < float("inf"), token, -1).to(tl.int64))


# ── logits processors ────────────────────────────────────────────────────────────────────────────────


@triton.jit
def edit_kernel(
    values,
    stride,
    index,
    columns,
    table_rows,
    floats,
    floats_stride,
    edited_rows,
    counts,
    slots,
    edited,
    INDEXED: tl.constexpr,
    PENALISED: tl.constexpr,
    PDL: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Copy a chunk of a row's logits and apply penalties as `kernels.sampling.penalize_` does."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    e = tl.program_id(1).to(tl.int64)
    i = tl.load(edited_rows + e).to(tl.int64)
    if i < 0:
        return
    column = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = column < columns
    at = i * stride
    if INDEXED:
        at = tl.load(index + i).to(tl.int64) * stride
    x = tl.load(values + at + column, mask=inside, other=0.0).to(tl.float32)
    if PENALISED:
        slot = tl.load(slots + e).to(tl.int64)
        if slot >= 0:
            row_floats = floats + tl.load(table_rows + i).to(tl.int64) * floats_stride
            seen = tl.load(counts + slot * columns + column, mask=inside, other=0)
            factor = tl.where(seen > 0, tl.load(row_floats + 4), 1.0)
            x = tl.where(x > 0, tl.div_rn(x, factor), x * factor)
            output = seen >> 1
            x -= output.to(tl.float32) * tl.load(row_floats + 5)
            x -= tl.where(output > 0, tl.load(row_floats + 6), 0.0)
    tl.store(edited + e * columns + column, x, mask=inside)


@triton.jit(do_not_specialize=["count"])
def scatter_kernel(edited, columns, rows, ids, values, count, BAN: tl.constexpr, PDL: tl.constexpr):
    """Add a bias to the logit of each given (row, token id) pair or, if BAN is true, set the logit to
    -inf."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    entry = tl.program_id(0) * 128 + tl.arange(0, 128)
    there = entry < count
    row = tl.load(rows + entry, mask=there, other=-1).to(tl.int64)
    there = there & (row >= 0)
    at = edited + row * columns + tl.load(ids + entry, mask=there, other=0)
    if BAN:
        tl.store(at, tl.full([128], float("-inf"), tl.float32), mask=there)
    else:
        x = tl.load(at, mask=there, other=0.0)
        tl.store(at, x + tl.load(values + entry, mask=there, other=0.0), mask=there)
