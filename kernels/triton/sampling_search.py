# mypy: allow-untyped-defs
"""Contains the sampling kernel *settle*, which searches for the boundary between kept and excluded tokens in
the "full" rows that the other kernels have not finished. `kernels.triton.sampling` explains the algorithm."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling_full import limits_of, put
from kernels.triton.sampling_kernels import flip, gumbel, noise_key, place_of, rank_of, read


@triton.jit
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
    summaries,
    states,
    out_values,
    out_ids,
    TILE: tl.constexpr,
    THRESHOLDS: tl.constexpr,
    STAGES: tl.constexpr,
    INDEXED: tl.constexpr,
    EDITED: tl.constexpr,
    NVIDIA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Find the boundary between the kept and the excluded tokens of an unfinished row and draw again.

    Invariant: tokens with a logit up to `low` are excluded, and tokens with a logit of at least `high` are
    kept.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    if tl.load(states + i) == 0:
        return
    table_row = tl.load(table_rows + i).to(tl.int64)
    row_floats = floats + table_row * floats_stride
    summary = summaries + i * 8
    logit = tl.load(summary + 2)
    count = tl.load(summary + 3)
    mass = tl.load(summary + 4)
    largest = tl.load(summary + 6)
    total = tl.load(summary + 7)
    rate = tl.load(row_floats)
    noise = tl.load(row_floats + 1)
    top_p = tl.load(row_floats + 2)
    k = tl.load(top_k + table_row)
    limit, target, lowest, by_count, by_mass = limits_of(row_floats, k, columns, largest, total)
    both = by_count & by_mass
    at, copy = place_of(stride, index, edited_index, columns, i, INDEXED, EDITED)
    key = noise_key(tl.load(noise_base + table_row), tl.load(positions + i))

    # If both top-k and top-p apply, first find the boundary of top-k, because top-p refers to the mass above
    # that boundary.
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

    # Derive the initial bounds from the candidate's logit and from the count and mass of the tokens that are
    # more likely.
    low = tl.where(both, low, float("-inf"))
    survived = logit > low
    kept = survived & (count < limit) & (mass < target)
    high = tl.where(kept, logit, largest)
    dropped = survived & (kept == 0)
    low = tl.where(dropped, logit, low)
    mass_over = tl.where(dropped, mass, mass_over)
    over = tl.where(both, mass_over / target, 0.0)
    over = tl.where(dropped, tl.maximum(count / limit, mass / target), over)
    over = tl.where((both == 0) & (logit == float("-inf")), 1e30, over)
    best = largest
    token = tl.full((), 0, tl.int32)
    # If both top-k and top-p apply, whether the candidate is kept can only be decided now that the top-k
    # cutoff is known.
    done = (both & kept) & ((logit >= lowest) & (logit > float("-inf")))
    if done:
        best = tl.load(summary)
        token = tl.load(summary + 1).to(tl.int32, bitcast=True)
    step = 0
    while done == 0:
        # Draw as soon as the count and mass of the tokens above `low` exceed their limits by at most a factor
        # of 1.5, because the draw will then probably be accepted.
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
    put(out_values, out_ids, i, best, token)


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
    """Find the token with the best score among those with a logit above `low` and at least `lowest`. Return
    its score, its id and its logit."""
    scores = tl.full([TILE], float("-inf"), tl.float32)
    tokens = tl.full([TILE], 0x7FFFFFFF, tl.int32)
    logits = tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, columns, TILE, num_stages=STAGES):
        column = start + tl.arange(0, TILE)
        x = read(values, edited, at, copy, column, columns, EDITED) * rate
        score = x + noise * gumbel(key, tl.load(hashes + column, mask=column < columns, other=0), NVIDIA)
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
    """Narrow the range between `low` and `high` by reading the row once. mass_over: the mass above the
    current `low`; the mass above the new one is returned. extra: an additional threshold to test, or `high`
    for none. Also return `over`: how many times the limits (by count or by mass, whichever is larger) the
    tokens above the new `low` are, or 0 if no token is left between `low` and `high`."""
    j = tl.arange(0, THRESHOLDS)
    # In the first steps, thresholds are equally spaced between the bounds, which converges quickly for
    # typical logits. In later steps, they are equally spaced in the ordering of float32 values (by rank, not
    # by value), which converges for all logits.
    bottom = tl.maximum(low, high - 32.0)
    threshold = bottom + (high - bottom) * ((j + 1).to(tl.float32) / (THRESHOLDS + 1))
    if step >= 8:
        low_rank = rank_of(low).to(tl.int64)
        high_rank = rank_of(high).to(tl.int64)
        rank = low_rank + (high_rank - low_rank) * (j + 1) // (THRESHOLDS + 1)
        threshold = flip(rank.to(tl.int32)).to(tl.float32, bitcast=True)
    threshold = tl.where(j == 0, tl.where(extra < high, extra, threshold), threshold)

    counts = tl.zeros([THRESHOLDS, TILE], tl.float32)
    masses = tl.zeros([THRESHOLDS, TILE], tl.float32)
    top_counts = tl.zeros([TILE], tl.float32)
    top_masses = tl.zeros([TILE], tl.float32)
    between_min = tl.full([TILE], float("inf"), tl.float32)
    between_max = tl.full([TILE], float("-inf"), tl.float32)
    for start in tl.range(0, columns, TILE, num_stages=STAGES):
        column = start + tl.arange(0, TILE)
        x = read(values, edited, at, copy, column, columns, EDITED) * rate
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

    # If only one distinct value is left between `low` and `high`, the tokens above it are exactly those at or
    # above `high`.
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
