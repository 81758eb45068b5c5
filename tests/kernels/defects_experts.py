"""Defects to seed into the kernels of mixture-of-experts layers; see `defects`."""

from __future__ import annotations

from tests.kernels.defect import Defect

_EXPERTS_ROUTE = [
    Defect(
        "the mean of the router's norm includes padding",
        "experts_route.py",
        "mean = tl.sum(row * row, axis=0) / HIDDEN",
        "mean = tl.sum(row * row, axis=0) / BLOCK",
        "highest or accurate",
    ),
    Defect(
        "of tied experts the last one is chosen",
        "experts_route.py",
        "before = higher | (same & (other[None, :] < index[:, None]))",
        "before = higher | (same & (other[None, :] > index[:, None]))",
        "highest or tied or accurate",
    ),
    Defect(
        "the weights of some experts add up over all experts",
        "experts_route.py",
        "counted = best if NORMALISED else index < EXPERTS",
        "counted = index < EXPERTS",
        "highest or accurate",
    ),
    Defect(
        "the counters of the router are not reset",
        "experts_route.py",
        "tl.store(arrived + token, 0)",
        "tl.store(arrived + token, 1)",
        "highest or bit",
    ),
    Defect(
        "every program of a token computes the first experts",
        "experts_route.py",
        "of_expert = tl.minimum(expert, EXPERTS - 1)[:, None] * HIDDEN + column[None, :]",
        "of_expert = tl.arange(0, BLOCK_E)[:, None] * HIDDEN + column[None, :]",
        "highest or accurate",
    ),
    Defect(
        "experts that do not exist are chosen",
        "experts_route.py",
        "key = tl.where((index < EXPERTS)[None, :], key, gone)",
        "key = tl.where((index < ALL)[None, :], key, gone)",
        "highest or accurate",
    ),
    Defect(
        "a chosen expert is chosen again",
        "experts_route.py",
        "key = tl.where(now, gone, key)",
        "key = tl.where(index[None, :] < best[:, None], gone, key)",
        "highest or accurate",
    ),
    Defect(
        "of many tokens' tied experts the last one is chosen",
        "experts_route.py",
        "best = tl.min(tl.where(key == highest[:, None], index[None, :], ALL), axis=1)",
        "best = tl.max(tl.where(key == highest[:, None], index[None, :], 0), axis=1)",
        "highest or tied or accurate",
    ),
    Defect(
        "negative logits are in the wrong order",
        "experts_route.py",
        "key = tl.where(key < 0, key ^ 0x7FFFFFFF, key)",
        "key = tl.where(key < 0, key, key)",
        "highest or accurate",
    ),
    Defect(
        "every part of the logits' sums begins at the first column",
        "experts_route.py",
        "tl.range(split * length, tl.minimum(",
        "tl.range(0, tl.minimum(",
        "highest or accurate",
    ),
    Defect(
        "the second tile of experts is the first",
        "experts_route.py",
        "index = tile % (ALL // COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)",
        "index = tile % (ALL // COLUMNS) * 0 + tl.arange(0, COLUMNS)",
        "highest or accurate",
    ),
    Defect(
        "only the first part of the logits' sums is added",
        "experts_route.py",
        "for split in tl.static_range(SPLITS):",
        "for split in tl.static_range(1):",
        "highest or accurate",
    ),
    Defect(
        "the weights of many tokens' experts add up over all experts",
        "experts_route.py",
        "counted = picked if NORMALISED else (index < EXPERTS)[None, :]",
        "counted = (index < EXPERTS)[None, :]",
        "highest or accurate",
    ),
    Defect(
        "a choice leaves a gap to the earlier ones of its block",
        "experts_route.py",
        "tl.store(places + to, tl.cumsum(taken, axis=0) - taken, mask=picked)",
        "tl.store(places + to, tl.cumsum(taken, axis=0), mask=picked)",
        "highest or accurate",
    ),
    Defect(
        "a block counts each expert once",
        "experts_route.py",
        "tl.store(counts + tl.program_id(0) * ALL + index, tl.sum(taken, axis=0))",
        "tl.store(counts + tl.program_id(0) * ALL + index, tl.max(taken, axis=0))",
        "highest or accurate",
    ),
]

