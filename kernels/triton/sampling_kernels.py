# mypy: allow-untyped-defs
"""The kernels of `kernels.triton.sampling`, whose text says how they work together."""

from __future__ import annotations

import triton
import triton.language as tl

# ── noise ────────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _noise_key(base, position):
    """splitmix64(base + position · golden), see `kernels.sampling.noise_keys`."""
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
    """The hardware's logarithm, off by at most 2^-22 (absolute near 1, else relative): 1 instruction, not
    25."""
    if NVIDIA:
        y = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.log2(x)
    return y


@triton.jit
def _gumbel(key, token_hash, NVIDIA: tl.constexpr):
    """`kernels.sampling.gumbel_noise`, within 4e-6."""
    low = key.to(tl.uint32)
    high = (key >> 32).to(tl.uint32) | 1
    bits = _fmix32((token_hash.to(tl.uint32, bitcast=True) ^ low) * high) & 0x7FFFFFFF
    # (bits + ½) / 2^31: the product is exact, so this rounds as the twin does.
    share = bits.to(tl.int32).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10
    share = tl.minimum(share, 1.0 - 5.9604645e-8)
    # -ln(1 - share): where 1 - share would lose digits, a polynomial (Chebyshev fit, 1.7e-7 relative).
    series = 0.14381851255893707 + share * 0.3399522006511688
    series = 0.2578205168247223 + share * series
    series = 0.3328547775745392 + share * series
    series = 0.5000105500221252 + share * series
    series = share * (0.9999999403953552 + share * series)
    wait = tl.where(share < 0.25, series, -0.6931471805599453 * _log2(1.0 - share, NVIDIA))
    return -0.6931471805599453 * _log2(wait, NVIDIA)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────


@triton.jit
def _place(stride, index, edited_index, columns, i, INDEXED: tl.constexpr, EDITED: tl.constexpr):
    """Where sampling row i's logits begin, and where its edited copy does; -1: it has none."""
    at = i * stride
    if INDEXED:
        at = tl.load(index + i).to(tl.int64) * stride
    copy = tl.full((), -1, tl.int64)
    if EDITED:
        copy = tl.load(edited_index + i).to(tl.int64) * columns
    return at, copy


@triton.jit
def _read(values, edited, at, copy, column, columns, EDITED: tl.constexpr):
    """Logits as float32, -inf beyond the last column. NaN becomes infinity: no maximum overlooks it."""
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
def _totals(partials, i, rows, chunks, CHUNKS: tl.constexpr):
    """A row's best score, token and logit; the same of its next best, where that is known (else a score of
    -inf); its largest logit, and its sum of exp(logit - largest)."""
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    at = partials + i * chunks + chunk
    plane = rows.to(tl.int64) * chunks
    scores = tl.load(at, mask=there, other=float("-inf"))
    tokens = tl.load(at + plane, mask=there, other=0.0).to(tl.int32, bitcast=True)
    tokens = tl.where(there, tokens, 0x7FFFFFFF)
    logits = tl.load(at + 2 * plane, mask=there, other=float("-inf"))
    highest = tl.load(at + 3 * plane, mask=there, other=float("-inf"))
    sums = tl.load(at + 4 * plane, mask=there, other=0.0)
    seconds = tl.load(at + 5 * plane, mask=there, other=float("-inf"))
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == best, tokens, 0x7FFFFFFF), axis=0)
    logit = tl.max(tl.where(tokens == token, logits, float("-inf")), axis=0)
    # The best of the other chunks is the next best of all unless the winner's chunk has a better second.
    bound = tl.max(tl.where(tokens == token, seconds, float("-inf")), axis=0)
    scores = tl.where(tokens == token, float("-inf"), scores)
    next_best = tl.max(scores, axis=0)
    next_token = tl.min(tl.where(scores == next_best, tokens, 0x7FFFFFFF), axis=0)
    next_logit = tl.max(tl.where(tokens == next_token, logits, float("-inf")), axis=0)
    next_best = tl.where(next_best > bound, next_best, float("-inf"))
    largest = tl.max(highest, axis=0)
    total = tl.sum(sums * tl.exp(highest - _finite(largest)), axis=0)
    return best, token, logit, next_best, next_token, next_logit, largest, total


