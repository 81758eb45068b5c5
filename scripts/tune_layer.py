"""Chooses the kernels of a decode layer's products by the time of the whole layer, and writes the table.

    python scripts/tune_layer.py --both --out nvidia-h200.json
    python scripts/tune_layer.py --rows 8 --json-of-tune tune.json --out nvidia-h200.json

`python -m kernels.tune` picks the plan of each product in a chain of products without attention. The plans of
a layer interact with each other and with attention, so this script times whole layers in CUDA graphs. It
descends from several starting points: the shipped table, the rules, tiles everywhere, and each --way. One
product's plan changes at a time, until a round gains less than 0.3 %. Replays of the candidates are
interleaved, so that clock drift favours none; every plan is checked against a float32 product first. A plan
that is 0.3 % faster than the table's replaces it. The output file is the shipped table with the new entries,
written after each result: copy it to kernels/tuned/.

A --way names plans as PRODUCT=FORM,ROWS,BLOCK_N,BLOCK_K,WARPS,STAGES,SPLIT or PRODUCT=library, for example
"o=tiles,r,64,256b,4,110k,2": r stands for the padded number of rows, 256b for the columns of 256 bytes, 110k
for the stages that fit into 110 KiB.

Of each entry that was judged here, layer_us is the layer's time, which chose; us and library_us are what
`kernels.tune` means by them, what the product adds to a chain of the layer's products. At the end of each
line stands what other attention configurations would give; tables do not hold those.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.bench.decode_layers import (
    META,
    DecodeLayers,
    add_options,
    chosen_dtypes,
    compile_launched,
    shape_folder,
)
from kernels import compiling
from kernels.triton.linear_plans import GemmPlan
from kernels.triton.linear_table import Table, load_table, problem
from kernels.tune import descent, search
from kernels.tune.descent import Choice
from kernels.tune.graphs import Graphs
from kernels.tune.layers import LAYER_PRODUCTS, Layers
from kernels.tune.shortlist import covering, read_tried, shortlist, starts

ORDER = ("o", "down", "qkv", "gate_up")
"""Those that write the residual stream first: whether the others may share a norm depends on them."""
SEARCHED = 12
"""Layers in a captured graph: few, since a search captures hundreds of graphs."""
LEAST_PAGES = (2, 4)
CUDA = torch.device("cuda")

Options = dict[str, list[GemmPlan | None]]


def plan_search(layers: DecodeLayers, arguments: Any, hopper: bool) -> tuple[list[Choice], Options]:
    """Where descents begin, and the plans of each product that are tried."""
    rows, products, shipped = layers.rows, layers.products(), layers.shipped_plans()
    begun = starts(products, rows, shipped, hopper)
    for way in arguments.way:
        plans = way.plans_for(rows, layers.dtype.itemsize)
        usable = {name for name, plan in plans.items() if not plan or not problem(plan, rows, products[name])}
        begun.append({**shipped, **{name: plans[name] for name in usable}})
    options = {}
    for name in ORDER:
        known = [choice[name] for choice in begun]
        options[name] = shortlist(products[name], rows, hopper, known, arguments.tried, arguments.most)
    return begun, options


def compile_all(folder: Path, arguments: Any, gpu: compiling.Gpu, table: Table) -> None:
    """Compile what the searches will launch."""

    def launch() -> None:
        for fp8 in arguments.fp8:
            layers = DecodeLayers(folder, fp8, arguments.context, META, table, pdl=gpu.pdl)
            products = Layers(layers.dimensions, META, pdl=gpu.pdl)
            for rows in arguments.rows:
                layers.set_rows(rows)
                products.set_rows(rows)
                for plans in (layers.shipped_plans(), dict.fromkeys(ORDER)):
                    products.launch(search.table_of(products, plans, rows))
                for choice in covering(plan_search(layers, arguments, gpu.hopper)[1]):
                    layers.go(choice)
                    layers.run()
                for pages in LEAST_PAGES:
                    layers.go({}, {"least_pages": pages})
                    layers.run()

    compile_launched(gpu.target, launch)


class Timer:
    """Compares layers that go different ways."""

    def __init__(self, layers: DecodeLayers) -> None:
        self._layers, self._graphs = layers, Graphs()

    def choices(self, choices: Sequence[Choice]) -> list[float]:
        """See `descent.Compare`."""
        return self._compare([(choice, {}) for choice in choices])

    def attention(self, choice: Choice, changes: Sequence[dict[str, int]]) -> list[float]:
        """With each of some changes of attention's configuration."""
        return self._compare([(choice, change) for change in changes])

    def _compare(self, ways: Sequence[tuple[Choice, dict[str, int]]]) -> list[float]:
        captured, where, failure = [], [], None
        for index, (choice, attention) in enumerate(ways):
            try:
                self._layers.go(choice, attention)
                graph = self._graphs.capture(lambda: self._layers.run(SEARCHED), lambda: self._layers.run(2))
            except Exception as error:
                failure = error
                continue
            captured.append(graph)
            where.append(index)
        if failure is not None and not captured:
            raise failure
        times = [math.inf] * len(ways)
        medians = descent.race(lambda order: self._graphs.microseconds(captured, order), len(captured))
        for index, us in zip(where, medians, strict=True):
            times[index] = us / SEARCHED
        return times


