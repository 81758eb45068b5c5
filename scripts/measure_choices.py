"""Tells which kernels a GPU's library picks for a decoder's products, by the number of rows, and which of
them no number in `engine.sizing.product_ladder` meets: those would be loaded while somebody waits.

    python scripts/measure_choices.py OUT.json
    python scripts/measure_choices.py OUT.json --shape qwen3-8b --step 8

Random weights in bf16 and FP8; numbers of rows up to 8192 (1024 of the output matrix), every --step and all
of the ladder. Only products that our tables leave to the library count.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from engine.bench.shapes import SHAPES, write_config
from engine.sizing import product_ladder
from kernels import Activation, Fp8Activation, Fp8Weight, Stream, Weight, compiling
from kernels.cuda import CudaOps
from kernels.dimensions import read_dimensions
from kernels.reference import quantise_fp8
from kernels.triton.linear_table import Table, load_table

MOST = 8192
_SPARE_MARKS = 64
"""Before the first that counts: a recording may lose its first kernels."""


def main() -> None:
    arguments = _arguments()
    with tempfile.TemporaryDirectory() as scratch:
        products = read_dimensions(write_config(arguments.shape, Path(scratch))).products
    gpu = compiling.this_gpu()
    table, results = load_table(gpu.name), []
    ops = CudaOps(table=table, pdl=gpu.pdl)
    ladder = set(product_ladder(MOST))
    print(f"{'':6}{'product':10}{'kernels':>8}{'by ladder':>10}  first rows of the others")
    for dtype in ("bf16", "fp8"):
        for name, (outputs, inputs) in products.items():
            if dtype == "fp8" and name == "lm_head":
                continue
            weight = _weight(outputs, inputs, dtype)
            most = 1024 if name == "lm_head" else MOST
            rows = sorted({*range(1, MOST + 1, arguments.step), *ladder})
            rows = [count for count in rows if count <= most and _is_librarys(table, count, weight)]
            picked = dict(zip(rows, _picked(ops, weight, rows, name in ("o", "down")), strict=True))
            met = {kernel for count, kernel in picked.items() if count in ladder}
            first: dict[str, int] = {}
            for count, kernel in picked.items():
                if kernel not in met:
                    first.setdefault(kernel, count)
            print(
                f"{dtype:6}{name:10}{len(set(picked.values())):8}{len(met):10}  "
                f"{' '.join(map(str, first.values()))}",
                flush=True,
            )
            results.append({"dtype": dtype, "product": name, "kernels": picked, "not_by_ladder": first})
            made = {"device": gpu.name, "torch": torch.__version__, "results": results}
            arguments.out.write_text(json.dumps(made, indent=1) + "\n")


def _weight(outputs: int, inputs: int, dtype: str) -> Weight:
    weight = torch.randn((outputs, inputs), device="cuda", dtype=torch.bfloat16) / 64
    if dtype == "bf16":
        return weight
    values, scales = quantise_fp8(weight)
    return Fp8Weight(values, scales.squeeze(1))


def _is_librarys(table: Table, rows: int, weight: Weight) -> bool:
    matrix = weight.values if isinstance(weight, Fp8Weight) else weight
    outputs, inputs = matrix.shape
    return table.choose(rows, outputs, inputs, matrix.dtype) is None


def _picked(ops: CudaOps, weight: Weight, rows: list[int], adds: bool) -> list[str]:
    """The kernels of each product, joined where there are several. adds: it is added to a residual stream."""
    outputs, inputs = (weight.values if isinstance(weight, Fp8Weight) else weight).shape
    x = torch.randn(rows[-1], inputs, device="cuda", dtype=torch.bfloat16)
    quantised = Fp8Activation(*quantise_fp8(x), x.dtype) if isinstance(weight, Fp8Weight) else None
    stream = torch.zeros(rows[-1], outputs if adds else 1, device="cuda", dtype=torch.bfloat16)
    mark = torch.zeros(1, device="cuda")

    def run(count: int) -> None:
        some: Activation = x[:count]
        if quantised is not None:
            some = Fp8Activation(quantised.values[:count], quantised.scales[:count], x.dtype)
        if adds:
            ops.linear_add(some, weight, None, Stream(stream[:count]), None)
        else:
            ops.linear(some, weight, None)

    run(rows[0])  # workspaces are made at the first
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recording:
        for _ in range(_SPARE_MARKS):
            mark.fill_(1.0)
        for count in rows:
            mark.fill_(1.0)  # stands before each product
            run(count)
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "trace.json"
        recording.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    return by_mark(events)[-len(rows) :]


def by_mark(events: list[dict[str, Any]]) -> list[str]:
    """Of a Chrome trace, the kernels behind each mark."""
    found: list[list[str]] = []
    kernels = [event for event in events if event.get("cat") == "kernel"]
    for event in sorted(kernels, key=lambda event: event["ts"]):
        if "FillFunctor<float>" in event["name"]:
            found.append([])
        elif found:
            found[-1].append(event["name"])
    return [" + ".join(names) for names in found]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--step", type=int, default=8)
    return parser.parse_args()


if __name__ == "__main__":
    main()
