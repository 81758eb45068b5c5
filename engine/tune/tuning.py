"""Defines the tuner's two searches for a model's kernel plans and enumerates the kernels that they launch.
`search_linears` tries every candidate plan of each linear, in a chain of layers without attention. `descend`
starts from the resulting table and tries a few candidates in whole layers with attention.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.replica_model import ReplicaModel
from engine.tune.chain import HeadChain, LayerChain
from kernels.compiling import GpuModel
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import Product, Table
from kernels.tune import descent
from kernels.tune.descent import Choice
from kernels.tune.graphs import Graphs
from kernels.tune.search import (
    Measured,
    Report,
    check_table,
    is_known,
    is_right,
    measure_entries,
    plan_text,
    search,
    table_of,
    tried_plans,
)
from kernels.tune.shortlist import Tried, covering, shortlist, starts

_CUDA = torch.device("cuda")
_META = torch.device("meta")
_COMPARED_LAYERS = 12
"""Number of layers per CUDA graph in a descent. It is small because a descent captures hundreds of graphs."""

Options = dict[Product, list[GemmPlan | None]]


# ── linears one by one ──────────────────────────────────────────────────────────────────────────────


def search_linears(
    served: ReplicaModel, buckets: Sequence[int], known: Table, report: Report, gpu: GpuModel
) -> Iterator[list[Measured]]:
    """Find the fastest plans for a model's linears, for each row count in `buckets` that is missing from
    `known`. Yields the results for a few linears at a time.

    Progress lines are passed to `report`. `gpu` is the GPU on which the plans are measured.
    """
    report(f"{_kind(served)} hidden {served.config.hidden_size}")
    report(
        "rows: µs per layer with rule-based plans, library, fastest plans; per linear: µs, library's µs, plan"
    )
    for chain in _chains(served, _CUDA, gpu):
        for rows in buckets:
            if not is_known(known, chain.products, rows):
                chain.set_rows(rows)
                yield search(chain, known, report, gpu.hopper)


def launch_all(models: Sequence[ReplicaModel], buckets: Sequence[int], known: Table, gpu: GpuModel) -> None:
    """Launch every kernel of `search_linears` on meta tensors."""
    with torch.inference_mode():
        for served in models:
            for chain in _chains(served, _META, gpu):
                for rows in buckets:
                    if is_known(known, chain.products, rows):
                        continue
                    chain.set_rows(rows)
                    for product in chain.products:
                        for plan in tried_plans(product, rows, gpu.hopper):
                            _launch(chain, table_of({product: plan}, rows))
                            _launch(chain, check_table(chain, product, plan, gpu.hopper))


def _launch(chain: LayerChain | HeadChain, table: Table) -> None:
    chain.use(table)
    chain.run_few()


def _chains(served: ReplicaModel, device: torch.device, gpu: GpuModel) -> Iterator[LayerChain | HeadChain]:
    """Yield the chains one by one, so that only one chain's weights are in memory at a time."""
    layers = LayerChain(served, device, gpu)
    layers.set_rows(1)
    yield layers
    del layers
    if not served.fp8:  # the output matrix is the same for both dtypes
        yield HeadChain(served, device, gpu)


# ── coordinate descent over whole layers ────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Descent:
    """Parameters of a coordinate descent over whole layers."""

    context: int
    """Length of each sequence in tokens."""
    most: int
    """Number of plans to try per linear."""
    tried: Tried
    """Fastest plans found by `search_linears`."""


def descend(
    served: ReplicaModel, buckets: Sequence[int], table: Table, chosen: Descent, report: Report, gpu: GpuModel
) -> Iterator[tuple[Table, dict[str, Any]]]:
    """Refine the table's plans by coordinate descent over whole layers. For each row count, yield the updated
    table and the measurements."""
    layers = LayerChain(served, _CUDA, gpu, chosen.context)
    linears = LayerChain(served, _CUDA, gpu)
    for rows in buckets:
        layers.set_rows(rows)
        linears.set_rows(rows)
        began = time.perf_counter()
        begun, options = _without_wrong(linears, *_plan_descent(linears, table, chosen, gpu), gpu, report)
        best, us, before = descent.search(begun, options, _Timer(layers))
        for product, (entry, _) in measure_entries(linears, best, options).items():
            table = table.with_entry(product, rows, replace(entry, layer_us=us))
        raw: dict[str, Any] = {"dtype": _kind(served), "rows": rows}
        raw |= {"before_us": round(before, 2), "us": round(us, 2)}
        raw["differs"] = _difference(layers, begun[0], best)
        raw["plans"] = {str(product): plan_text(plan) for product, plan in best.items()}
        raw["s"] = round(time.perf_counter() - began, 1)
        kept = {str(product) for product, plan in best.items() if plan == begun[0][product]}
        report(_line(raw, kept))
        yield table, raw


