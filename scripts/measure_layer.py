"""Times a decoder's layer as decode runs it, attention included, for some ways to run its kernels.

    python scripts/measure_layer.py --rows 8 64
    python scripts/measure_layer.py --rows 8 --fp8 --alone --way "" \\
        --way "o=tiles,r,64,256b,4,110k,2" --way "down=library attention.items=24"

A few layers of a public shape with random weights, more than the L2 holds, run one after another in a CUDA
graph by the decoder's own code; medians of replays. A way is what differs from the shipped tables: a
product's plan (form, rows, block_n, block_k, warps, stages, split; or "library"), fields of attention's
`DecodeConfig`, rope=apart: RoPE and cache write in a launch of their own, and norms=apart: so is every norm.
r stands for the rows, padded; 256b for the columns of so many bytes; 110k for the stages that fit into so
many KiB. Beside the time of a layer stand the limit (bytes of weights and cache, at the device's read
bandwidth) and by how much the hidden states differ from the first way's. With --alone, each product too, in a
chain of its own.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from engine.bench.decode_layers import (
    META,
    DecodeLayers,
    Way,
    add_options,
    chosen_dtypes,
    compile_launched,
    shape_folder,
)
from kernels import compiling
from kernels.triton.linear_table import Table, load_table
from kernels.tune.graphs import graph_microseconds
from kernels.tune.layers import LAYER_PRODUCTS


def compile_all(folder: Path, arguments: Any, gpu: compiling.Gpu, table: Table) -> None:
    """Compile what will be measured."""

    def launch() -> None:
        for fp8 in arguments.fp8:
            layers = DecodeLayers(folder, fp8, arguments.context, META, table, pdl=gpu.pdl)
            for rows in arguments.rows:
                layers.set_rows(rows)
                for way in arguments.way:
                    layers.go_as(way)
                    layers.run()

    compile_launched(gpu.target, launch)


def measure(layers: DecodeLayers, ways: list[Way], alone: bool) -> list[dict[str, object]]:
    """One row a way; prints it."""
    found, first = [], None
    for way in ways:
        layers.go_as(way)
        try:
            hidden = layers.run().float()
            us = graph_microseconds(layers.run) / len(layers)
        except Exception as error:
            print(f"{layers.kind} {layers.rows:3}  fails: {way.text}: {str(error)[:200]}")
            continue
        first = hidden if first is None else first
        row: dict[str, object] = {"dtype": layers.kind, "rows": layers.rows, "way": way.text}
        row |= {"us": round(us, 2), "of_limit": round(layers.limit_us() / us, 3)}
        row["differs"] = float(f"{float((hidden - first).norm() / first.norm()):.1e}")
        for name, chain in (layers.alone() if alone else {}).items():
            row[name] = round(graph_microseconds(chain) / len(layers), 2)
        found.append(row)
        products = " ".join(f"{name} {row[name]:5}" for name in LAYER_PRODUCTS if name in row)
        print(
            f"{layers.kind} {layers.rows:3} {us:7.2f} {row['of_limit']} {products} ±{row['differs']}  "
            f"{way.text}",
            flush=True,
        )
    return found


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
        print("dtype rows µs a layer, of the limit, [products alone,] ± against the first way, way")
        for fp8 in arguments.fp8:
            with torch.inference_mode():
                device = torch.device("cuda")
                layers = DecodeLayers(folder, fp8, arguments.context, device, table, pdl=gpu.pdl)
                for rows in arguments.rows:
                    layers.set_rows(rows)
                    found += measure(layers, arguments.way, arguments.alone)
            del layers
    if arguments.json:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": arguments.shape}
        arguments.json.write_text(json.dumps({**about, "results": found}, indent=1) + "\n")


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_options(parser)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--alone", action="store_true", help="each product too")
    parser.add_argument("--json", type=Path, help="raw figures into this file")
    arguments = parser.parse_args()
    arguments.fp8 = chosen_dtypes(arguments)
    arguments.way = arguments.way or [Way.parse("")]
    return arguments


if __name__ == "__main__":
    main()