def drop_wrong(
    layers: Layers, rows: int, begun: list[Choice], options: Options
) -> tuple[list[Choice], Options]:
    """Without plans that do not run or whose results are not right. What ships stays."""
    wrong = set()
    for name, product in layers.products().items():
        for plan in {*options[name], *(choice[name] for choice in begun)}:
            try:
                right = search.is_right(layers, name, plan, rows)
            except Exception as error:
                print(f"{product} {rows}: {search.plan_text(plan)} fails: {str(error)[:200]}")
                right = False
            if not right:
                wrong.add((name, plan))
    kept = {name: [plan for plan in options[name] if (name, plan) not in wrong] for name in options}
    others = [choice for choice in begun[1:] if not wrong.intersection(choice.items())]
    return [begun[0], *others], kept


def tune(
    layers: DecodeLayers, products: Layers, arguments: Any, hopper: bool
) -> tuple[Table, dict[str, Any]]:
    """The table with what was found for the rows that are set, and the figures; prints them."""
    began = time.perf_counter()
    rows = layers.rows
    begun, options = drop_wrong(products, rows, *plan_search(layers, arguments, hopper))
    timer = Timer(layers)
    best, us, before = descent.search(begun, options, timer.choices)
    table = layers.shipped
    for name, (entry, _) in search.figures(products, best, ORDER, rows).items():
        table = table.with_entry(layers.products()[name], rows, replace(entry, layer_us=us))
    row: dict[str, Any] = {"dtype": layers.kind, "rows": rows}
    row |= {"before_us": round(before, 2), "us": round(us, 2), "of_limit": round(layers.limit_us() / us, 3)}
    row |= {"differs": difference(layers, begun[0], best), "plans": {}, "attention_us": {}}
    for name in LAYER_PRODUCTS:
        row["plans"][name] = search.plan_text(best[name])
    changes = attention_changes(layers)
    for change, changed in zip(changes, timer.attention(best, changes), strict=True):
        row["attention_us"][" ".join(f"{name}={value}" for name, value in change.items())] = round(changed, 2)
    row["s"] = round(time.perf_counter() - began, 1)
    print(_line(row, [name for name in ORDER if best[name] == begun[0][name]]), flush=True)
    return table, row


_HEADER = """dtype rows: µs of a layer by the table → by what was found, of the limit, ± of the hidden states
between the two, seconds of search; plans: form rows block_n block_k warps stages split, (=) as in the table;
µs with other configurations of attention, the first of which is the one that it has"""


def _line(row: dict[str, Any], kept: list[str]) -> str:
    plans = ", ".join(f"{name} {text}{' (=)' * (name in kept)}" for name, text in row["plans"].items())
    attention = ", ".join(f"{text} {us}" for text, us in row["attention_us"].items())
    return (
        f"{row['dtype']} {row['rows']:3}: {row['before_us']:6.2f} → {row['us']:6.2f} {row['of_limit']} "
        f"±{row['differs']:.0e} {row['s']} s; {plans}; attention {attention}"
    )


def difference(layers: DecodeLayers, first: Choice, second: Choice) -> float:
    """Of the hidden states that two ways leave, ‖b − a‖ / ‖a‖."""
    hidden = []
    for choice in (first, second):
        layers.go(choice)
        hidden.append(layers.run().float())
    return float((hidden[1] - hidden[0]).norm() / hidden[0].norm())


def attention_changes(layers: DecodeLayers) -> list[dict[str, int]]:
    """As it is (in words that change nothing), fewer and more pieces, and pieces that are longer."""
    items = layers.attention_config().items
    cut = items - layers.rows
    counts = dict.fromkeys((items, layers.rows + cut // 2, layers.rows + 2 * cut))
    return [*({"items": count} for count in counts), *({"least_pages": pages} for pages in LEAST_PAGES)]


def main() -> None:
    arguments = _arguments()
    with shape_folder(arguments.shape) as folder:
        try:
            gpu = compiling.this_gpu()
        except compiling.GpuError as error:
            raise SystemExit(str(error)) from None
        table = load_table(gpu.name, gpu.shared_bytes)
        compile_all(folder, arguments, gpu, table)
        found = []
        print(_HEADER)
        for fp8 in arguments.fp8:
            with torch.inference_mode():
                layers = DecodeLayers(folder, fp8, arguments.context, CUDA, table, pdl=gpu.pdl)
                products = Layers(layers.dimensions, CUDA, pdl=gpu.pdl)
                for rows in arguments.rows:
                    layers.set_rows(rows)
                    products.set_rows(rows)
                    layers.shipped, row = tune(layers, products, arguments, gpu.hopper)
                    table = layers.shipped
                    found.append(row)
                    arguments.out.write_text(table.to_json())
                    if arguments.json:
                        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
            del layers, products


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[1, 8, 16, 32, 64], help="entries of the table"
    )
    parser.add_argument(
        "--most", type=int, default=10, help="plans of a product that are tried (%(default)s)"
    )
    parser.add_argument("--json-of-tune", type=Path, help="prefer what kernels.tune --json found fastest")
    parser.add_argument("--out", type=Path, required=True, help="the table")
    parser.add_argument("--json", type=Path, help="figures into this file")
    arguments = parser.parse_args()
    arguments.fp8 = chosen_dtypes(arguments)
    try:
        arguments.tried = read_tried(arguments.json_of_tune) if arguments.json_of_tune else {}
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    main()
