"""Selects a few plans per GEMM for the search over whole layers (`kernels.tune.descent`)."""

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
"""For each GEMM (as text) and row count, the plans that a search has tried, fastest first."""

_PROGRAMS = 200
"""Target number of programs for a `tiles` plan. The fastest plans on an H200 had 128 to 256 programs, which
is one or two per multiprocessor."""
_WIDTH = 256
"""Target width of a `tiles` plan's tile in bytes."""
_LIBRARY_FROM = 32
"""Minimum row count at which the library's GEMM may be the fastest."""


def read_tried(path: Path) -> Tried:
    """Read the tried plans from a file written by `python -m engine.tune --json`. Raises ValueError if the
    file has a different format."""
    try:
        return {
            (one["shape"], one["rows"]): [_parse(text) for text in one["tried_layer_us"]]
            for one in json.loads(path.read_text())
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: not written by python -m engine.tune --json: {error!r}") from None


def starts(shipped: Choice, rows: int, hopper: bool) -> list[Choice]:
    """Return the starting points of a descent: the shipped table's plans, the rule-based plans, and plans
    that use the `tiles` kernel for every GEMM."""
    tiles = {one: next(iter(_tiles(one, rows, hopper)), plan) for one, plan in shipped.items()}
    found: list[Choice] = []
    for one in (shipped, rule_plans(shipped, rows), tiles):
        if one not in found:
            found.append(one)
    return found


def shortlist(
    product: Product, rows: int, hopper: bool, known: Iterable[GemmPlan | None], tried: Tried, most: int
) -> list[GemmPlan | None]:
    """Return `known` and additional plans, up to `most` plans in total. If a search has timed plans for this
    GEMM, the fastest of them are added. Otherwise, the additional plans are those for the `tiles` kernel with
    about one wave of programs, and those most similar to a known plan.
    """
    known, tiles = list(known), _tiles(product, rows, hopper)
    others = [one for one in candidates(product, rows, hopper) if one.form != "tiles"]
    if (str(product), rows) in tried:
        usable = {*tiles, *others, None}
        ranked = [plan for plan in tried[str(product), rows] if plan in usable]
        # New candidates, which the search has not tried, precede the ranked ones.
        new = [plan for plan in tiles if plan not in ranked]
        return _some([*known, *new[:2], *ranked], most)
    like = next((plan for plan in known if plan is not None and plan.form != "tiles"), None)
    if like is not None:
        others.sort(key=lambda plan: _differences(plan, like))
    library = [None] if rows >= _LIBRARY_FROM else []
    half = most // 2 if rows > 1 else 2
    return _some([*known, *library, *tiles[:half], *others, *tiles[half:]], most)


def covering(options: Mapping[Product, Sequence[GemmPlan | None]]) -> Iterator[Choice]:
    """Yield plan combinations that together launch every kernel that any combination of these plans can
    launch. A GEMM's kernel depends on its own plan and on the shared norm that the previous GEMM may
    compute."""
    left = {product: _sharers(plans) for product, plans in options.items()}
    for block_n in dict.fromkeys(block_n for sharers in left.values() for block_n in sharers):
        others = {one: sharers.get(block_n, options[one][0]) for one, sharers in left.items()}
        for product, plans in options.items():
            for plan in plans:
                yield {**others, product: plan}


def _sharers(plans: Iterable[GemmPlan | None]) -> dict[int | None, GemmPlan | None]:
    """Return a dict with one plan for each kind of shared norm that these plans produce. Each key is a number
    of outputs per partial sum of squares (`block_n`), or None for plans that do not share a norm."""
    return {plan.block_n if plan is not None and plan.tiled else None: plan for plan in plans}


def _some(plans: Iterable[GemmPlan | None], most: int) -> list[GemmPlan | None]:
    return list(dict.fromkeys(plans))[:most]


def _tiles(product: Product, rows: int, hopper: bool) -> list[GemmPlan]:
    """Return the candidate plans for the `tiles` kernel, ordered by tile size and then by how well they fill
    the GPU. For a single row, they include plans with tiles of 8 rows: unlike one-row plans, these can share
    norms with adjacent GEMMs."""

    def order(plan: GemmPlan) -> tuple[int, float, int, float, int]:
        programs = -(-product.n // plan.block_n) * plan.split
        width = abs(math.log2(plan.block_k * product.dtype.itemsize / _WIDTH))
        return plan.rows, abs(math.log2(programs / _PROGRAMS)), plan.block_n, width, plan.stages

    plans = candidates(product, max(rows, 8), hopper)
    return sorted((plan for plan in plans if plan.form == "tiles"), key=order)


def _differences(plan: GemmPlan, other: GemmPlan) -> int:
    return sum(getattr(plan, one.name) != getattr(other, one.name) for one in fields(plan))


def _parse(text: str) -> GemmPlan | None:
    """Parse the text that `search.plan_text` returns."""
    if text == "library":
        return None
    form, *numbers = text.split()
    return GemmPlan(form, *map(int, numbers))  # type: ignore[arg-type]
