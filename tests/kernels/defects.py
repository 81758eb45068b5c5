"""Defects to seed into the kernels, one at a time. Each defect must make the kernel's tests fail, both in the
interpreter and on a GPU. `scripts/seed_defects` runs the tests with each defect, and `test_defects.py` checks
that each defect still matches the source code."""

from __future__ import annotations

from tests.kernels.defect import ROOT, Defect
from tests.kernels.defects_blocks import BLOCKS
from tests.kernels.defects_experts import EXPERTS
from tests.kernels.defects_linear import LINEAR

__all__ = ["DEFECTS", "ROOT", "Defect"]

_DECODE = [
    Defect(
        "one token too many is visible",
        "attention_decode_kernel.py",
        "seen = position < cached",
        "seen = position <= cached",
        "attends or error",
    ),
    Defect(
        "the last page is dropped",
        "attention_decode_kernel.py",
        "end = tl.minimum(begin + each, pages)",
        "end = tl.minimum(begin + each, pages - 1)",
        "attends or error",
    ),
    Defect(
        "the window is a token short",
        "attention_decode_kernel.py",
        "seen = seen & (position >= oldest)",
        "seen = seen & (position > oldest)",
        "attends or (error and mixed)",
    ),
    Defect(
        "a page that was loaded early counts twice",
        "attention_decode_kernel.py",
        "begin += 1",
        "begin += 0",
        "new_tokens and (split or (error and mixed))",
    ),
    Defect(
        "every KV head reads the pages of the first",
        "attention_decode_kernel.py",
        "tile = (tl.load(blocks + page).to(tl.int32) * KV_HEADS + kv_head) * 64",
        "tile = (tl.load(blocks + page).to(tl.int32) * KV_HEADS) * 64",
        "attends or error",
    ),
    Defect(
        "values use the scales of keys",
        "attention_decode_kernel.py",
        "weights = weights * tl.load(v_scales + tile + token)[None, :]",
        "weights = weights * tl.load(k_scales + tile + token)[None, :]",
        "scales or (error and fp8)",
    ),
    Defect(
        "splits are combined without their maxima",
        "attention_decode_kernel.py",
        "acc = acc * old[:, None] + part * weight[:, None]",
        "acc = acc + part * weight[:, None]",
        "split or (error and long)",
    ),
    Defect(
        "the counter of splits is not reset",
        "attention_decode_kernel.py",
        "tl.store(counter, 0)",
        "tl.store(counter, 1)",
        "split or bits",
    ),
    Defect(
        "every split adds the new token",
        "attention_decode_kernel.py",
        "newest = begin + each >= pages",
        "newest = begin + each >= 0",
        "new_tokens and (split or (error and mixed))",
    ),
    Defect(
        "the new token's value is not weighted",
        "attention_decode_kernel.py",
        "acc += weight[:, None] * kept_v",
        "acc += kept_v",
        "new_tokens",
    ),
    Defect(
        "the new token is written one slot too far",
        "attention_decode_kernel.py",
        "new_slot = new_page * 64 + new_position % 64",
        "new_slot = new_page * 64 + (new_position + 1) % 64",
        "new_tokens",
    ),
    Defect(
        "new values use the scale of keys",
        "attention_decode_kernel.py",
        "tl.store(v_scales + new_slot, v_scale)",
        "tl.store(v_scales + new_slot, k_scale)",
        "new_tokens and (scale or (error and fp8))",
    ),
    Defect(
        "a new token is rotated backwards",
        "new_tokens.py",
        "tl.where(dim < half, -sin, sin)",
        "tl.where(dim < half, sin, -sin)",
        "new_tokens",
    ),
    Defect(
        "a new token is not normalised",
        "new_tokens.py",
        "own = (own * inverse * own_gain)",
        "own = (own * own_gain)",
        "new_tokens",
    ),
]
_PREFILL = [
    Defect(
        "a token does not see itself",
        "attention_prefill.py",
        "seen = place[None, :] <= position[:, None]",
        "seen = place[None, :] < position[:, None]",
        "attend or error",
    ),
    Defect(
        "the page on the diagonal is not masked",
        "attention_prefill.py",
        "whole = (first_position + 1) // 64",
        "whole = (first_position + 64) // 64",
        "attend or error",
    ),
    Defect(
        "a masked key has a finite score",
        "attention_prefill.py",
        'scores = tl.where(seen, scores, float("-inf"))',
        "scores = tl.where(seen, scores, _LOWEST)",
        "error and mixed",
        interpreted=False,  # the interpreter does not fuse the multiplication and the subtraction
    ),
    Defect(
        "KV heads overlap in the queries",
        "attention_prefill.py",
        "head = kv_head * HEADS + row % HEADS",
        "head = kv_head + row % HEADS",
        "attend or error",
    ),
    Defect(
        "sums are not rescaled to a new maximum",
        "attention_prefill.py",
        "acc = acc * old[:, None]\n",
        "acc = acc * 1.0\n",
        "attend or error",
    ),
    Defect(
        "every tile of a chunk has the first tile's position",
        "attention_prefill.py",
        "part[:, 2] = chunk.context + offset",
        "part[:, 2] = chunk.context",
        "attend or error",
    ),
    Defect(
        "expanded values use the scales of keys",
        "attention_prefill.py",
        "tl.load(v_scales + tile + token)[:, None]",
        "tl.load(k_scales + tile + token)[:, None]",
        "expanded or (error and fp8)",
    ),
    Defect(
        "an expanded window starts at the first page",
        "attention_prefill.py",
        "chunk.context, used - first))",
        "chunk.context, used))",
        "expanded or (error and fp8)",
    ),
]
_PREFILL_HOPPER = [
    Defect(name, "attention_prefill_hopper.py", right, wrong, "error")
    for name, right, wrong in (
        (
            "a token does not see itself",
            "gl.where(key[None, :] <= position[:, None],",
            "gl.where(key[None, :] < position[:, None],",
        ),
        (
            "only the last keys are masked",
            "if block * 128 + 127 > first:",
            "if block * 128 > first:",
        ),
        (
            "sums are not rescaled to a new maximum",
            "acc = acc * old[:, None]",
            "acc = acc * 1.0",
        ),
        (
            "KV heads overlap in the queries",
            "at = [token + half * (64 // GROUP), kv_head * GROUP, 0]",
            "at = [token + half * (64 // GROUP), kv_head, 0]",
        ),
        (
            "128 keys are the same page twice",
            "next_page = gl.minimum(page + 1, last // 64)",
            "next_page = page",
        ),
        (
            "a page after the last one is read",
            "next_page = gl.minimum(page + 1, last // 64)",
            "next_page = page + 1",
        ),
        (
            "every chunk reads the scratch blocks of the first",
            "one = ((row + page) * KV_HEADS + kv_head) * 64",
            "one = (page * KV_HEADS + kv_head) * 64",
        ),
        (
            "both warpgroups compute the same half of a tile",
            "operands, bars, 1, KV_HEADS",
            "operands, bars, 0, KV_HEADS",
        ),
    )
]
_FUSED = [
    Defect(
        "the mean of a norm includes padding",
        "fused.py",
        "mean = tl.sum(row * row, axis=0) / hidden",
        "mean = tl.sum(row * row, axis=0) / BLOCK",
        "norm",
    ),
    Defect(
        "keys and queries are rotated backwards",
        "fused.py",
        "a * cos - b * sin",
        "a * cos + b * sin",
        "rotated",
    ),
    Defect(
        "queries use the norm weight of keys",
        "fused.py",
        "a * norm * tl.where(is_q[:, None], q_low[None, :], k_low[None, :])",
        "a * norm * k_low[None, :]",
        "rotated",
    ),
    Defect(
        "the last slots of a page map to the first",
        "fused.py",
        "offset = slot % PAGE",
        "offset = slot % (PAGE - 1)",
        "rotated",
    ),
    Defect(
        "padding writes to the first slot",
        "fused.py",
        "is_k = is_k & live",
        "is_k = is_k & (block >= 0)",
        "minus_one",
    ),
    Defect(
        "e4m3 scales use the range of another format",
        "fused.py",
        "return tl.div_rn(largest, 448.0)",
        "return tl.div_rn(largest, 240.0)",
        "quantised",
    ),
    Defect(
        "gate and up are exchanged",
        "fused.py",
        "gate = tl.load(gate_up + at, mask",
        "gate = tl.load(gate_up + at + width, mask",
        "silu",
    ),
]
_SAMPLING = [
    Defect(
        "scan: the highest id wins a tie",
        "sampling_kernels.py",
        "token = tl.min(tl.where(score == best, first + column, 0x7FFFFFFF), axis=0)",
        "token = tl.max(tl.where(score == best, first + column, -1), axis=0)",
        "ties",
    ),
    Defect(
        "scan: the noise belongs to the next position",
        "sampling_kernels.py",
        "key = noise_key(tl.load(noise_base + table_row), tl.load(positions + i))",
        "key = noise_key(tl.load(noise_base + table_row), tl.load(positions + i) + 1)",
        "mix or real_vocabulary",
    ),
    Defect(
        "pick: the last chunk is ignored",
        "sampling_kernels.py",
        "there = chunk < chunks\n",
        "there = chunk < chunks - 1\n",
        "greedy",
    ),
    Defect(
        "combine: the sums of chunks are added without rescaling",
        "sampling_full.py",
        "total = tl.sum(sums * tl.exp(highest - finite(largest)), axis=0)",
        "total = tl.sum(sums, axis=0)",
        "every_kind or real_vocabulary",
    ),
    Defect(
        "decide: the nucleus is replaced by its complement",
        "sampling_full.py",
        'target = tl.where(by_mass, top_p * total, float("inf"))',
        'target = tl.where(by_mass, (1.0 - top_p) * total, float("inf"))',
        "every_kind or real_vocabulary",
    ),
    Defect(
        "above: the best token is counted as more likely than itself",
        "sampling_full.py",
        "masses = tl.join(tl.where(x > logit, weight, 0.0)",
        "masses = tl.join(tl.where(x >= logit, weight, 0.0)",
        "every_kind or real_vocabulary or ties",
    ),
    Defect(
        "few: one token too many is kept",
        "sampling_full.py",
        "kept = (entry < count) & (higher < k)",
        "kept = (entry < count) & (higher <= k)",
        "every_kind or real_vocabulary",
    ),
    Defect(
        "decide: the mass limit is ignored",
        "sampling_full.py",
        "kept = (count < limit) & (mass < target)\n        next_kept",
        "kept = count < limit\n        next_kept",
        "every_kind or real_vocabulary",
    ),
    Defect(
        "settle: the mass limit is ignored",
        "sampling_search.py",
        "kept = (count < limit) & (mass < target)",
        "kept = count < limit",
        "every_kind or real_vocabulary",
    ),
    Defect(
        "settle: top-p ignores what top-k excluded",
        "sampling_search.py",
        "target = tl.where(both, top_p * mass_over, target)",
        "target = tl.where(both, top_p * total, target)",
        "ties or real_vocabulary",
    ),
    Defect(
        "settle: the draw ignores min-p",
        "sampling_search.py",
        "better = (x > low) & (x >= lowest) & (score > scores)",
        "better = (x > low) & (score > scores)",
        "every_kind or real_vocabulary or ties",
    ),
    Defect(
        "edit: tokens of the prompt are not penalised",
        "sampling_kernels.py",
        "factor = tl.where(seen > 0,",
        "factor = tl.where(seen > 1,",
        "penalties",
    ),
    Defect(
        "edit: a bias replaces the logit",
        "sampling_kernels.py",
        "tl.store(at, x + tl.load(values + entry, mask=there, other=0.0), mask=there)",
        "tl.store(at, x * 0.0 + tl.load(values + entry, mask=there, other=0.0), mask=there)",
        "penalties",
    ),
]
_DECODE_STEP = [
    Defect(
        "the token after a full page is placed in that page",
        "decode_step.py",
        "block = tl.load(block_table + row * stride + position // PAGE,",
        "block = tl.load(block_table + row * stride + (position - 1) // PAGE,",
        "placed",
    ),
    Defect(
        "a bad token becomes the next input",
        "decode_step.py",
        "tl.where(token < 0, 0, token)",
        "token",
        "sampled",
    ),
]
_ALL_REDUCE = [
    Defect(
        "every call uses the same half of a region",
        "peer_arena.py",
        "half = (program.to(gl.int64) * 2 + (call & 1)) *",
        "half = (program.to(gl.int64) * 2) *",
        "sum_in_rank_order or used_again",
    ),
    Defect(
        "the reserved value is sent as payload",
        "peer_arena.py",
        "return gl.where(words == EMPTY, 0, words)",
        "return words",
        "sum_in_rank_order",
    ),
    Defect(
        "received words are not marked as read",
        "peer_arena.py",
        "    send(address, words * 0 + EMPTY)\n",
        "",
        "sum_in_rank_order or used_again",
    ),
    Defect(
        "two-shot: the last rank receives no result of its peers",
        "all_reduce.py",
        "if owner != RANK:\n                at = received",
        "if owner != RANK and RANK < WORLD - 1:\n                at = received",
        "sum_in_rank_order",
    ),
]