@triton.jit
def _finite(x):
    """0 for -inf, so that differences with it are no NaN."""
    return tl.where(x == float("-inf"), 0.0, x)


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
    """One chunk of one row. DRAW: 0 the largest, 1 with noise, 2 and with what narrowing needs."""
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
    at, copy = _place(stride, index, edited_index, columns, i, INDEXED, EDITED)
    x = _read(values, edited, at, copy, column, columns, EDITED)
    score = x
    out = partials + i * chunks + chunk
    plane = rows.to(tl.int64) * chunks
    if DRAW > 0:
        x *= tl.load(floats + table_row * floats_stride)
        noise = tl.load(floats + table_row * floats_stride + 1)
        score = x
        if noise != 0.0:
            key = _noise_key(tl.load(noise_base + table_row), tl.load(positions + i))
            score = x + noise * _gumbel(key, tl.load(hashes + column, mask=column < columns, other=0), NVIDIA)
    # Reductions over a chunk are joined where they can be: each costs a barrier or two.
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
            total = tl.sum(tl.exp(x - _finite(largest)), axis=0)
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
    """The best of a row's chunks."""
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


# ── above and settle ─────────────────────────────────────────────────────────────────────────────────


@triton.jit(do_not_specialize=["rows"])
def above_kernel(
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
    above,
    rows,
    chunks,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    FEW: tl.constexpr,
    INDEXED: tl.constexpr,
    EDITED: tl.constexpr,
    NVIDIA: tl.constexpr,
    PDL: tl.constexpr,
):
    """How many tokens of a chunk are more likely than the row's best, and the sum of their exp; the same
    for its next best."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    table_row = tl.load(table_rows + i).to(tl.int64)
    if table_row < 0:
        return
    row_floats = floats + table_row * floats_stride
    limit = tl.load(top_k + table_row)
    narrowed = (tl.load(row_floats + 2) < 1.0) | ((limit > 0) & (limit < columns))
    narrowed = narrowed & ((limit <= 0) | (limit > FEW))
    if (tl.load(row_floats + 1) == 0.0) | (narrowed == 0):
        return
    _, _, logit, _, _, next_logit, largest, _ = _totals(partials, i, rows, chunks, CHUNKS)
    if logit >= largest:
        return
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    at, copy = _place(stride, index, edited_index, columns, i, INDEXED, EDITED)
    x = _read(values, edited, at, copy, column, columns, EDITED) * tl.load(row_floats)
    out = above + i * chunks + chunk
    plane = rows.to(tl.int64) * chunks
    weight = tl.exp(x - largest)
    masses = tl.join(tl.where(x > logit, weight, 0.0), tl.where(x > next_logit, weight, 0.0))
    mass, next_mass = tl.split(tl.sum(masses, axis=0))
    tl.store(out, mass)
    tl.store(out + plane, next_mass)
    if limit > 0:
        counts = tl.join((x > logit).to(tl.float32), (x > next_logit).to(tl.float32))
        count, next_count = tl.split(tl.sum(counts, axis=0))
        tl.store(out + 2 * plane, count)
        tl.store(out + 3 * plane, next_count)


@triton.jit(do_not_specialize=["rows"])
def settle_kernel(
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
    above,
    groups,
    group_lists,
    out_values,
    out_ids,
    rows,
    chunks,
    row_groups,
    TILE: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    STAGES: tl.constexpr,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    INDEXED: tl.constexpr,
    EDITED: tl.constexpr,
    NVIDIA: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: its winner, if that is kept; else the border of what is kept, and another draw.

    A token is kept where fewer than `limit` tokens are more likely than it, with less than `target` of mass.
    Known all the time: tokens up to `low` are out, tokens from `high` are kept.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    table_row = tl.load(table_rows + i).to(tl.int64)
    if table_row < 0:
        tl.store(out_values + i, float("-inf"))
        tl.store(out_ids + i, -1)
        return
    best, token, logit, next_best, next_token, next_logit, largest, total = _totals(
        partials, i, rows, chunks, CHUNKS
    )
    row_floats = floats + table_row * floats_stride
    rate = tl.load(row_floats)
    noise = tl.load(row_floats + 1)
    top_p = tl.load(row_floats + 2)
    min_p = tl.load(row_floats + 3)
    lowest = tl.where(min_p > 0.0, largest + tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
    k = tl.load(top_k + table_row)
    by_count = (k > 0) & (k < columns)
    by_mass = top_p < 1.0
    limit = tl.where(by_count, k.to(tl.float32), 1e9)
    total = tl.where(by_mass, total, 0.0)
    target = tl.where(by_mass, top_p * total, float("inf"))

    done = (noise == 0.0) | (logit >= largest) | ((tl.abs(best) < float("inf")) == 0)
    at, copy = _place(stride, index, edited_index, columns, i, INDEXED, EDITED)
    key = _noise_key(tl.load(noise_base + table_row), tl.load(positions + i))
    few = by_count & (k <= FEW)
    lost_count = (done == 0) & few
    if lost_count:
        found, few_best, few_token = _settle_few(
            values, edited, at, copy, columns, first, hashes, rate, noise, key, largest, lowest, k, top_p,
            by_mass, groups + i * row_groups, group_lists + i * 2 * FEW, row_groups, GROUPS, GROUP, FEW,
            EDITED, NVIDIA
        )  # fmt: skip
        if found:
            best = few_best
            token = few_token
            done = found
            lost_count = done == 0

    chunk = tl.arange(0, CHUNKS)
    counted = (chunk < chunks) & ((few == 0) & (by_count | by_mass) & (done == 0))
    at_above = above + i * chunks + chunk
    plane = rows.to(tl.int64) * chunks
    mass = tl.sum(tl.load(at_above, mask=counted, other=0.0), axis=0)
    next_mass = tl.sum(tl.load(at_above + plane, mask=counted, other=0.0), axis=0)
    counted = counted & by_count
    count = tl.sum(tl.load(at_above + 2 * plane, mask=counted, other=0.0), axis=0)
    next_count = tl.sum(tl.load(at_above + 3 * plane, mask=counted, other=0.0), axis=0)
    # What is above the winner was not counted where few tokens were to be kept: begin with no winner at all.
    logit = tl.where(lost_count, float("-inf"), logit)
    count = tl.where(lost_count, 1e9, count)
    mass = tl.where(lost_count, total, mass)
    kept = (count < limit) & (mass < target)
    # With both, top-p is of the mass that top-k leaves, which is not known yet.
    both = by_count & by_mass & (done == 0)
    done = done | (kept & (logit >= lowest) & (both == 0))
    known = (next_best > float("-inf")) & (done == 0) & (both == 0) & (lost_count == 0)
    if known:
        next_kept = (next_count < limit) & (next_mass < target)
        done = next_kept & (next_logit >= lowest)
        if done:
            best = next_best
            token = next_token
        elif (next_kept == 0) & (kept == 0) & (next_logit > logit):
            logit = next_logit
            count = next_count
            mass = next_mass

    # Top-k's border, where top-p needs the mass above it.
    outside = count >= limit
    low = tl.where(outside, logit, float("-inf"))
    high = tl.where(outside, largest, logit)
    mass_over = tl.where(outside, mass, total)
    over = 1e30
    step = 0
    searching = both
    while searching:
        low, high, over, mass_over = _narrow(
            values, edited, at, copy, columns, rate, largest, low, high, high, limit, float("inf"),
            over, mass_over, step, TILE, THRESHOLDS, STAGES, EDITED
        )  # fmt: skip
        searching = over > 0.0
        step += 1
    target = tl.where(both, top_p * mass_over, target)
    limit = tl.where(both, 1e9, limit)

    # What the winner's fate says about the border of all.
    low = tl.where(both, low, float("-inf"))
    survived = logit > low
    kept = survived & (count < limit) & (mass < target)
    done = done | (kept & (logit >= lowest))
    high = tl.where(kept, logit, largest)
    lost = survived & (kept == 0)
    low = tl.where(lost, logit, low)
    mass_over = tl.where(lost, mass, mass_over)
    over = tl.where(both, mass_over / target, 0.0)
    over = tl.where(lost, tl.maximum(count / limit, mass / target), over)
    over = tl.where(lost_count & (both == 0), 1e30, over)
    step = 0
    while done == 0:
        # A draw pays when not much more is left than what will be kept: it is likely to be the last.
        draw = over < 1.5
        if draw:
            best, token, logit = _draw_over(
                values, edited, at, copy, columns, first, hashes, rate, noise, key, low, lowest,
                TILE, STAGES, EDITED, NVIDIA
            )  # fmt: skip
            done = logit >= high
        if done == 0:
            low, high, over, mass_over = _narrow(
                values, edited, at, copy, columns, rate, largest, low, high, tl.where(draw, logit, high),
                limit, target, over, mass_over, step, TILE, THRESHOLDS, STAGES, EDITED
            )  # fmt: skip
            done = draw & (logit >= high)
            step += 1
    tl.store(out_values + i, best)
    tl.store(out_ids + i, tl.where(tl.abs(best) < float("inf"), token, -1).to(tl.int64))


@triton.jit
def _settle_few(
    values,
    edited,
    at,
    copy,
    columns,
    first,
    hashes,
    rate,
    noise,
    key,
    largest,
    lowest,
    k,
    top_p,
    by_mass,
    groups,
    group_list,
    row_groups,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    EDITED: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    """A small top-k: whether it was done, the best score and its token.

    The k-th largest of the groups' largest logits is reached by k tokens or more, so what top-k keeps is
    among the tokens that reach it. They are collected, and each is compared with every other: how many are
    more likely than it, and with how much mass. Not done where ties make them too many (groups above FEW,
    tokens above 2 × FEW).
    """
    group = tl.arange(0, GROUPS)
    highest = tl.load(groups + group, mask=group < row_groups, other=float("-inf"))
    ranks = _rank(highest)
    top = _rank(largest).to(tl.int64)
    bottom = tl.min(tl.where(group < row_groups, ranks, 0x7FFFFFFF), axis=0).to(tl.int64)
    bottom = tl.where(row_groups < k, -2139095041, bottom)  # the rank of -inf: fewer groups than that
    j = tl.arange(0, 4)
    while bottom < top:
        tries = bottom + tl.maximum((top - bottom) * (j + 1) // 5, 1)
        enough = tl.sum((ranks[None, :] >= tries[:, None]).to(tl.int32), axis=1) >= k
        bottom = tl.maximum(bottom, tl.max(tl.where(enough, tries, -0x80000000), axis=0))
        top = tl.minimum(top, tl.min(tl.where(enough, 0x7FFFFFFF, tries - 1), axis=0))
    chosen = (group < row_groups) & (ranks >= bottom)
    count = tl.sum(chosen.to(tl.int32), axis=0)
    found = count <= FEW
    best = largest
    token = tl.full((), 0, tl.int32)
    if found:
        tl.store(group_list + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, group, mask=chosen)
        tl.debug_barrier()
        slot = tl.arange(0, FEW)
        mine = tl.load(group_list + slot, mask=slot < count, other=0)
        column = mine[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        column = tl.reshape(tl.where(slot[:, None] < count, column, columns), [FEW * GROUP])
        x = _read(values, edited, at, copy, column, columns, EDITED) * rate
        chosen = (column < columns) & (_rank(x) >= bottom)
        count = tl.sum(chosen.to(tl.int32), axis=0)
        found = count <= 2 * FEW
        if found:
            tl.debug_barrier()
            tl.store(group_list + tl.cumsum(chosen.to(tl.int32), axis=0) - 1, column, mask=chosen)
            tl.debug_barrier()
            slot = tl.arange(0, 2 * FEW)
            column = tl.load(group_list + slot, mask=slot < count, other=columns)
            x = _read(values, edited, at, copy, column, columns, EDITED) * rate
            higher = x[None, :] > x[:, None]
            kept = (slot < count) & (tl.sum(higher.to(tl.int32), axis=1) < k)
            if by_mass:
                weight = tl.where(kept, tl.exp(x - largest), 0.0)
                mass = tl.sum(tl.where(higher, weight[None, :], 0.0), axis=1)
                # The largest is kept whatever top_p is.
                kept = kept & ((mass < top_p * tl.sum(weight, axis=0)) | (x >= largest))
            kept = kept & (x >= lowest)
            token_hash = tl.load(hashes + column, mask=column < columns, other=0)
            score = tl.where(kept, x + noise * _gumbel(key, token_hash, NVIDIA), float("-inf"))
            best = tl.max(score, axis=0)
            token = tl.min(tl.where(kept & (score == best), first + column, 0x7FFFFFFF), axis=0)
    return found, best, token


@triton.jit
def _draw_over(
    values,
    edited,
    at,
    copy,
    columns,
    first,
    hashes,
    rate,
    noise,
    key,
    low,
    lowest,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    EDITED: tl.constexpr,
    NVIDIA: tl.constexpr,
):
    """The best score, its token and logit, among the tokens above `low` and from `lowest`."""
    scores = tl.full([TILE], float("-inf"), tl.float32)
    tokens = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    logits = tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, columns, TILE, num_stages=STAGES):
        column = start + tl.arange(0, TILE)
        x = _read(values, edited, at, copy, column, columns, EDITED) * rate
        score = x + noise * _gumbel(key, tl.load(hashes + column, mask=column < columns, other=0), NVIDIA)
        better = (x > low) & (x >= lowest) & (score > scores)
        scores = tl.where(better, score, scores)
        tokens = tl.where(better, first + column, tokens)
        logits = tl.where(better, x, logits)
    best = tl.max(scores, axis=0)
    token = tl.min(tl.where(scores == best, tokens, 0x7FFFFFFF), axis=0)
    return best, token, tl.max(tl.where(tokens == token, logits, float("-inf")), axis=0)


@triton.jit
def _narrow(
    values,
    edited,
    at,
    copy,
    columns,
    rate,
    largest,
    low,
    high,
    extra,
    limit,
    target,
    over,
    mass_over,
    step,
    TILE: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    STAGES: tl.constexpr,
    EDITED: tl.constexpr,
):
    """One read: `low` and `high` closer together.

    Also returns how many times too many tokens (by count or mass, the larger) are above the new `low`, 0
    where no token is left between the two; and the mass above `low` (`mass_over`: of the old one). extra: a
    value to try as well, or `high`.
    """
    j = tl.arange(0, THRESHOLDS)
    # By value at first: fast for logits as models make them. By the order of float32 numbers in the end:
    # 5 times fewer at each read, whatever the logits are.
    bottom = tl.maximum(low, high - 32.0)
    threshold = bottom + (high - bottom) * ((j + 1).to(tl.float32) / (THRESHOLDS + 1))
    if step >= 8:
        low_rank = _rank(low).to(tl.int64)
        high_rank = _rank(high).to(tl.int64)
        rank = low_rank + (high_rank - low_rank) * (j + 1) // (THRESHOLDS + 1)
        threshold = _flip(rank.to(tl.int32)).to(tl.float32, bitcast=True)
    threshold = tl.where(j == 0, tl.where(extra < high, extra, threshold), threshold)

    counts = tl.zeros([THRESHOLDS, TILE], tl.float32)
    masses = tl.zeros([THRESHOLDS, TILE], tl.float32)
    top_counts = tl.zeros([TILE], tl.float32)
    top_masses = tl.zeros([TILE], tl.float32)
    between_min = tl.full([TILE], float("inf"), tl.float32)
    between_max = tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, columns, TILE, num_stages=STAGES):
        column = start + tl.arange(0, TILE)
        x = _read(values, edited, at, copy, column, columns, EDITED) * rate
        weight = tl.exp(x - largest)
        higher = x[None, :] > threshold[:, None]
        counts += higher.to(tl.float32)
        masses += tl.where(higher, weight[None, :], 0.0)
        top = x >= high
        top_counts += top.to(tl.float32)
        top_masses += tl.where(top, weight, 0.0)
        between = (x > low) & (x < high)
        between_min = tl.minimum(between_min, tl.where(between, x, float("inf")))
        between_max = tl.maximum(between_max, tl.where(between, x, float("-inf")))
    count = tl.sum(counts, axis=1)
    mass = tl.sum(masses, axis=1)
    kept = (count < limit) & (mass < target)
    new_high = tl.minimum(high, tl.min(tl.where(kept, threshold, float("inf")), axis=0))
    new_low = tl.maximum(low, tl.max(tl.where(kept, float("-inf"), threshold), axis=0))
    at_low = (kept == 0) & (threshold == new_low)
    mass_over = tl.where(new_low > low, tl.max(tl.where(at_low, mass, 0.0), axis=0), mass_over)
    count_over = tl.max(tl.where(at_low, count, 0.0), axis=0)

    # One value left between the two: what lies above it is what lies from `high`.
    value = tl.max(between_max, axis=0)
    single = tl.min(between_min, axis=0) == value
    top_count = tl.sum(top_counts, axis=0)
    top_mass = tl.sum(top_masses, axis=0)
    value_kept = (top_count < limit) & (top_mass < target)
    new_high = tl.where(single & value_kept, value, new_high)
    value_out = single & (value_kept == 0)
    new_low = tl.where(value_out, value, new_low)
    mass_over = tl.where(value_out, top_mass, mass_over)
    new_over = tl.maximum(count_over / limit, mass_over / target)
    over = tl.where(new_low > low, new_over, over)
    exact = tl.min(between_min, axis=0) >= value
    return new_low, new_high, tl.where(exact, 0.0, over), mass_over


@triton.jit
def _flip(bits):
    """The bits of a float32 as an integer that orders like the number; its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _rank(x):
    """An integer that orders like x; equal for both zeros."""
    return tl.where(x == 0.0, 0, _flip(x.to(tl.int32, bitcast=True)))


# ── edits ────────────────────────────────────────────────────────────────────────────────────────────


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
    """A chunk of a row's copy, with penalties: `kernels.sampling.penalize_`."""
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
    """Adds values at (row, id) pairs, or bans them."""
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
