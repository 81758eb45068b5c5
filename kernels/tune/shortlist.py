"""The few plans of a linear that a descent over whole layers tries."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import Product
from kernels.tune.candidates import candidates
from kernels.tune.descent import Choice
from kernels.tune.search import rule_plans

Tried = Mapping[tuple[str, int], Sequence[GemmPlan | None]]
"""The plans that a search tried, fastest first, by the linear (as text) and the rows."""

_PROGRAMS = 200
"""The `tiles` plans that won on an H200 had 128 to 256 programs: each has a multiprocessor or half of one."""
_LIBRARY_FROM = 32
"""The number of rows from which the library may win."""


def read_tried(path: Path) -> Tried:
    """Read the plans that were tried from a file written by `python -m engine.tune --json`. Raises ValueError
    if the file has another format."""
    try:
        return {
            (one["shape"], one["rows"]): [_parse(text) for text in one["tried_layer_us"]]
            for one in json.loads(path.read_text())
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not a file of python -m engine.tune --json: {error!r}") from None


def starts(shipped: Choice, rows: int, hopper: bool) -> list[Choice]:
    """Return the starting points of a descent: the shipped table's plans, the rules' plans, and plans of the
    form `tiles` for every linear."""
    tiles = {one: next(iter(_tiles(one, rows, hopper)), plan) for one, plan in shipped.items()}
    found: list[Choice] = []
    for one in (shipped, rule_plans(shipped, rows), tiles):
        if one not in found:
            found.append(one)
    return found


def shortlist(
    product: Product, rows: int, hopper: bool, known: Iterable[GemmPlan | None], tried: Tried, most: int
) -> list[GemmPlan | None]:
    """Return `known` and further plans, `most` in all: those that a search found fastest or, if it did not
    try this linear, `tiles` that fill the GPU about once and the plans most like the first known one."""
    known, tiles = list(known), _tiles(product, rows, hopper)
    others = [one for one in candidates(product, rows, hopper) if one.form != "tiles"]
    if (str(product), rows) in tried:
        usable = {*tiles, *others, None}
        ranked = [plan for plan in tried[str(product), rows] if plan in usable]
        # Candidates that the search did not know come first.
        new = [plan for plan in tiles if plan not in ranked]
        return _some([*known, *new[:2], *ranked], most)
    like = next((plan for plan in known if plan is not None and plan.form != "tiles"), None)
    if like is not None:
        others.sort(key=lambda plan: _differences(plan, like))
    library = [None] if rows >= _LIBRARY_FROM else []
    half = most // 2 if rows > 1 else 2
    return _some([*known, *library, *tiles[:half], *others, *tiles[half:]], most)


def covering(options: Mapping[Product, Sequence[GemmPlan | None]]) -> Iterator[Choice]:
    """Yield choices that between them launch every kernel that any choice launches. Which kernel a linear
    launches depends on its plan, and on what the linear in front of it leaves of a norm that they share."""
    left = {product: _sharers(plans) for product, plans in options.items()}
    for block_n in dict.fromkeys(block_n for sharers in left.values() for block_n in sharers):
        others = {one: sharers.get(block_n, options[one][0]) for one, sharers in left.items()}
        for product, plans in options.items():
            for plan in plans:
                yield {**others, product: plan}


def _sharers(plans: Iterable[GemmPlan | None]) -> dict[int | None, GemmPlan | None]:
    """Return one plan for each thing that some plans may leave of a shared norm: sums of squares of `block_n`
    outputs, or nothing (None)."""
    return {plan.block_n if plan is not None and plan.tiled else None: plan for plan in plans}


def _some(plans: Iterable[GemmPlan | None], most: int) -> list[GemmPlan | None]:
    return list(dict.fromkeys(plans))[:most]


def _tiles(product: Product, rows: int, hopper: bool) -> list[GemmPlan]:
    """Return the candidates of the form `tiles`, the smallest first, and of these the ones that fill the GPU
    best. One row has some too: a tile of 8 rows shares norms with its neighbours, which plans of one row do
    not."""

    def order(plan: GemmPlan) -> tuple[int, float, int, int]:
        programs = -(-product.n // plan.block_n) * plan.split
        return plan.rows, abs(math.log2(programs / _PROGRAMS)), plan.block_n, -plan.block_k

    plans = candidates(product, max(rows, 8), hopper)
    return sorted((plan for plan in plans if plan.form == "tiles"), key=order)


def _differences(plan: GemmPlan, other: GemmPlan) -> int:
    return sum(getattr(plan, one.name) != getattr(other, one.name) for one in fields(plan))


def _parse(text: str) -> GemmPlan | None:
    """Undoes `search.plan_text`."""
    if text == "library":
        return None
    form, *numbers = text.split()
    return GemmPlan(form, *map(int, numbers))  # type: ignore[arg-type]