_ALL_GATHER = [
    Defect(
        "gathered words: the reserved value is sent as payload",
        "all_gather.py",
        "words = payload(gl.load(x + index, mask=index < count, other=0))",
        "words = gl.load(x + index, mask=index < count, other=0)",
        "order_of_delivery",
    ),
    Defect(
        "the best token: a NaN does not win",
        "all_gather.py",
        "best_bits.to(gl.float32, bitcast=True)) | (value != value)",
        "best_bits.to(gl.float32, bitcast=True))",
        "order_of_delivery",
    ),
    Defect(
        "the best token: the last of equal values wins",
        "all_gather.py",
        "better = (value > best_bits",
        "better = (value >= best_bits",
        "order_of_delivery",
    ),
]

_ALL_REDUCE_NORM = [
    Defect(
        "normed sums: every part is received at the place of the first",
        "all_reduce_norm.py",
        "at = received + part * (BLOCK * 4)",
        "at = received",
        "quantised_norm or many_times",
    ),
    Defect(
        "normed sums: the mean is over words",
        "all_reduce_norm.py",
        "gl.rsqrt(squares / (2 * WORDS) + eps)",
        "gl.rsqrt(squares / WORDS + eps)",
        "quantised_norm",
    ),
    Defect(
        "normed sums: the scale ignores every second number",
        "all_reduce_norm.py",
        "gl.max(gl.maximum(gl.abs(low), gl.abs(high)), axis=0)",
        "gl.max(gl.abs(low), axis=0)",
        "quantised_norm",
    ),
]

_EMBEDDING = [
    Defect(
        "the embedding: the first token of the next rank is read",
        "embedding.py",
        "own = (row >= 0) & (row < rows)",
        "own = (row >= 0) & (row <= rows)",
        "zeros",
    ),
    Defect(
        "the embedding: tokens of earlier ranks are read",
        "embedding.py",
        "own = (row >= 0) & (row < rows)",
        "own = row < rows",
        "zeros",
    ),
]

_SUM_PARTS = [
    Defect(
        "the sum of parts: this rank's own part is read from its stage",
        "sum_parts.py",
        "if source == rank:",
        "if source == rank + WORLD:",
        "rank_order",
    ),
]

DEFECTS = [
    *_DECODE,
    *_PREFILL,
    *_PREFILL_HOPPER,
    *_FUSED,
    *LINEAR,
    *BLOCKS,
    *_SAMPLING,
    *_DECODE_STEP,
    *_ALL_REDUCE,
    *_ALL_REDUCE_NORM,
    *_EMBEDDING,
    *_ALL_GATHER,
    *_SUM_PARTS,
    *EXPERTS,
]
