"""The few plans of a product that are worth the time of a whole layer."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from kernels.triton import linear_plans
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import Product
from kernels.tune.candidates import candidates
from kernels.tune.descent import Choice

Tried = Mapping[tuple[str, int], Sequence[GemmPlan | None]]
"""By product and rows, what a tuner tried, fastest first."""

_PROGRAMS = 200
"""The tiles that won on an H200 were 128 to 256 programs: each has a multiprocessor, or half of one."""
_LIBRARY_FROM = 32
"""Rows from which the library may win."""


def read_tried(path: Path) -> Tried:
    """Of what `python -m kernels.tune --json` wrote. Raises ValueError for a file that is not that."""
    try:
        return {
            (one["shape"], one["rows"]): [_parse(text) for text in one["tried_layer_us"]]
            for one in json.loads(path.read_text())
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: no figures of python -m kernels.tune --json: {error!r}") from None


def starts(products: Mapping[str, Product], rows: int, shipped: Choice, hopper: bool) -> list[Choice]:
    """Where descents begin: what ships, the rules, and tiles everywhere."""
    rules = {name: linear_plans.choose(rows, one.n, one.k, one.dtype) for name, one in products.items()}
    tiles = {name: next(iter(_tiles(one, rows, hopper)), shipped[name]) for name, one in products.items()}
    found: list[Choice] = []
    for one in (shipped, rules, tiles):
        if one not in found:
            found.append(one)
    return found


def shortlist(
    product: Product, rows: int, hopper: bool, known: Iterable[GemmPlan | None], tried: Tried, most: int
) -> list[GemmPlan | None]:
    """`known`, and as many more as make `most`: what a tuner found fastest or, where it tried nothing of the
    product, tiles that fill the GPU about once, and the plans most like the first that is known."""
    known, tiles = list(known), _tiles(product, rows, hopper)
    others = [one for one in candidates(product, rows, hopper) if one.form != "tiles"]
    if (str(product), rows) in tried:
        usable = {*tiles, *others, None}
        ranked = [plan for plan in tried[str(product), rows] if plan in usable]
        # Candidates of which the tuner did not know come first.
        new = [plan for plan in tiles if plan not in ranked]
        return _some([*known, *new[:2], *ranked], most)
    like = next((plan for plan in known if plan is not None and plan.form != "tiles"), None)
    if like is not None:
        others.sort(key=lambda plan: _differences(plan, like))
    library = [None] if rows >= _LIBRARY_FROM else []
    half = most // 2 if rows > 1 else 2
    return _some([*known, *library, *tiles[:half], *others, *tiles[half:]], most)


def covering(options: Mapping[str, Sequence[GemmPlan | None]]) -> Iterator[Choice]:
    """Choices that between them launch every kernel that any choice launches: each plan of a product that
    reads the residual stream, beside everything that those before it can leave of a norm."""
    left = {name: _sharers(options[name]) for name in ("o", "down")}
    most = max(len(plans) for plans in options.values())
    for index in range(most):
        yield {name: plans[index % len(plans)] for name, plans in options.items()}
        for beside in range(max(len(plans) for plans in left.values())):
            yield {
                "qkv": options["qkv"][index % len(options["qkv"])],
                "gate_up": options["gate_up"][index % len(options["gate_up"])],
                "o": left["o"][beside % len(left["o"])],
                "down": left["down"][beside % len(left["down"])],
            }


def _sharers(plans: Iterable[GemmPlan | None]) -> list[GemmPlan | None]:
    """One for each number of sums of squares that some plans leave; the library, which leaves none."""
    tiled = [plan for plan in plans if plan is not None and plan.tiled]
    return [None, *{plan.block_n: plan for plan in tiled}.values()]


def _some(plans: Iterable[GemmPlan | None], most: int) -> list[GemmPlan | None]:
    return list(dict.fromkeys(plans))[:most]


def _tiles(product: Product, rows: int, hopper: bool) -> list[GemmPlan]:
    """The smallest first, and of these the ones that fill the GPU best. Of one row too: a tile of 8 shares
    norms with its neighbours, which plans of one row do not."""

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
