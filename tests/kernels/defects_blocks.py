"""Defects to seed into the code for FP8 weights with one scale per block; see `defects`."""

from __future__ import annotations

from tests.kernels.defect import Defect

_LINEAR, _EXPERTS = "by_blocks or blocks_are_accurate", "experts_with_blocks"

BLOCKS = [
    Defect(
        "blocks: every column is multiplied by the scales of the first block",
        "linear_rows.py",
        "group = k // GROUP_K\n",
        "group = 0\n",
        _LINEAR,
    ),
    Defect(
        "blocks: every split begins with the scales of the first block",
        "linear_rows.py",
        "of_tokens, split * depth + at, live, GROUP_K)",
        "of_tokens, at, live, GROUP_K)",
        _LINEAR,
    ),
    Defect(
        "blocks: the weight's blocks have twice as many rows",
        "linear_rows.py",
        "of_rows += weight_row // GROUP_N * groups",
        "of_rows += weight_row // (2 * GROUP_N) * groups",
        _LINEAR,
    ),
    Defect(
        "blocks: every tile of tokens uses the scales of the first",
        "linear_rows.py",
        "x_scale += first * groups",
        "x_scale += first * 0",
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
        "linear_rows.py",
        "return (expert * row_blocks + weight_row // GROUP_N)",
        "return (expert * 0 + weight_row // GROUP_N)",
        _EXPERTS,
    ),
    Defect(
        "blocks: up uses the scales of the first token",
        "experts_few_kernels.py",
        "of_tokens += row * groups",
        "of_tokens += row * 0",
        _EXPERTS,
    ),
    Defect(
        "blocks: down uses the scales of the first choice",
        "experts_few_kernels.py",
        "of_pairs += pair * groups",
        "of_pairs += pair * 0",
        _EXPERTS,
    ),
    Defect(
        "blocks: choices use the scales of the first",
        "experts_grouped.py",
        "of_choices += source.to(tl.int64) * ((K + GROUP_K - 1) // GROUP_K)",
        "of_choices += source.to(tl.int64) * 0",
        _EXPERTS,
    ),
    Defect(
        "blocks: the scales of a token's groups overwrite those of the token before",
        "fused.py",
        "tl.store(scales + token * count + group, scale, mask=group < count)",
        "tl.store(scales + token * (count - 1) + group, scale, mask=group < count)",
        f"{_LINEAR} or {_EXPERTS}",
    ),
]
