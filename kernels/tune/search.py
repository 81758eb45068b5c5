"""Searches for each GEMM's fastest plan. The search first varies one GEMM's plan at a time, then times all
GEMMs' best plans together. Plans are timed in a chain: a sequence of decoder operations, defined by the
implementation of `Chain`. The search covers only the GEMMs that look up their plan in the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from typing import Any, Protocol

from kernels.triton import linear_plans
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import PlanEntry, Product, Table
from kernels.tune.candidates import candidates
from kernels.tune.descent import Choice

MAX_ERROR = 1e-2
"""Maximum accepted relative error ‖out − ref‖ / ‖ref‖ of a plan's result. FP8 GEMMs with several rows reach
4e-3."""

_FINALISTS = 3
"""Number of plans per GEMM that are timed again, together with the other GEMMs' fastest plans."""

_ROUNDS = 2
"""Number of times that each final measurement is repeated. The shortest time is used."""

_NOISE = 0.002
"""Expected relative difference between two measurements of the same plan."""

Report = Callable[[str], None]
Microseconds = Callable[[GemmPlan | None], float]
Timed = list[tuple[GemmPlan | None, float]]
"""Plans and their times in microseconds, fastest first. None stands for the library (cuBLAS)."""


class Chain(Protocol):
    """A sequence of operations that are timed together. The caller sets the number of rows."""

    rows: int
    products: list[Product]
    """The GEMMs that look up their plan in the table, starting with those whose results are added to the
    residual."""

    def microseconds(self, table: Table, without: Product | None = None) -> float:
        """Return one layer's time, in microseconds, with the plans of `table`. If `without` is given, that
        GEMM's operations are omitted. Exceptions from launches propagate."""

    def error(self, table: Table, rows: int) -> float:
        """Return the largest relative error ‖out − ref‖ / ‖ref‖ of any operation on `rows` rows with the
        plans of `table`. ref is the result of the reference implementation. Returns NaN if a result contains
        NaN. Exceptions from launches propagate."""


@dataclass(frozen=True, slots=True)
class Measured:
    """The result of the search for one GEMM and one row count."""

    product: Product
    rows: int
    entry: PlanEntry
    raw: dict[str, Any]


def search(chain: Chain, known: Table, report: Report, hopper: bool) -> list[Measured]:
    """Return the best plans for the chain's GEMMs that have no entry in `known`. Progress lines are passed to
    `report`."""
    rows = chain.rows
    rules = rule_plans(chain.products, rows)
    # Keep known entries, so that a shape that occurs in two models is measured only once.
    entries = {product: known.products.get(product, {}).get(rows) for product in chain.products}
    base = {product: rules[product] if entry is None else entry.plan for product, entry in entries.items()}
    searched = [product for product, entry in entries.items() if entry is None]

    def beside(others: Choice, product: Product) -> Microseconds:
        return lambda plan: _microseconds(chain, {**others, product: plan})

    timings = {
        product: _time(tried_plans(product, rows, hopper), beside(base, product)) for product in searched
    }
    best = base | {product: timed[0][0] for product, timed in timings.items()}
    for product, timed in timings.items():
        right = (plan for plan, _ in timed if is_right(chain, product, plan, hopper))
        finalists = list(dict.fromkeys([*islice(right, _FINALISTS), rules[product]]))
        best[product] = _prefer(rules[product], _time(finalists, beside(best, product), _ROUNDS))
    found = []
    for product, (entry, without_us) in measure_entries(chain, best, searched).items():
        found.append(Measured(product, rows, entry, _raw(product, rows, entry, timings[product], without_us)))
    totals = [_least(chain, plans) for plans in (rules, dict.fromkeys(rules), best)]
    report(f"{rows:4}: " + " ".join(f"{total:6.1f}" for total in totals))
    for one in found:
        report(f"      {_line(one)}")
    return found


def measure_entries(
    chain: Chain, plans: Choice, products: Iterable[Product]
) -> dict[Product, tuple[PlanEntry, float]]:
    """For each GEMM in `products`, return its table entry and the layer's time without that GEMM, in
    microseconds. The entry contains the time that the GEMM adds to a layer with `plans`."""
    found = {}
    layer_us = _least(chain, plans)
    for product in products:
        without_us = _least(chain, plans, product) if len(chain.products) > 1 else 0.0
        library_us = layer_us if plans[product] is None else _least(chain, {**plans, product: None})
        found[product] = PlanEntry(plans[product], layer_us - without_us, library_us - without_us), without_us
    return found


