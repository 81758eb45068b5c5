# mypy: allow-untyped-defs
"""Contains the kernels that compute the experts for a few tokens. `kernels.triton.experts_few` explains and
launches them."""

from __future__ import annotations

import triton
import triton.language as tl

from kernels.triton.block_scales import add_scaled, load_scales, scale_offsets
from kernels.triton.fused import fp8_scale, scales_stride
from kernels.triton.linear_rows import gated, weight_rows, widen


@triton.jit
def _load_weights(at, inside, MASKED: tl.constexpr):
    """Load a tile of weights. If MASKED is set, elements for which `inside` is false are zero."""
    if MASKED:
        return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return tl.load(at, eviction_policy="evict_first")


@triton.jit
def _takers(
    chosen,
    slot,
    tokens,
    first_expert,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BY_PAIR: tl.constexpr,
    EXPERTS: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Return a program's expert and whether the program has work. For each of ROWS tokens, also return
    whether the token has chosen the expert, and the index of this choice among all choices.

    With BY_PAIR, `slot` is the index of a choice. If several tokens have chosen the same expert, only the
    programs for the first of these choices have work. Without BY_PAIR, `slot` is the index of an expert. With
    PARTIAL, this rank has only EXPERTS experts, numbered from `first_expert`, and the programs for other
    experts have no work.
    """
    token = tl.arange(0, ROWS)
    turn = tl.arange(0, TOP_K_BLOCK)
    pair = token[:, None] * TOP_K + turn[None, :]
    there = (token < tokens)[:, None] & (turn < TOP_K)[None, :]
    ids = tl.load(chosen + pair, mask=there, other=-1, cache_modifier=".cg")
    if PARTIAL:
        ids -= first_expert
    expert = slot
    if BY_PAIR:
        expert = tl.load(chosen + slot, cache_modifier=".cg")
        if PARTIAL:
            expert -= first_expert
    same = ids == expert
    if BY_PAIR:
        first = tl.min(tl.min(tl.where(same, pair, ROWS * TOP_K), axis=1), axis=0)
        live = first == slot
        if PARTIAL:
            live = live & (expert >= 0) & (expert < EXPERTS)
    else:
        live = tl.max(tl.max(same.to(tl.int32), axis=1), axis=0) > 0
    takes = tl.max(same.to(tl.int32), axis=1) > 0
    return expert.to(tl.int64), live, takes, tl.sum(tl.where(same, pair, 0), axis=1)


@triton.jit
def _multiply(
    weights,
    xs,
    takes,
    of_rows,
    of_tokens,
    stride,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_K: tl.constexpr,
):
    """Return the products of weight rows and tokens, summed over all of K: `[BLOCK_N, ROWS]`. of_rows,
    of_tokens, stride: see `load_scales`."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    if GROUP_K:
        row_scale, token_scale = load_scales(of_rows, of_tokens, stride, 0, K, GROUP_K, takes)
    for at in tl.range(0, K, BLOCK_K):
        if K % BLOCK_K:
            inside = (at + k < K)[None, :]
            w = _load_weights(weights + at, inside, True)
            part = tl.load(xs + at, mask=takes[:, None] & inside, other=0.0)
        else:
            w = _load_weights(weights + at, None, False)
            part = tl.load(xs + at, mask=takes[:, None], other=0.0)
        if GROUP_K:
            scales = load_scales(of_rows, of_tokens, stride, at + BLOCK_K, K, GROUP_K, takes)
            acc = add_scaled(acc, w, part, row_scale, token_scale)
            row_scale, token_scale = scales
        else:
            acc = tl.dot(w, tl.trans(part), acc, input_precision="ieee")
    return acc


@triton.jit(do_not_specialize=["tokens", "first_expert"])
def _up_gemv(
    x,
    x_scale,
    chosen,
    weight,
    weight_scale,
    out,
    first_expert,
    tokens,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    VECTOR: tl.constexpr,
    EXPERTS: tl.constexpr,
    PARTIAL: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_N weight rows of one chosen expert by the token that chose it. With SCALED, x is
    quantised."""
    tiles: tl.constexpr = (2 * COLUMNS + BLOCK_N - 1) // BLOCK_N
    ragged: tl.constexpr = K % BLOCK_K != 0
    pair = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    weight_row = weight_rows(tile, COLUMNS, BLOCK_N, True)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        # Let the next kernel start only after this wait: the next kernel reads the chosen experts before it
        # waits for this kernel, so they must already be written.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(chosen + pair).to(tl.int64)
    live = True
    if PARTIAL:
        expert -= first_expert
        live = (expert >= 0) & (expert < EXPERTS)
    if live:
        token = pair // TOP_K
        weights = weight + expert * (2 * COLUMNS * K) + weight_row[:, None] * K + k[None, :]
        xs = x + token.to(tl.int64) * K + k
        if GROUP_K:
            of_rows = weight_scale + scale_offsets(
                expert, weight_row, 2 * COLUMNS, K, GROUP_N, GROUP_K, False
            )
            stride = scales_stride(tokens)
            vector = tl.arange(0, BLOCK_K // VECTOR) * VECTOR
        elif SCALED:
            scale = tl.load(x_scale + token) * tl.load(weight_scale + expert * (2 * COLUMNS) + weight_row)
        acc = tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32)
        for at in tl.static_range(0, K, BLOCK_K):
            inside = at + k < K
            w = _load_weights(weights + at, inside[None, :], ragged)
            part = tl.load(xs + at, mask=inside, other=0.0)
            products = widen(w) * widen(part)[None, :]
            # First sum the values in each thread's 16 bytes, which requires no exchange between threads.
            sums = tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // VECTOR, VECTOR]), axis=2)
            if GROUP_K:
                group = tl.minimum(at + vector, K - 1) // GROUP_K
                of_group = tl.load(x_scale + group * stride + token)
                sums *= tl.load(of_rows[:, None] + group[None, :]) * of_group[None, :]
            acc += sums
        total = tl.sum(acc, axis=1)
        if SCALED and not GROUP_K:
            total = total * scale
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)[:, None]
        result = gated(total[:, None], out.dtype.element_ty).to(out.dtype.element_ty)
        tl.store(out + pair.to(tl.int64) * COLUMNS + column, result, mask=column < COLUMNS)


@triton.jit(do_not_specialize=["first_expert"])
def _down_gemv(
    x,
    chosen,
    weights,
    weight,
    weight_scale,
    residual,
    out,
    first_expert,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WHOLE: tl.constexpr,
    VECTOR: tl.constexpr,
    EXPERTS: tl.constexpr,
    PARTIAL: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """For each of a token's chosen experts, multiply BLOCK_N weight rows by that expert's activations. With
    SCALED, the program quantises the activations. With GROUP_K, each step's columns are complete groups."""
    tiles: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    masked: tl.constexpr = (K % BLOCK_K != 0) | PARTIAL
    token = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    weight_row = weight_rows(tile, COLUMNS, BLOCK_N, False)
    turn = tl.arange(0, TOP_K_BLOCK)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    # Pad the choices by repeating the last one with a routing weight of zero.
    pair = token * TOP_K + tl.minimum(turn, TOP_K - 1)
    expert = tl.load(chosen + pair, cache_modifier=".cg").to(tl.int64)
    here = tl.full([TOP_K_BLOCK], True, tl.int1)
    if PARTIAL:
        expert -= first_expert
        here = (expert >= 0) & (expert < EXPERTS)
        expert = tl.where(here, expert, 0)
    rows = expert[None, :] * COLUMNS + weight_row[:, None]
    tile_weights = weight + rows[:, :, None] * K + k[None, None, :]
    w = _load_weights(tile_weights, (k < K)[None, None, :] & here[None, :, None], masked)
    share = tl.load(weights + pair, mask=here & (turn < TOP_K), other=0.0, cache_modifier=".cg")
    if GROUP_K:
        vector = tl.arange(0, BLOCK_K // VECTOR) * VECTOR
        in_block = weight_row
        if GROUP_N % BLOCK_N == 0:  # all rows of the tile have the same scales
            in_block = tl.min(weight_row, axis=0) + tl.arange(0, 1)
        of_rows = weight_scale + scale_offsets(
            expert[None, :], in_block[:, None], COLUMNS, K, GROUP_N, GROUP_K, False
        )
    elif SCALED:
        of_row = tl.load(weight_scale + rows)
    if PDL:
        tl.extra.cuda.gdc_wait()
    values = x + pair.to(tl.int64)[:, None] * K
    if SCALED and not GROUP_K:
        column = tl.arange(0, WHOLE)
        of_choice = (column < K)[None, :] & here[:, None]
        whole = tl.load(values + column[None, :], mask=of_choice, other=0.0).to(tl.float32)
        most = tl.max(tl.abs(whole), axis=1)
        factor = tl.div_rn(tl.full([TOP_K_BLOCK], 448.0, tl.float32), tl.where(most > 0.0, most, 1.0))
        scale = tl.div_rn(most, tl.full([TOP_K_BLOCK], 448.0, tl.float32))
    parts: tl.constexpr = [BLOCK_N, TOP_K_BLOCK, BLOCK_K // VECTOR, VECTOR]
    acc = tl.zeros([BLOCK_N, TOP_K_BLOCK, BLOCK_K // VECTOR], tl.float32)
    for at in tl.static_range(0, K, BLOCK_K):
        inside = at + k < K
        if at > 0:
            w = _load_weights(tile_weights + at, inside[None, None, :] & here[None, :, None], masked)
        of_choice = inside[None, :] & here[:, None]
        part = tl.load(values + at + k[None, :], mask=of_choice, other=0.0).to(tl.float32)
        if GROUP_K:
            part = tl.reshape(part, [TOP_K_BLOCK, BLOCK_K // GROUP_K, GROUP_K])
            scale, factor = fp8_scale(tl.max(tl.abs(part), axis=2))
            part = widen((part * factor[:, :, None]).to(weight.dtype.element_ty))
            part = tl.reshape(part * scale[:, :, None], [TOP_K_BLOCK, BLOCK_K])
        elif SCALED:
            part = widen((part * factor[:, None]).to(weight.dtype.element_ty))
        products = widen(w) * part[None, :, :]
        sums = tl.sum(tl.reshape(products, parts), axis=3)
        if GROUP_K:
            group = tl.minimum(at + vector, K - 1) // GROUP_K
            sums *= tl.load(of_rows[:, :, None] + group[None, None, :])
        acc += sums
    total = tl.sum(acc, axis=2)
    if SCALED and not GROUP_K:
        total = total * scale[None, :] * of_row
    result = tl.sum(total * share[None, :], axis=1)
    column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    at = token.to(tl.int64) * COLUMNS + column
    if RESIDUAL:
        result += tl.load(residual + at, mask=column < COLUMNS, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=column < COLUMNS)


@triton.jit(do_not_specialize=["tokens", "first_expert"])
def _up_dot(
    x,
    x_scale,
    chosen,
    weight,
    weight_scale,
    out,
    first_expert,
    tokens,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_PAIR: tl.constexpr,
    EXPERTS: tl.constexpr,
    PARTIAL: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_N weight rows of one expert by all tokens that chose it."""
    tiles: tl.constexpr = (2 * COLUMNS + BLOCK_N - 1) // BLOCK_N
    slot = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    weight_row = weight_rows(tile, COLUMNS, BLOCK_N, True)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        # Let the next kernel start only after this wait: the next kernel reads the chosen experts before it
        # waits for this kernel, so they must already be written.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert, live, takes, pair = _takers(
        chosen, slot, tokens, first_expert, TOP_K, TOP_K_BLOCK, ROWS, BY_PAIR, EXPERTS, PARTIAL
    )
    if live:
        weights = weight + expert * (2 * COLUMNS * K) + weight_row[:, None] * K + k[None, :]
        row = tl.arange(0, ROWS)
        xs = x + row[:, None] * K + k[None, :]
        of_rows = weight_scale
        of_tokens = x_scale
        if GROUP_K:
            of_rows += scale_offsets(expert, weight_row, 2 * COLUMNS, K, GROUP_N, GROUP_K, False)
            of_tokens += row
        elif SCALED:
            # Load the scales before computing the products, so that the loads overlap with the products.
            of_token = tl.load(x_scale + row, mask=takes, other=0.0)
            of_row = tl.load(weight_scale + expert * (2 * COLUMNS) + weight_row)
        stride = scales_stride(tokens)
        acc = _multiply(weights, xs, takes, of_rows, of_tokens, stride, K, ROWS, BLOCK_N, BLOCK_K, GROUP_K)
        if SCALED and not GROUP_K:
            acc = acc * of_token[None, :] * of_row[:, None]
        column = tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
        result = gated(acc, out.dtype.element_ty).to(out.dtype.element_ty)
        to = out + pair.to(tl.int64)[None, :] * COLUMNS + column[:, None]
        tl.store(to, result, mask=(column < COLUMNS)[:, None] & takes[None, :])


@triton.jit(do_not_specialize=["tokens", "first_expert"])
def _down_dot(
    x,
    x_scale,
    chosen,
    weights,
    weight,
    weight_scale,
    residual,
    out,
    partials,
    arrived,
    tokens,
    first_expert,
    COLUMNS: tl.constexpr,
    K: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BY_PAIR: tl.constexpr,
    EXPERTS: tl.constexpr,
    PARTIAL: tl.constexpr,
    SCALED: tl.constexpr,
    GROUP_N: tl.constexpr,
    GROUP_K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    PDL: tl.constexpr,
):
    """Multiply BLOCK_N weight rows of one expert by the activations of all tokens that chose it. The program
    that finishes a tile last adds up each token's results."""
    tiles: tl.constexpr = (COLUMNS + BLOCK_N - 1) // BLOCK_N
    slot = tl.program_id(0) // tiles
    tile = tl.program_id(0) % tiles
    weight_row = weight_rows(tile, COLUMNS, BLOCK_N, False)
    k = tl.arange(0, BLOCK_K)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    expert, live, takes, pair = _takers(
        chosen, slot, tokens, first_expert, TOP_K, TOP_K_BLOCK, ROWS, BY_PAIR, EXPERTS, PARTIAL
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
    if live:
        weights_at = weight + expert * (COLUMNS * K) + weight_row[:, None] * K + k[None, :]
        xs = x + pair.to(tl.int64)[:, None] * K + k[None, :]
        share = tl.load(weights + pair, mask=takes, other=0.0)
        of_rows = weight_scale
        of_pairs = x_scale
        if GROUP_K:
            one: tl.constexpr = GROUP_N % BLOCK_N == 0
            of_rows += scale_offsets(expert, weight_row, COLUMNS, K, GROUP_N, GROUP_K, one)
            of_pairs += pair
        elif SCALED:
            of_pair = tl.load(x_scale + pair, mask=takes, other=0.0)
            of_row = tl.load(weight_scale + expert * COLUMNS + weight_row)
        stride = scales_stride(tokens * TOP_K)
        acc = _multiply(weights_at, xs, takes, of_rows, of_pairs, stride, K, ROWS, BLOCK_N, BLOCK_K, GROUP_K)
        if SCALED and not GROUP_K:
            acc = acc * of_pair[None, :] * of_row[:, None]
        acc = acc * share[None, :]
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        to = partials + pair.to(tl.int64)[None, :] * COLUMNS + column[:, None]
        tl.store(to, acc, mask=(column < COLUMNS)[:, None] & takes[None, :])

    # All threads must have stored their results before any thread increments the counter.
    tl.debug_barrier()
    programs = tl.num_programs(0) // tiles
    if tl.atomic_add(arrived + tile, 1, sem="acq_rel", scope="gpu") == programs - 1:
        tl.store(arrived + tile, 0)
        token = tl.arange(0, ROWS)
        column = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        inside = (token < tokens)[:, None] & (column < COLUMNS)[None, :]
        at = token[:, None] * COLUMNS + column[None, :]
        total = tl.zeros([ROWS, BLOCK_N], tl.float32)
        for turn in tl.static_range(TOP_K):
            result = partials + (token * TOP_K + turn)[:, None] * COLUMNS + column[None, :]
            computed = inside
            if PARTIAL:
                at_turn = chosen + token * TOP_K + turn
                of_turn = tl.load(at_turn, mask=token < tokens, other=0, cache_modifier=".cg") - first_expert
                computed = inside & ((of_turn >= 0) & (of_turn < EXPERTS))[:, None]
            total += tl.load(result, mask=computed, other=0.0, cache_modifier=".cg")
        if RESIDUAL:
            total += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)
