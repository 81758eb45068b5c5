"""The search: each product's plans in turn while the others keep theirs, then the best of each together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any

import torch

from kernels.compiling import Gpu
from kernels.dimensions import Dimensions
from kernels.triton import linear_plans
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import PlanEntry, Product, Table
from kernels.tune.candidates import candidates
from kernels.tune.descent import Choice
from kernels.tune.layers import Head, Layers

MOST_ERROR = 1e-2
"""‖out − ref‖ / ‖ref‖ of a plan that may win. FP8 products of several rows have 4e-3."""

_FINALISTS = 3
"""Plans of a product that are timed again beside the winners of the others."""

_ROUNDS = 2
"""Times that what counts is measured."""

_NOISE = 0.002
"""By which two measurements of the same differ."""

Report = Callable[[str], None]
Microseconds = Callable[[GemmPlan | None], float]
Timed = list[tuple[GemmPlan | None, float]]
"""Plans (None: the library) and microseconds, fastest first."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a search found for one product and number of rows."""

    product: Product
    rows: int
    entry: PlanEntry
    raw: dict[str, Any]


def launch_all(models: Sequence[Dimensions], buckets: Sequence[int], known: Table, gpu: Gpu) -> None:
    """Launch every kernel that `search` will on a GPU, on meta tensors (`compiling.record`)."""
    meta = torch.device("meta")
    for dimensions in models:
        layers = Layers(dimensions, meta, pdl=gpu.pdl)
        head = None if dimensions.fp8 else Head(dimensions, meta, pdl=gpu.pdl)
        for rows in buckets:
            products = layers.products().values()
            layers.set_rows(rows)
            for product in products if _unknown(known, products, rows) else ():
                for plan in _tried(product, rows, gpu.hopper):
                    layers.launch(_table({product: plan}, rows))
            if head is not None and _unknown(known, [head.product], rows):
                head.set_rows(rows)
                for plan in _tried(head.product, rows, gpu.hopper):
                    head.launch(_table({head.product: plan}, rows))


def search(
    dimensions: Dimensions,
    buckets: Sequence[int],
    known: Table,
    device: torch.device,
    report: Report,
    gpu: Gpu,
) -> Iterator[list[Measured]]:
    """The best plans of a model's products, some at a time: for each number of rows that `known` lacks.
    `report` gets what a person reads. gpu: what the device is."""
    dtype = "fp8" if dimensions.fp8 else dimensions.dtype
    report(f"{dtype} hidden {dimensions.hidden} intermediate {dimensions.rank_intermediate}")
    report("rows: µs of a layer by the rules, the library, the winners; of each product: won, library, plan")
    layers = Layers(dimensions, device, pdl=gpu.pdl)
    for rows in buckets:
        if _unknown(known, layers.products().values(), rows):
            layers.set_rows(rows)
            yield _search_layer(layers, rows, known, report, gpu.hopper)
    del layers
    if not dimensions.fp8:  # The output matrix is in the model's dtype either way.
        head = Head(dimensions, device, pdl=gpu.pdl)
        for rows in buckets:
            if _unknown(known, [head.product], rows):
                head.set_rows(rows)
                yield [_search_head(head, rows, report, gpu.hopper)]


def _search_layer(layers: Layers, rows: int, known: Table, report: Report, hopper: bool) -> list[Measured]:
    products = layers.products()
    rules = {name: linear_plans.choose(rows, one.n, one.k, one.dtype) for name, one in products.items()}
    # What is known stays; a shape that two models share is measured once.
    entries = {name: known.products.get(one, {}).get(rows) for name, one in products.items()}
    base = {name: rules[name] if entry is None else entry.plan for name, entry in entries.items()}
    searched = [name for name, entry in entries.items() if entry is None]

    def beside(others: dict[str, GemmPlan | None], name: str) -> Microseconds:
        return lambda plan: _microseconds(layers, {**others, name: plan}, rows)

    timings = {name: _time(_tried(products[name], rows, hopper), beside(base, name)) for name in searched}
    best = base | {name: timed[0][0] for name, timed in timings.items()}
    for name, timed in timings.items():
        right = (plan for plan, _ in timed if is_right(layers, name, plan, rows))
        finalists = list(dict.fromkeys([*islice(right, _FINALISTS), rules[name]]))
        best[name] = _prefer(rules[name], _time(finalists, beside(best, name), _ROUNDS))
    found = []
    for name, (entry, without_us) in figures(layers, best, searched, rows).items():
        raw = _raw(name, products[name], rows, entry, timings[name], without_us)
        found.append(Measured(products[name], rows, entry, raw))
    totals = [_least(layers, plans, rows) for plans in (rules, dict.fromkeys(rules), best)]
    report(f"{rows:4}: " + " ".join(f"{total:6.1f}" for total in totals))
    for one in found:
        report(f"      {_line(one)}")
    return found