_EXPERTS_FEW = [
    Defect(
        "up: every choice reads the first expert's weights",
        "experts_few.py",
        "expert = tl.load(chosen + pair).to(tl.int64)",
        "expert = tl.load(chosen + pair).to(tl.int64) * 0",
        "few",
    ),
    Defect(
        "up: a choice reads the token of its number",
        "experts_few.py",
        "token = pair // TOP_K",
        "token = pair // (TOP_K + 1)",
        "few",
    ),
    Defect(
        "down: choices past the last one count",
        "experts_few.py",
        "share = tl.load(weights + pair, mask=turn < TOP_K, other=0.0",
        "share = tl.load(weights + pair, mask=turn < TOP_K + 1, other=0.0",
        "few",
    ),
    Defect(
        "down: the residual is missing",
        "experts_few.py",
        "result += tl.load(residual + at, mask=column < COLUMNS, other=0.0).to(tl.float32)",
        "result += tl.load(residual + at, mask=column < COLUMNS, other=0.0).to(tl.float32) * 0.0",
        "few",
    ),
    Defect(
        "down: large activations saturate",
        "experts_few.py",
        "most = tl.max(tl.abs(whole), axis=1)",
        "most = tl.max(tl.abs(whole), axis=1) * 0.25",
        "few",
        interpreted=False,  # in the interpreter, quantised values do not saturate
    ),
    Defect(
        "dot: only the first choice of all is computed",
        "experts_few.py",
        "first = tl.min(tl.min(tl.where(same, pair, ROWS * TOP_K), axis=1), axis=0)",
        "first = tl.min(tl.min(tl.where(same, pair, 0), axis=1), axis=0)",
        "few",
    ),
    Defect(
        "dot: the last choice of each token is left out",
        "experts_few.py",
        "there = (token < tokens)[:, None] & (turn < TOP_K)[None, :]",
        "there = (token < tokens)[:, None] & (turn < TOP_K - 1)[None, :]",
        "few",
    ),
    Defect(
        "up, dot: a result is stored in the first choice of its token",
        "experts_few.py",
        "to = out + pair.to(tl.int64)[None, :] * COLUMNS + column[:, None]",
        "to = out + (pair // TOP_K * TOP_K).to(tl.int64)[None, :] * COLUMNS + column[:, None]",
        "few",
    ),
    Defect(
        "down, dot: results are not weighted",
        "experts_few.py",
        "acc = acc * tl.load(weights + pair, mask=takes, other=0.0)[None, :]",
        "acc = acc * 1.0",
        "few",
    ),
    Defect(
        "down, dot: the counters of tiles are not reset",
        "experts_few.py",
        "tl.store(arrived + tile, 0)",
        "tl.store(arrived + tile, 1)",
        "few or bit",
    ),
    Defect(
        "down, dot: the last program does not wait for the others",
        "experts_few.py",
        'scope="gpu") == programs - 1:',
        'scope="gpu") == 0:',
        "few",
    ),
]

_EXPERTS_MANY = [
    Defect(
        "the sort: a block does not leave space for earlier blocks",
        "experts_many.py",
        "earlier += tl.sum(tl.where((block < tl.program_id(0))[:, None], count, 0), axis=0)",
        "earlier += tl.sum(tl.where((block < 0)[:, None], count, 0), axis=0)",
        "sorted",
    ),
    Defect(
        "the sort: every expert begins at zero",
        "experts_many.py",
        "place += tl.gather(ends - totals + earlier, expert, 0)",
        "place += tl.gather(ends * 0 + earlier, expert, 0)",
        "sorted",
    ),
    Defect(
        "grouped: an expert's second tile is its first",
        "experts_many.py",
        "tl.where(this, begin - (group_ends - groups) * ROWS, 0), axis=0) + group * ROWS",
        "tl.where(this, begin, 0), axis=0)",
        "many",
    ),
    Defect(
        "grouped: an expert that ends a tile has the next tile",
        "experts_many.py",
        "expert = tl.sum((group_ends <= group).to(tl.int32), axis=0)",
        "expert = tl.sum((group_ends < group).to(tl.int32), axis=0)",
        "many",
    ),
    Defect(
        "grouped: the last choice of an expert is not stored",
        "experts_many.py",
        "inside = (column < COLUMNS)[:, None] & (place <= last)[None, :]",
        "inside = (column < COLUMNS)[:, None] & (place < last)[None, :]",
        "many",
    ),
    Defect(
        "grouped: up reads the row of the choice",
        "experts_many.py",
        "source = choice // TOP_K if UP else tl.minimum(place, last)",
        "source = choice // 1 if UP else tl.minimum(place, last)",
        "many",
    ),
    Defect(
        "grouped: the weights' scales are missing",
        "experts_many.py",
        "acc = acc * tl.load(x_scale + source)[None, :] * tl.load(weight_scale + weight_row)[:, None]",
        "acc = acc * tl.load(x_scale + source)[None, :]",
        "many",
    ),
    Defect(
        "the sum: every choice has the first one's weight",
        "experts_many.py",
        "total += result.to(tl.float32) * tl.load(weights + choice)",
        "total += result.to(tl.float32) * tl.load(weights + token * TOP_K)",
        "many",
    ),
]

EXPERTS = [*_EXPERTS_ROUTE, *_EXPERTS_FEW, *_EXPERTS_MANY]
