"""Selects the few plans of each linear that a descent over whole layers tries."""

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
"""The plans that a search tried, the fastest first, by linear (as text) and number of rows."""

_PROGRAMS = 200
"""The `tiles` plans that won on an H200 had 128 to 256 programs: one or two per multiprocessor."""
_LIBRARY_FROM = 32
"""Number of rows from which the library may be fastest."""


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
    """Return the starting points of a descent: the shipped table's plans, the rule-based plans, and plans of
    the form `tiles` for every linear."""
    tiles = {one: next(iter(_tiles(one, rows, hopper)), plan) for one, plan in shipped.items()}
    found: list[Choice] = []
    for one in (shipped, rule_plans(shipped, rows), tiles):
        if one not in found:
            found.append(one)
    return found


def shortlist(
    product: Product, rows: int, hopper: bool, known: Iterable[GemmPlan | None], tried: Tried, most: int
) -> list[GemmPlan | None]:
    """Return `known` and further plans, `most` in total. The further plans are those that a search found
    fastest. If the search did not try this linear, they are `tiles` plans that fill the GPU about once, and
    the plans most similar to the first known one."""
    known, tiles = list(known), _tiles(product, rows, hopper)
    others = [one for one in candidates(product, rows, hopper) if one.form != "tiles"]
    if (str(product), rows) in tried:
        usable = {*tiles, *others, None}
        ranked = [plan for plan in tried[str(product), rows] if plan in usable]
        # Candidates that the search did not try come first.
        new = [plan for plan in tiles if plan not in ranked]
        return _some([*known, *new[:2], *ranked], most)
    like = next((plan for plan in known if plan is not None and plan.form != "tiles"), None)
    if like is not None:
        others.sort(key=lambda plan: _differences(plan, like))
    library = [None] if rows >= _LIBRARY_FROM else []
    half = most // 2 if rows > 1 else 2
    return _some([*known, *library, *tiles[:half], *others, *tiles[half:]], most)


def covering(options: Mapping[Product, Sequence[GemmPlan | None]]) -> Iterator[Choice]:
    """Yield choices that together launch every kernel that any choice launches. The kernel of a linear
    depends on its own plan, and on the shared norm that the previous linear leaves to it."""
    left = {product: _sharers(plans) for product, plans in options.items()}
    for block_n in dict.fromkeys(block_n for sharers in left.values() for block_n in sharers):
        others = {one: sharers.get(block_n, options[one][0]) for one, sharers in left.items()}
        for product, plans in options.items():
            for plan in plans:
                yield {**others, product: plan}


def _sharers(plans: Iterable[GemmPlan | None]) -> dict[int | None, GemmPlan | None]:
    """Return one plan for each state in which some plans may leave a shared norm: sums of squares over
    `block_n` outputs, or no norm (None)."""
    return {plan.block_n if plan is not None and plan.tiled else None: plan for plan in plans}


def _some(plans: Iterable[GemmPlan | None], most: int) -> list[GemmPlan | None]:
    return list(dict.fromkeys(plans))[:most]


def _tiles(product: Product, rows: int, hopper: bool) -> list[GemmPlan]:
    """Return the candidates of the form `tiles`: those with the smallest tile first, and among these the ones
    that fill the GPU best. For one row, tiles of 8 rows are included, because they can share norms with
    neighbouring linears, which plans for one row cannot."""

    def order(plan: GemmPlan) -> tuple[int, float, int, int]:
        programs = -(-product.n // plan.block_n) * plan.split
        return plan.rows, abs(math.log2(programs / _PROGRAMS)), plan.block_n, -plan.block_k

    plans = candidates(product, max(rows, 8), hopper)
    return sorted((plan for plan in plans if plan.form == "tiles"), key=order)


def _differences(plan: GemmPlan, other: GemmPlan) -> int:
    return sum(getattr(plan, one.name) != getattr(other, one.name) for one in fields(plan))


def _parse(text: str) -> GemmPlan | None:
    """Parse the result of `search.plan_text`."""
    if text == "library":
        return None
    form, *numbers = text.split()
    return GemmPlan(form, *map(int, numbers))  # type: ignore[arg-type]
