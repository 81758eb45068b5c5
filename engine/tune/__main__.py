"""`python -m engine.tune`: measure which kernel is fastest for each linear layer of a decoder, and write the
results to this GPU's table.

    python -m engine.tune --config FOLDER              # matrices in the model's dtype
    python -m engine.tune --config FOLDER --fp8 --rows 1 8 16
    python -m engine.tune --config FOLDER --both --again --json tune.json
    python -m engine.tune --config FOLDER --both --whole-layer --tried tune.json

FOLDER contains the model's config.json, either from a checkpoint or written for a public model shape (see
docs/kernels.md). The tuner times Appliance's own kernels and those of cuBLAS in decoder layers without
attention. The layers run in CUDA graphs, and their weights are not in the L2 cache. The fastest kernel's
result is checked against the reference implementation, and the kernel is added to the table
(kernels/tuned/<gpu>.json, or --out). Existing entries are kept unless --again is given.

--whole-layer refines the table by coordinate descent over whole layers, including attention. The search
starts from the table's plans, from the rule-based plans, and from a plan that uses the `tiles` kernel for
every linear. It changes one linear's plan at a time and keeps the change if the whole layer becomes at least
0.3 % faster.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from engine.build import read_served
from engine.config import CheckpointError, UnsupportedError
from engine.replica_model import ReplicaModel
from engine.tune import tuning
from engine.tune.writing import compile_launches, write_table
from kernels import compiling
from kernels.triton.linear_table import Table, TableError, load_table, read_table, table_path
from kernels.tune.candidates import BUCKETS
from kernels.tune.shortlist import read_tried
from kernels.writable import UnwritableError, check_writable


def main() -> int:
    """Tune every given model. Returns 1 if a model or a file cannot be used. The table is written after each
    row count, so that an interrupted run keeps its results."""
    arguments = _arguments()
    try:
        models = [
            read_served(
                folder,
                fp8=fp8,
                kv_fp8=fp8 and arguments.whole_layer,
                tensor_parallel_size=arguments.tensor_parallel,
            )
            for folder in arguments.config
            for fp8 in arguments.dtypes
        ]
        for served in models if arguments.whole_layer else []:
            served.config.resolve_length(arguments.context)
        gpu = compiling.this_gpu()
        path = arguments.out or table_path(gpu.name)
        check_writable("--out", path)
        check_writable("--json", arguments.json)
        table = read_table(path) if path.exists() else Table(gpu.name)
        if arguments.whole_layer and not path.exists():
            table = load_table(gpu.name, gpu.shared_bytes)
    except (CheckpointError, UnsupportedError, compiling.GpuError, TableError, UnwritableError) as error:
        print(error, file=sys.stderr)
        return 1
    began = time.perf_counter()
    tune = _descend if arguments.whole_layer else _search
    raw = tune(arguments, models, replace(table, shared_bytes=gpu.shared_bytes), path, gpu)
    print(f"{path}: {len(raw)} entries measured in {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def _search(
    arguments: argparse.Namespace,
    models: list[ReplicaModel],
    table: Table,
    path: Path,
    gpu: compiling.GpuModel,
) -> list[dict[str, Any]]:
    known = Table() if arguments.again else table
    compile_launches(gpu, lambda: tuning.launch_all(models, arguments.rows, known, gpu))
    raw: list[dict[str, Any]] = []
    with torch.inference_mode():
        for served in models:
            for found in tuning.search_linears(served, arguments.rows, known, _report, gpu):
                for one in found:
                    table = table.with_entry(one.product, one.rows, one.entry)
                    raw.append(one.raw)
                known = known if arguments.again else table
                _write(path, table, gpu, arguments.json, raw)
    return raw


def _descend(
    arguments: argparse.Namespace,
    models: list[ReplicaModel],
    table: Table,
    path: Path,
    gpu: compiling.GpuModel,
) -> list[dict[str, Any]]:
    chosen = tuning.Descent(arguments.context, arguments.most, arguments.tried)
    compile_launches(gpu, lambda: tuning.launch_descents(models, arguments.rows, table, chosen, gpu))
    raw: list[dict[str, Any]] = []
    print(tuning.DESCENT_HEADER)
    with torch.inference_mode():
        for served in models:
            for found, measured in tuning.descend(served, arguments.rows, table, chosen, _report, gpu):
                table = found
                raw.append(measured)
                _write(path, table, gpu, arguments.json, raw)
    return raw


def _write(path: Path, table: Table, gpu: compiling.GpuModel, json_path: Path | None, raw: list[Any]) -> None:
    write_table(path, table, gpu)
    if json_path:
        json_path.write_text(json.dumps(raw, indent=1) + "\n")


def _report(line: str) -> None:
    print(line, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, nargs="+", required=True, help="folders that contain a config.json"
    )
    parser.add_argument(
        "--fp8", action="store_true", help="tune matrices in e4m3 instead of the model's dtype"
    )
    parser.add_argument("--both", action="store_true", help="tune matrices in both dtypes")
    parser.add_argument("--rows", type=int, nargs="+", help="row counts to measure")
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=1,
        help="number of ranks; the matrix shapes of one rank are tuned (%(default)s)",
    )
    parser.add_argument(
        "--again", action="store_true", help="remeasure entries that are already in the table"
    )
    parser.add_argument("--out", type=Path, help="table to update (default: kernels/tuned/<gpu>.json)")
    parser.add_argument("--json", type=Path, help="write the measurements to this file")
    parser.add_argument(
        "--whole-layer", action="store_true", help="refine the table by measuring whole layers"
    )
    parser.add_argument(
        "--context",
        type=int,
        default=640,
        help="with --whole-layer: length of each sequence in tokens (%(default)s)",
    )
    parser.add_argument(
        "--most",
        type=int,
        default=10,
        help="with --whole-layer: number of plans to try for each linear (%(default)s)",
    )
    parser.add_argument(
        "--tried",
        type=Path,
        help="with --whole-layer: try the fastest plans from the --json file of an earlier run",
    )
    arguments = parser.parse_args()
    arguments.dtypes = [False, True] if arguments.both else [arguments.fp8]
    default = [rows for rows in BUCKETS if rows <= 64] if arguments.whole_layer else list(BUCKETS)
    arguments.rows = arguments.rows or default
    if wrong := [rows for rows in arguments.rows if not 1 <= rows <= BUCKETS[-1]]:
        parser.error(f"--rows contains {wrong[0]}; use numbers from 1 to {BUCKETS[-1]}")
    try:
        arguments.tried = read_tried(arguments.tried) if arguments.tried else {}
    except ValueError as error:
        parser.error(str(error))
    return arguments


if __name__ == "__main__":
    sys.exit(main())