def is_right(chain: Chain, product: Product, plan: GemmPlan | None, hopper: bool) -> bool:
    """Return whether a plan's results match the reference implementation for the chain's row count and for
    about half as many rows. The library's GEMM is not checked. Exceptions from launches propagate."""
    if plan is None:
        return True
    table = check_table(chain, product, plan, hopper)
    return all(chain.error(table, rows) < MAX_ERROR for rows in {chain.rows, chain.rows // 2 + 1})


def check_table(chain: Chain, product: Product, plan: GemmPlan | None, hopper: bool) -> Table:
    """Return a table for checking one plan. The other GEMMs' plans share norms, so that shared norms are
    checked too."""
    others = {one: _sharing_plan(one, chain.rows, hopper) for one in chain.products}
    return table_of({**others, product: plan}, chain.rows)


def rule_plans(products: Iterable[Product], rows: int) -> dict[Product, GemmPlan | None]:
    """Return each GEMM's rule-based plan, which is used if the table has no entry."""
    return {one: linear_plans.choose(rows, one.n, one.k, one.dtype) for one in products}


def tried_plans(product: Product, rows: int, hopper: bool) -> list[GemmPlan | None]:
    """Return the plans tried by `search`: the library's GEMM, the rule-based plan and the candidates."""
    rule = linear_plans.choose(rows, product.n, product.k, product.dtype)
    return list(dict.fromkeys([None, rule, *candidates(product, rows, hopper)]))


def table_of(plans: Mapping[Product, GemmPlan | None], rows: int) -> Table:
    """Return a table with these plans for up to `rows` rows."""
    table = Table()
    for product, plan in plans.items():
        table = table.with_entry(product, rows, PlanEntry(plan, 0.0, 0.0))
    return table


def is_known(known: Table, products: Iterable[Product], rows: int) -> bool:
    """Return whether a table has an entry for every GEMM at exactly this row count."""
    return all(rows in known.products.get(product, {}) for product in products)


def plan_text(plan: GemmPlan | None) -> str:
    """Return a plan as text, with the fields form, rows, block_n, block_k, warps, stages and split."""
    return "library" if plan is None else " ".join(str(getattr(plan, one.name)) for one in fields(plan))


def _sharing_plan(product: Product, rows: int, hopper: bool) -> GemmPlan | None:
    """Return a plan that can share a norm with another GEMM, or None if this GPU has none."""
    rule = linear_plans.choose(max(rows, 8), product.n, product.k, product.dtype)
    if rule is not None and rule.tiled:
        return rule
    return next((plan for plan in candidates(product, rows, hopper) if plan.tiled and hopper), None)


def _microseconds(chain: Chain, plans: Choice, without: Product | None = None) -> float:
    return chain.microseconds(table_of(plans, chain.rows), without)


def _least(chain: Chain, plans: Choice, without: Product | None = None) -> float:
    return min(_microseconds(chain, plans, without) for _ in range(_ROUNDS))


def _time(plans: Sequence[GemmPlan | None], us: Microseconds, rounds: int = 1) -> Timed:
    """Return each plan's minimum time over several rounds, except for plans that fail to launch on this GPU.
    The library's GEMM must launch, so its errors propagate."""
    timed: dict[GemmPlan | None, float] = {}
    for plan in [plan for _ in range(rounds) for plan in plans]:
        try:
            timed[plan] = min(us(plan), timed.get(plan, math.inf))
        except Exception:
            if plan is None:
                raise
    return sorted(timed.items(), key=lambda one: one[1])


def _prefer(plan: GemmPlan | None, timed: Timed) -> GemmPlan | None:
    """Return the fastest plan, or `plan` if the difference is within measurement noise, so that the table
    changes only for a real gain."""
    return plan if dict(timed).get(plan, math.inf) <= timed[0][1] * (1 + _NOISE) else timed[0][0]


def _line(one: Measured) -> str:
    return f"{one.product!s:28} {one.entry.us:6.1f} {one.entry.library_us:6.1f}  {plan_text(one.entry.plan)}"


def _raw(product: Product, rows: int, entry: PlanEntry, timed: Timed, without_us: float) -> dict[str, Any]:
    return {
        "shape": str(product),
        "rows": rows,
        "won": plan_text(entry.plan),
        "us": round(entry.us, 2),
        "library_us": round(entry.library_us, 2),
        "layer_without_us": round(without_us, 2),
        "tried_layer_us": {plan_text(plan): round(time, 2) for plan, time in timed},
    }
