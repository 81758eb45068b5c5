# mypy: allow-untyped-defs
"""Contains the sampling kernels that finish most "full" rows: they determine the tokens kept by top-k, top-p
and min-p, and the best score among them. `kernels.triton.sampling` explains the algorithm."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.sampling_kernels import finite, gumbel, noise_key, place_of, rank_of, read

# ── combine, above, decide ──────────────────────────────────────────────────────────────────────────


@triton.jit
def limits_of(row_floats, k, columns, largest, total):
    """Return the values that determine which tokens of a row are kept: (`limit`, `target`, `lowest`, whether
    top-k applies, whether top-p applies). A token is kept if its logit is at least `lowest`, fewer than
    `limit` tokens are more likely, and the total mass of those tokens is below `target`."""
    top_p = tl.load(row_floats + 2)
    min_p = tl.load(row_floats + 3)
    by_count = (k > 0) & (k < columns)
    by_mass = top_p < 1.0
    limit = tl.where(by_count, k.to(tl.float32), 1e9)
    target = tl.where(by_mass, top_p * total, float("inf"))
    lowest = tl.where(min_p > 0.0, largest + tl.log(tl.maximum(min_p, 1e-38)), float("-inf"))
    return limit, target, lowest, by_count, by_mass


@triton.jit
def put(out_values, out_ids, i, best, token):
    tl.store(out_values + i, best)
    tl.store(out_ids + i, tl.where(tl.abs(best) < float("inf"), token, -1).to(tl.int64))


@triton.jit(do_not_specialize=["rows"])
def combine_kernel(
    columns,
    table_rows,
    floats,
    floats_stride,
    top_k,
    partials,
    summaries,
    states,
    out_values,
    out_ids,
    rows,
    chunks,
    FEW: tl.constexpr,
    PDL: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """Combine the chunks of a row into its summary and finish the row if the summary is sufficient.

    The summary contains the best and the second best score, each with its token and logit, the largest logit,
    and the sum of exp(logit - largest). The second best score is -inf if it is unknown. The row's state is
    set to 0 (finished), 1 (*above* must count tokens) or 2 (small top-k).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    table_row = tl.load(table_rows + i).to(tl.int64)
    if table_row < 0:
        tl.store(states + i, 0)
        tl.store(out_values + i, float("-inf"))
        tl.store(out_ids + i, -1)
        return
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
    # The row's second best score is the higher of two values: the best score in the other chunks, and the
    # second best score in the chunk that contains the best one.
    bound = tl.max(tl.where(tokens == token, seconds, float("-inf")), axis=0)
    scores = tl.where(tokens == token, float("-inf"), scores)
    next_best = tl.max(scores, axis=0)
    next_token = tl.min(tl.where(scores == next_best, tokens, 0x7FFFFFFF), axis=0)
    next_logit = tl.max(tl.where(tokens == next_token, logits, float("-inf")), axis=0)
    largest = tl.max(highest, axis=0)
    summary = summaries + i * 8
    tl.store(summary, best)
    tl.store(summary + 1, token.to(tl.float32, bitcast=True))
    tl.store(summary + 2, logit)
    tl.store(summary + 3, tl.where(next_best > bound, next_best, float("-inf")))
    tl.store(summary + 4, next_token.to(tl.float32, bitcast=True))
    tl.store(summary + 5, next_logit)
    tl.store(summary + 6, largest)
    total = tl.sum(sums * tl.exp(highest - finite(largest)), axis=0)
    tl.store(summary + 7, total)
    row_floats = floats + table_row * floats_stride
    k = tl.load(top_k + table_row)
    _, _, lowest, by_count, by_mass = limits_of(row_floats, k, columns, largest, total)
    settled = (tl.load(row_floats + 1) == 0.0) | (logit >= largest) | ((tl.abs(best) < float("inf")) == 0)
    settled = settled | ((by_count == 0) & ((by_mass == 0) & (logit >= lowest)))
    tl.store(states + i, tl.where(settled, 0, tl.where(by_count & (k <= FEW), 2, 1)))
    put(out_values, out_ids, i, best, token)


