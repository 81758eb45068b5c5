"""Defects to seed into the code for FP8 weights with one scale per block; see `defects`."""

from __future__ import annotations

from tests.kernels.defect import Defect

_LINEAR, _EXPERTS = "by_blocks or blocks_are_accurate", "experts_with_blocks"

BLOCKS = [
    Defect(
        "blocks: every column is multiplied by the scales of the first block",
        "block_scales.py",
        "group = tl.minimum(k, K - 1) // GROUP_K\n",
        "group = 0\n",
        _LINEAR,
    ),
    Defect(
        "blocks: every split begins with the scales of the first block",
        "linear_rows.py",
        "begin = split * depth\n",
        "begin = 0\n",
        _LINEAR,
    ),
    Defect(
        "blocks: the weight's blocks have twice as many rows",
        "linear_rows.py",
        "scale_offsets(0, weight_row, 0, K, GROUP_N, GROUP_K, one)",
        "scale_offsets(0, weight_row, 0, K, 2 * GROUP_N, GROUP_K, one)",
        _LINEAR,
    ),
    Defect(
        "blocks: every tile of tokens uses the scales of the first",
        "linear_rows.py",
        "x_scale += first\n",
        "x_scale += 0\n",
        _LINEAR,
    ),
    Defect(
        "blocks: the last tile of tokens writes past the last token",
        "linear_rows.py",
        "rows = tl.minimum(rows - first, ROWS)",
        "rows = tl.minimum(rows, ROWS)",
        "past_the_last_token or blocks_are_accurate",
    ),
    Defect(
        "blocks: every expert uses the scales of the first",
        "block_scales.py",
        "return (expert * row_blocks + weight_row // GROUP_N)",
        "return (expert * 0 + weight_row // GROUP_N)",
        _EXPERTS,
    ),
    Defect(
        "blocks: up uses the scales of the first token",
        "experts_few_kernels.py",
        "of_tokens += row\n",
        "of_tokens += row * 0\n",
        _EXPERTS,
    ),
    Defect(
        "blocks: down uses the scales of the first choice",
        "experts_few_kernels.py",
        "of_pairs += pair\n",
        "of_pairs += pair * 0\n",
        _EXPERTS,
    ),
    Defect(
        "blocks: choices use the scales of the first",
        "experts_grouped.py",
        "        of_choices = x_scale + source\n",
        "        of_choices = x_scale + source * 0\n",
        _EXPERTS,
    ),
    Defect(
        "blocks: the second half of a tile uses the scales of the first",
        "experts_grouped.py",
        "next0, next1 = tl.load(of_rows0 + group), tl.load(of_rows1 + group)",
        "next0, next1 = tl.load(of_rows0 + group), tl.load(of_rows0 + group)",
        _EXPERTS,
    ),
    Defect(
        "blocks: the second half of a tile overwrites the first",
        "experts_grouped.py",
        "tl.store(to + HALF, acc1",
        "tl.store(to, acc1",
        _EXPERTS,
    ),
    Defect(
        "blocks: the scales of a group overwrite those of the group before",
        "fused.py",
        "group.to(tl.int64) * scales_stride(tokens) + token",
        "group.to(tl.int64) * (scales_stride(tokens) - 4) + token",
        f"{_LINEAR} or {_EXPERTS}",
    ),
    Defect(
        "blocks: every step uses the scales of the step after it",
        "linear_rows.py",
        "after = begin + at + BLOCK_K\n",
        "after = begin + at + 2 * BLOCK_K\n",
        _LINEAR,
    ),
    Defect(
        "blocks: a tile of tokens computes the distance of scales from its own tokens",
        "linear_rows.py",
        "        stride = scales_stride(rows)\n        rows = tl.minimum(rows - first, ROWS)\n",
        "        rows = tl.minimum(rows - first, ROWS)\n        stride = scales_stride(rows)\n",
        _LINEAR,
    ),
    Defect(
        "blocks: experts' choices compute the distance of scales from the number of choices",
        "experts_grouped.py",
        "        stride = scales_stride(total // TOP_K)",
        "        stride = scales_stride(total)",
        _EXPERTS,
    ),
    Defect(
        "blocks: cuBLAS multiplies only the rows that exist",
        "linear.py",
        "x.as_strided((padded, k), (k, 1))",
        "x",
        _LINEAR,
    ),
    Defect(
        "blocks: every step of tiles uses the scales of the step after it",
        "linear_tiles.py",
        "group = gl.minimum(first_k + at_step * BLOCK_K, K - 1) // GROUP_K",
        "group = gl.minimum(first_k + (at_step + 1) * BLOCK_K, K - 1) // GROUP_K",
        "by_blocks_in_tiles or blocks_are_accurate",
    ),
    Defect(
        "blocks: every split of tiles begins with the scales of the first block",
        "linear_tiles.py",
        "gl.minimum(first_k + at_step * BLOCK_K, K - 1)",
        "gl.minimum(at_step * BLOCK_K, K - 1)",
        "by_blocks_in_tiles or blocks_are_accurate",
    ),
    Defect(
        "blocks: every step of tiles uses the tokens' scales of the first step",
        "linear_tiles.py",
        "token_scales.index(step)",
        "token_scales.index(0)",
        "by_blocks_in_tiles or blocks_are_accurate",
    ),
    Defect(
        "blocks: up of one token uses the scales of the first group",
        "experts_few_kernels.py",
        "of_group = tl.load(x_scale + group * stride + token)",
        "of_group = tl.load(x_scale + token)",
        _EXPERTS,
    ),
    Defect(
        "blocks: down of one token uses the scales of the first block",
        "experts_few_kernels.py",
        "sums *= tl.load(of_rows[:, :, None] + group[None, None, :])",
        "sums *= tl.load(of_rows[:, :, None] + 0 * group[None, None, :])",
        _EXPERTS,
    ),
    Defect(
        "blocks: down of one token does not multiply by the scales of its choices",
        "experts_few_kernels.py",
        "part = tl.reshape(part * scale[:, :, None], [TOP_K_BLOCK, BLOCK_K])",
        "part = tl.reshape(part, [TOP_K_BLOCK, BLOCK_K])",
        _EXPERTS,
    ),
]