def launch_descents(
    models: Sequence[ReplicaModel], buckets: Sequence[int], table: Table, chosen: Descent, gpu: GpuModel
) -> None:
    """Launch every kernel of `descend` on meta tensors."""
    with torch.inference_mode():
        for served in models:
            layers = LayerChain(served, _META, gpu, chosen.context)
            linears = LayerChain(served, _META, gpu)
            for rows in buckets:
                layers.set_rows(rows)
                linears.set_rows(rows)
                begun, options = _plan_descent(linears, table, chosen, gpu)
                for choice in [*begun, dict.fromkeys(options), *covering(options)]:
                    for chain in (layers, linears):
                        _launch(chain, table_of(choice, rows))
                for product, plans in options.items():
                    for plan in {*plans, *(choice[product] for choice in begun)}:
                        _launch(linears, check_table(linears, product, plan, gpu.hopper))


def _plan_descent(
    layers: LayerChain, table: Table, chosen: Descent, gpu: GpuModel
) -> tuple[list[Choice], Options]:
    """Return a descent's starting points, and the candidate plans for each linear."""
    rows = layers.rows
    shipped = {one: table.choose(rows, one.n, one.k, one.dtype) for one in layers.products}
    begun = starts(shipped, rows, gpu.hopper)
    options = {
        product: shortlist(
            product, rows, gpu.hopper, [one[product] for one in begun], chosen.tried, chosen.most
        )
        for product in layers.products
    }
    return begun, options


def _without_wrong(
    layers: LayerChain, begun: list[Choice], options: Options, gpu: GpuModel, report: Report
) -> tuple[list[Choice], Options]:
    """Remove plans that fail to run or give incorrect results, but keep all plans from the table."""
    wrong = set()
    for product in options:
        for plan in {*options[product], *(choice[product] for choice in begun)}:
            try:
                right = is_right(layers, product, plan, gpu.hopper)
            except Exception as error:
                report(f"{product} {layers.rows}: {plan_text(plan)} fails: {str(error)[:200]}")
                right = False
            if not right:
                wrong.add((product, plan))
    kept = {one: [plan for plan in options[one] if (one, plan) not in wrong] for one in options}
    return [begun[0], *(choice for choice in begun[1:] if not wrong.intersection(choice.items()))], kept


class _Timer:
    """Measures how fast layers run with different plans. Implements `descent.Compare`."""

    def __init__(self, layers: LayerChain) -> None:
        self._layers, self._graphs = layers, Graphs()

    def __call__(self, choices: Sequence[Choice]) -> list[float]:
        captured, where, failure = [], [], None
        count = min(_COMPARED_LAYERS, len(self._layers))
        for index, choice in enumerate(choices):
            try:
                self._layers.use(table_of(choice, self._layers.rows))
                graph = self._graphs.capture(lambda: self._layers.run(count), self._layers.run_few)
            except Exception as error:
                failure = error
                continue
            captured.append(graph)
            where.append(index)
        if failure is not None and not captured:
            raise failure
        times = [math.inf] * len(choices)
        medians = descent.race(lambda order: self._graphs.microseconds(captured, order), len(captured))
        for index, us in zip(where, medians, strict=True):
            times[index] = us / count
        return times


def _difference(layers: LayerChain, first: Choice, second: Choice) -> float:
    """Return the relative difference ‖b − a‖ / ‖a‖ between hidden states a and b, computed with different
    plans."""
    hidden = []
    for choice in (first, second):
        layers.use(table_of(choice, layers.rows))
        hidden.append(layers.run_few().float())
    return float((hidden[1] - hidden[0]).norm() / hidden[0].norm())


def _kind(served: ReplicaModel) -> str:
    return "fp8" if served.fp8 else served.dtype


def _line(raw: dict[str, Any], kept: set[str]) -> str:
    plans = ", ".join(
        f"{product}: {text}{' (=)' * (product in kept)}" for product, text in raw["plans"].items()
    )
    return (
        f"{raw['dtype']} {raw['rows']:3}: {raw['before_us']:6.2f} → {raw['us']:6.2f} ±{raw['differs']:.0e} "
        f"{raw['s']} s; {plans}"
    )


DESCENT_HEADER = """dtype rows: OLD → NEW ±DIFFERENCE SEARCH s; linear: PLAN, …
  OLD, NEW    µs per layer with the table's plans and with the new plans
  DIFFERENCE  relative difference between the hidden states computed with the old and with the new plans
  SEARCH      duration of the search in seconds
  PLAN        form rows block_n block_k warps stages split; (=) marks a plan that has not changed"""