@triton.jit(do_not_specialize=["rows"])
def above_kernel(
    values,
    stride,
    index,
    edited,
    edited_index,
    columns,
    table_rows,
    floats,
    floats_stride,
    top_k,
    summaries,
    states,
    above,
    rows,
    chunks,
    CHUNK: tl.constexpr,
    INDEXED: tl.constexpr,
    EDITED: tl.constexpr,
    PDL: tl.constexpr,
):
    """For each of the row's two candidates, sum exp(logit - largest) over the chunk's tokens that are more
    likely than the candidate. If the row has a top-k, also count them."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chunk = tl.program_id(0)
    i = tl.program_id(1).to(tl.int64)
    if tl.load(states + i) != 1:
        return
    table_row = tl.load(table_rows + i).to(tl.int64)
    logit = tl.load(summaries + i * 8 + 2)
    next_logit = tl.load(summaries + i * 8 + 5)
    largest = tl.load(summaries + i * 8 + 6)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    at, copy = place_of(stride, index, edited_index, columns, i, INDEXED, EDITED)
    rate = tl.load(floats + table_row * floats_stride)
    x = read(values, edited, at, copy, column, columns, EDITED) * rate
    out = above + i * chunks + chunk
    plane = rows.to(tl.int64) * chunks
    weight = tl.exp(x - largest)
    masses = tl.join(tl.where(x > logit, weight, 0.0), tl.where(x > next_logit, weight, 0.0))
    mass, next_mass = tl.split(tl.sum(masses, axis=0))
    tl.store(out, mass)
    tl.store(out + plane, next_mass)
    if tl.load(top_k + table_row) > 0:
        counts = tl.join((x > logit).to(tl.float32), (x > next_logit).to(tl.float32))
        count, next_count = tl.split(tl.sum(counts, axis=0))
        tl.store(out + 2 * plane, count)
        tl.store(out + 3 * plane, next_count)


@triton.jit(do_not_specialize=["rows"])
def decide_kernel(
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
    above,
    groups,
    group_lists,
    out_values,
    out_ids,
    rows,
    chunks,
    row_groups,
    CHUNKS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    FEW: tl.constexpr,
    INDEXED: tl.constexpr,
    EDITED: tl.constexpr,
    NVIDIA: tl.constexpr,
    PDL: tl.constexpr,
):
    """Select the row's best or second best candidate if it is kept, and finish rows with a small top-k.

    In an unfinished row, columns 2, 3 and 4 of the summary are overwritten with the starting point of
    *settle*: a candidate's logit, and the count and mass of the tokens that are more likely than the
    candidate. The logit is -inf if there is no candidate.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    i = tl.program_id(0).to(tl.int64)
    state = tl.load(states + i)
    if state == 0:
        return
    table_row = tl.load(table_rows + i).to(tl.int64)
    summary = summaries + i * 8
    largest = tl.load(summary + 6)
    total = tl.load(summary + 7)
    row_floats = floats + table_row * floats_stride
    k = tl.load(top_k + table_row)
    limit, target, lowest, by_count, by_mass = limits_of(row_floats, k, columns, largest, total)
    if state == 2:
        at, copy = place_of(stride, index, edited_index, columns, i, INDEXED, EDITED)
        key = noise_key(tl.load(noise_base + table_row), tl.load(positions + i))
        found, best, token = _settle_few(
            values, edited, at, copy, columns, first, hashes, tl.load(row_floats), tl.load(row_floats + 1),
            key, largest, lowest, k, tl.load(row_floats + 2), by_mass, groups + i * row_groups, group_lists
            + i * 3 * FEW, row_groups, GROUPS, GROUP, FEW, EDITED, NVIDIA
        )  # fmt: skip
        if found:
            tl.store(states + i, 0)
            put(out_values, out_ids, i, best, token)
        else:
            tl.store(summary + 2, float("-inf"))
            tl.store(summary + 3, 1e9)
            tl.store(summary + 4, total)
    else:
        best = tl.load(summary)
        token = tl.load(summary + 1).to(tl.int32, bitcast=True)
        logit = tl.load(summary + 2)
        next_best = tl.load(summary + 3)
        next_token = tl.load(summary + 4).to(tl.int32, bitcast=True)
        next_logit = tl.load(summary + 5)
        chunk = tl.arange(0, CHUNKS)
        at_above = above + i * chunks + chunk
        plane = rows.to(tl.int64) * chunks
        mass = tl.sum(tl.load(at_above, mask=chunk < chunks, other=0.0), axis=0)
        next_mass = tl.sum(tl.load(at_above + plane, mask=chunk < chunks, other=0.0), axis=0)
        counted = (chunk < chunks) & by_count
        count = tl.sum(tl.load(at_above + 2 * plane, mask=counted, other=0.0), axis=0)
        next_count = tl.sum(tl.load(at_above + 3 * plane, mask=counted, other=0.0), axis=0)
        kept = (count < limit) & (mass < target)
        next_kept = (next_count < limit) & (next_mass < target)
        # If both top-k and top-p are set, top-p refers to the probability mass that top-k keeps, which is not
        # known yet.
        single = (by_count & by_mass) == 0
        known = single & (next_best > float("-inf"))
        take = single & (kept & (logit >= lowest))
        take_next = (take == 0) & (known & (next_kept & (next_logit >= lowest)))
        # Every warp must have read the summary before it is overwritten below.
        tl.debug_barrier()
        if take | take_next:
            tl.store(states + i, 0)
            put(out_values, out_ids, i, tl.where(take, best, next_best), tl.where(take, token, next_token))
        else:
            swap = known & ((kept == 0) & ((next_kept == 0) & (next_logit > logit)))
            tl.store(summary + 2, tl.where(swap, next_logit, logit))
            tl.store(summary + 3, tl.where(swap, next_count, count))
            tl.store(summary + 4, tl.where(swap, next_mass, mass))


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
    """Sample a row with a small top-k. Return whether the row is finished, the best score and its token.

    At least k tokens reach the k-th largest of the groups' maximum logits, so top-k keeps only tokens that
    reach this value. All such tokens are collected and compared with each other. For each of them, this gives
    the count and mass of the tokens that are more likely. The row stays unfinished if ties make the lists too
    long (more than FEW groups or 2 × FEW tokens).
    """
    group = tl.arange(0, GROUPS)
    highest = tl.load(groups + group, mask=group < row_groups, other=float("-inf"))
    ranks = rank_of(highest)
    top = rank_of(largest).to(tl.int64)
    bottom = tl.min(tl.where(group < row_groups, ranks, 0x7FFFFFFF), axis=0).to(tl.int64)
    # If there are fewer than k groups, the k-th largest value is -inf.
    bottom = tl.where(row_groups < k, -2139095041, bottom)
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
        tokens = group_list + FEW
        chosen_groups = count
        count = 0
        for start in tl.range(0, chosen_groups, 16):
            slot = start + tl.arange(0, 16)
            mine = tl.load(group_list + slot, mask=slot < chosen_groups, other=0)
            column = mine[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            column = tl.reshape(tl.where(slot[:, None] < chosen_groups, column, columns), [16 * GROUP])
            x = read(values, edited, at, copy, column, columns, EDITED) * rate
            candidate = (column < columns) & (rank_of(x) >= bottom)
            place = count + tl.cumsum(candidate.to(tl.int32), axis=0) - 1
            tl.store(tokens + place, column, mask=candidate & (place < 2 * FEW))
            count += tl.sum(candidate.to(tl.int32), axis=0)
        found = count <= 2 * FEW
        if found:
            tl.debug_barrier()
            entry = tl.arange(0, 2 * FEW)
            of_entry = tl.load(tokens + entry, mask=entry < count, other=columns)
            logit = read(values, edited, at, copy, of_entry, columns, EDITED) * rate
            higher = tl.zeros([2 * FEW], tl.int32)
            for start in tl.range(0, count, 16):
                other = _entries(values, edited, at, copy, columns, tokens, start, count, EDITED) * rate
                higher += tl.sum((other[None, :] > logit[:, None]).to(tl.int32), axis=1)
            kept = (entry < count) & (higher < k)
            if by_mass:
                border = tl.min(tl.where(kept, logit, float("inf")), axis=0)
                mass = tl.zeros([2 * FEW], tl.float32)
                for start in tl.range(0, count, 16):
                    other = _entries(values, edited, at, copy, columns, tokens, start, count, EDITED) * rate
                    weight = tl.where(other >= border, tl.exp(other - largest), 0.0)
                    mass += tl.sum(tl.where(other[None, :] > logit[:, None], weight[None, :], 0.0), axis=1)
                total = tl.sum(tl.where(kept, tl.exp(logit - largest), 0.0), axis=0)
                # The most likely token is always kept, even if top_p is very small.
                kept = kept & ((mass < top_p * total) | (logit >= largest))
            kept = kept & (logit >= lowest)
            token_hash = tl.load(hashes + of_entry, mask=of_entry < columns, other=0)
            score = tl.where(kept, logit + noise * gumbel(key, token_hash, NVIDIA), float("-inf"))
            best = tl.max(score, axis=0)
            token = tl.min(tl.where(kept & (score == best), first + of_entry, 0x7FFFFFFF), axis=0)
    return found, best, token


@triton.jit
def _entries(values, edited, at, copy, columns, tokens, start, count, EDITED: tl.constexpr):
    """Return the logits of 16 columns from the list `tokens`, beginning with entry `start`."""
    entry = start + tl.arange(0, 16)
    column = tl.load(tokens + entry, mask=entry < count, other=columns)
    return read(values, edited, at, copy, column, columns, EDITED)
