"""Times the products of a decoder's layer at the numbers of rows that steps of prompts have, by the library.

    python scripts/measure_prompts.py OUT.json
    python scripts/measure_prompts.py OUT.json --rows 4096 4224 8192 8448

Random weights of the llama-3.1-8b shape in bf16 and FP8, in CUDA graphs; medians of replays. A library cuts a
product into tiles, which run in waves over the multiprocessors: where the last wave is full, a row costs
least. Prints the microseconds of each product, and of all four a row.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from kernels import Fp8Activation, Fp8Weight, Weight, compiling
from kernels.cuda import CudaOps
from kernels.reference import quantise_fp8
from kernels.tune.graphs import graph_microseconds

WEIGHTS = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
ROWS = [2048, 2112, 2176, 3968, 4096, 4112, 4160, 4224, 4352, 4480, 6144, 6336, 8192, 8320, 8448, 8704]
TURNS = 8
"""Products in a graph: its start is then a small part."""


def measure(ops: CudaOps, weight: Weight, rows: int) -> float:
    """Microseconds of one product."""
    columns = (weight.values if isinstance(weight, Fp8Weight) else weight).shape[1]
    x: Any = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    if isinstance(weight, Fp8Weight):
        x = Fp8Activation(*quantise_fp8(x), x.dtype)

    def run() -> None:
        for _ in range(TURNS):
            ops.linear(x, weight, None)

    return graph_microseconds(run) / TURNS


def main() -> None:
    arguments = _arguments()
    ops, results = CudaOps(pdl=compiling.this_gpu().pdl), []
    for dtype in ("bf16", "fp8"):
        print(f"{dtype:6}{'rows':>6}" + "".join(f"{name:>10}" for name in WEIGHTS) + f"{'ns a row':>10}")
        weights: dict[str, Weight] = {}
        for name, shape in WEIGHTS.items():
            weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / 64
            if dtype == "fp8":
                values, scales = quantise_fp8(weight)
                weights[name] = Fp8Weight(values, scales.squeeze(1))
            else:
                weights[name] = weight
        for rows in arguments.rows:
            times = {name: round(measure(ops, weight, rows), 2) for name, weight in weights.items()}
            each = 1e3 * sum(times.values()) / rows
            print(f"{'':6}{rows:6}" + "".join(f"{us:10.1f}" for us in times.values()) + f"{each:10.2f}")
            results.append({"dtype": dtype, "rows": rows, "us": times, "ns_a_row": round(each, 2)})
            device = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            arguments.out.write_text(json.dumps(device | {"results": results}, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