def figures(
    layers: Layers, plans: Choice, names: Iterable[str], rows: int
) -> dict[str, tuple[PlanEntry, float]]:
    """What each of some products adds to a layer that goes by `plans`, and the layer without it."""
    found = {}
    layer_us = _least(layers, plans, rows)
    for name in names:
        without_us = _least(layers, plans, rows, name)
        library_us = layer_us if plans[name] is None else _least(layers, {**plans, name: None}, rows)
        found[name] = PlanEntry(plans[name], layer_us - without_us, library_us - without_us), without_us
    return found


def is_right(layers: Layers, name: str, plan: GemmPlan | None, rows: int) -> bool:
    """Whether a product's results are, as `_is_right` says. Raises what a launch raises."""
    table = table_of(layers, {name: plan}, rows)
    return _is_right(lambda _, count: layers.error(name, table, count), plan, rows)


def table_of(layers: Layers, plans: Choice, rows: int) -> Table:
    """By which a layer goes by `plans`."""
    products = layers.products()
    return _table({products[name]: plan for name, plan in plans.items()}, rows)


def _microseconds(layers: Layers, plans: Choice, rows: int, without: str | None = None) -> float:
    return layers.microseconds(table_of(layers, plans, rows), without)


def _least(layers: Layers, plans: Choice, rows: int, without: str | None = None) -> float:
    return min(_microseconds(layers, plans, rows, without) for _ in range(_ROUNDS))


def _search_head(head: Head, rows: int, report: Report, hopper: bool) -> Measured:
    def us(plan: GemmPlan | None) -> float:
        return head.microseconds(_table({head.product: plan}, rows))

    def error(plan: GemmPlan | None, count: int) -> float:
        return head.error(_table({head.product: plan}, rows), count)

    timed = _time(_tried(head.product, rows, hopper), us)
    library = next(time for plan, time in timed if plan is None)
    best, time = next((plan, time) for plan, time in timed if _is_right(error, plan, rows))
    entry = PlanEntry(best, time, library)
    found = Measured(head.product, rows, entry, _raw("lm_head", head.product, rows, entry, timed, 0.0))
    report(f"{rows:4}: {_line(found)}")
    return found


def _unknown(known: Table, products: Iterable[Product], rows: int) -> bool:
    return any(rows not in known.products.get(product, {}) for product in products)


def _tried(product: Product, rows: int, hopper: bool) -> list[GemmPlan | None]:
    """The library, what the rules say, and the candidates."""
    rule = linear_plans.choose(rows, product.n, product.k, product.dtype)
    plans = [None, rule, *candidates(product, rows, hopper)]
    return list(dict.fromkeys(plans))


def _time(plans: Sequence[GemmPlan | None], us: Microseconds, rounds: int = 1) -> Timed:
    """The least of some rounds. Plans that do not start on this GPU are left out; the library must."""
    timed: dict[GemmPlan | None, float] = {}
    for plan in [plan for _ in range(rounds) for plan in plans]:
        try:
            timed[plan] = min(us(plan), timed.get(plan, math.inf))
        except Exception:
            if plan is None:
                raise
    return sorted(timed.items(), key=lambda one: one[1])


def _prefer(plan: GemmPlan | None, timed: Timed) -> GemmPlan | None:
    """The fastest, or `plan` where that is as fast as can be told: tables then change for a reason."""
    return plan if dict(timed).get(plan, math.inf) <= timed[0][1] * (1 + _NOISE) else timed[0][0]


def _is_right(error: Callable[[GemmPlan | None, int], float], plan: GemmPlan | None, rows: int) -> bool:
    """For the most rows that the plan is for, and for fewer. The library is what it is."""
    return plan is None or all(error(plan, count) < MOST_ERROR for count in {rows, rows // 2 + 1})


def _table(plans: dict[Product, GemmPlan | None], rows: int) -> Table:
    table = Table()
    for product, plan in plans.items():
        table = table.with_entry(product, rows, PlanEntry(plan, 0.0, 0.0))
    return table


def _line(one: Measured) -> str:
    return f"{one.product!s:28} {one.entry.us:6.1f} {one.entry.library_us:6.1f}  {plan_text(one.entry.plan)}"


def _raw(
    name: str, product: Product, rows: int, entry: PlanEntry, timed: Timed, without_us: float
) -> dict[str, Any]:
    return {
        "product": name,
        "shape": str(product),
        "rows": rows,
        "won": plan_text(entry.plan),
        "us": round(entry.us, 2),
        "library_us": round(entry.library_us, 2),
        "layer_without_us": round(without_us, 2),
        "tried_layer_us": {plan_text(plan): round(time, 2) for plan, time in timed},
    }


def plan_text(plan: GemmPlan | None) -> str:
    """Form, rows, block_n, block_k, warps, stages, split."""
    return "library" if plan is None else " ".join(str(getattr(plan, one.name)) for one in fields(plan))
