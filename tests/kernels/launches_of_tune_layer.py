"""Runs scripts/tune_layer.py with a GPU that is made up: prints, as JSON, what it launched that it had not
compiled, and what it did to the table. A process of its own, as `launches_of_serving`.

Layers run on meta tensors. One takes 100 µs, and 10 less by tiles of 128 rows of gate_up's weight, of which
the table that it begins with knows nothing, whatever ships.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from kernels import compiling
from kernels.triton import linear_plans
from kernels.triton.linear_table import PlanEntry, Product, Table, load_table, read_table
from kernels.tune import layers, search

GPU = compiling.Gpu.of("NVIDIA H200", 90)
PATH = Path(__file__).parents[2] / "scripts" / "tune_layer.py"
META = torch.device("meta")
ROWS = (1, 8)


def table_before() -> Table:
    """What ships, but gate_up goes by the rules."""
    table, product = load_table(GPU.name), Product(torch.bfloat16, 28672, 4096)
    for rows in ROWS:
        rule = linear_plans.choose(rows, product.n, product.k, product.dtype)
        table = table.with_entry(product, rows, PlanEntry(rule, 99.0, 99.0))
    return table


def load() -> Any:
    spec = importlib.util.spec_from_file_location("tune_layer", PATH)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    return script


class Graphs:
    """A capture runs what it is given, and notes how long its layers take."""

    plans: dict[str, Any]
    """By which layers go now."""

    def capture(self, run: Callable[[], object], before: Callable[[], object]) -> float:
        before()
        run()
        plan = Graphs.plans["gate_up"]
        return 12 * (90.0 if plan.form == "tiles" and plan.block_n == 128 else 100.0)

    def microseconds(self, captured: Sequence[float], order: Sequence[int]) -> list[float]:
        return [captured[index] for index in order]


def main() -> None:
    script = load()
    compiled: list[compiling.Job] = []
    go = script.DecodeLayers.go

    def noted(self: Any, plans: Any, *others: Any) -> Any:
        Graphs.plans = {**self.shipped_plans(), **plans}
        return go(self, plans, *others)

    def compile_launched(target: Any, launch: Callable[[], object]) -> None:
        with torch.inference_mode():
            compiled.extend(compiling.record(target, launch))

    def chain(run: Callable[[], object]) -> float:
        run()
        return 100.0

    with contextlib.ExitStack() as stack, tempfile.TemporaryDirectory() as name:
        out = Path(name) / "table.json"
        for where, what, instead in (
            (compiling, "this_gpu", lambda: GPU),
            (script, "compile_launched", compile_launched),
            (script, "Graphs", Graphs),
            (script, "load_table", lambda *_: table_before()),
            (script.DecodeLayers, "go", noted),
            (script, "difference", lambda *_: 0.0),
            (script, "CUDA", META),
            (search, "is_right", lambda *_: True),
            (layers, "graph_microseconds", chain),
            (sys, "argv", ["tune_layer.py", "--rows", *map(str, ROWS), "--out", str(out)]),
        ):
            stack.enter_context(mock.patch.object(where, what, instead))
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        launched = compiling.record(GPU.target, script.main)
        table = read_table(out)
    known = {(job.name, job.specialisation) for job in compiled}
    entries = {
        (str(product), rows): entry
        for product, all_of in table.products.items()
        for rows, entry in all_of.items()
    }
    old = {
        (str(one), rows): entry
        for one, all_of in table_before().products.items()
        for rows, entry in all_of.items()
    }
    print(
        json.dumps(
            {
                "late": [job.name for job in launched if (job.name, job.specialisation) not in known],
                "launched": len(launched),
                "changed": [key for key, entry in entries.items() if entry.plan != old[key].plan],
                "judged": sum(entry.layer_us == 90.0 != old[key].layer_us for key, entry in entries.items()),
                "kept_128": all(entries[key] == old[key] for key in old if key[1] not in ROWS),
                "printed": printed.getvalue(),
            }
        )
    )


if __name__ == "__main__":
    main()
