"""Runs both searches of `python -m engine.tune` on a simulated GPU. Prints, as JSON, the kernels that were
launched without having been compiled, and the changes to the table of plans. Runs in a separate process, like
`tests.engine.launches_of_serving`.

Layers run on meta tensors. The first search chooses the library for every linear. In the second search, the
descent, the simulated time of a layer is 90 µs if gate_up uses `tiles` of 128 weight rows, and otherwise 100
µs. The initial table does not contain the faster plan.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from engine.bench.shapes import SHAPES
from engine.tune import __main__ as command
from engine.tune import chain, operations, tuning
from kernels import compiling
from kernels.triton import linear_plans
from kernels.triton.linear_table import PlanEntry, Product, Table, load_table, read_table

GPU = compiling.GpuModel.of("NVIDIA H200", 90)
META = torch.device("meta")
GATE_UP = Product(torch.bfloat16, 28672, 4096)
ROWS = (1, 8)


def table_before() -> Table:
    """Return a copy of the shipped table in which the gate_up entries are replaced by the rule-based
    plans."""
    table = load_table(GPU.name)
    for rows in ROWS:
        rule = linear_plans.choose(rows, GATE_UP.n, GATE_UP.k, GATE_UP.dtype)
        table = table.with_entry(GATE_UP, rows, PlanEntry(rule, 99.0, 99.0))
    return table


class Graphs:
    """Runs functions instead of capturing them in CUDA graphs, and returns simulated durations."""

    table: Table
    """The plans that the layers currently use."""

    def capture(self, run: Callable[[], object], before: Callable[[], object]) -> float:
        before()
        run()
        plans = [entry.plan for entry in Graphs.table.products.get(GATE_UP, {}).values()]
        tiles = any(plan and plan.form == "tiles" and plan.block_n == 128 for plan in plans[-1:])
        return 2 * (90.0 if tiles else 100.0)  # the time of two layers, in µs

    def microseconds(self, captured: Sequence[float], order: Sequence[int]) -> list[float]:
        return [captured[index] for index in order]


def run(*options: str) -> tuple[list[compiling.CompileJob], set[tuple[str, str]], str]:
    """Run the command. Return the kernels that it launched, the kernels that it compiled, and its output."""
    compiled: list[compiling.CompileJob] = []
    use = chain.LayerChain.use

    def noted(self: Any, table: Table, *others: Any) -> None:
        Graphs.table = table
        use(self, table, *others)

    def compile_launched(gpu: compiling.GpuModel, launch: Callable[[], object]) -> None:
        compiled.extend(compiling.record(GPU.target, launch))

    def time_chain(run: Callable[[], object]) -> float:
        run()
        return 100.0

    with contextlib.ExitStack() as stack:
        for where, name, instead in (
            (compiling, "this_gpu", lambda: GPU),
            (command, "compile_launches", compile_launched),
            (tuning, "_CUDA", META),
            (tuning, "Graphs", Graphs),
            (tuning, "_difference", lambda *_: 0.0),
            (chain.LayerChain, "use", noted),
            (operations.WatchedOps, "compare", lambda self, run: run() is None),
            (chain, "graph_microseconds", time_chain),
            (sys, "argv", ["engine.tune", *options]),
        ):
            stack.enter_context(mock.patch.object(where, name, instead))
        printed = stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        launched = compiling.record(GPU.target, command.main)
    return launched, {(job.name, job.specialisation) for job in compiled}, printed.getvalue()


def entries_of(table: Table) -> dict[tuple[str, int], PlanEntry]:
    return {
        (str(one), rows): entry
        for one, kernel_rows in table.products.items()
        for rows, entry in kernel_rows.items()
    }


def _sums(launched: list[compiling.CompileJob]) -> list[compiling.CompileJob]:
    """Return the kernels that add the parts of all ranks."""
    return [job for job in launched if job.name.endswith("._all_reduce_add")]


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(SHAPES["llama-3.1-8b"] | {"num_hidden_layers": 2}))
        first, second = folder / "first.json", folder / "second.json"
        second.write_text(table_before().to_json())
        options = ["--config", name, "--rows", *map(str, ROWS)]
        searched = run(*options, "--out", str(first), "--json", str(folder / "tried.json"))
        descended = run(
            *options, "--out", str(second), "--whole-layer", "--tried", str(folder / "tried.json")
        )
        ranks = ["--rows", "64", "--tensor-parallel", "4", "--whole-layer", "--most", "5"]
        of_a_rank = run("--config", name, *ranks, "--out", str(folder / "third.json"))
        found, refined = entries_of(read_table(first)), entries_of(read_table(second))
    old = entries_of(table_before())
    late = [
        job.name
        for launched, compiled, _ in (searched, descended, of_a_rank)
        for job in launched
        if (job.name, job.specialisation) not in compiled
    ]
    print(
        json.dumps(
            {
                "late": late,
                "launched": [len(searched[0]), len(descended[0])],
                "sums": [len(_sums(launched)) for launched, *_ in (searched, descended, of_a_rank)],
                "found": sorted(found),
                "changed": [key for key, entry in refined.items() if entry.plan != old[key].plan],
                "judged": sum(entry.layer_us == 90.0 != old[key].layer_us for key, entry in refined.items()),
                "kept_128": all(refined[key] == old[key] for key in old if key[1] not in ROWS),
                "printed": searched[2] + descended[2],
            }
        )
    )


if __name__ == "__main__":
    main()
