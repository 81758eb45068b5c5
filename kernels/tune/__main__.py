"""`python -m kernels.tune`: measure which kernel each product of a decoder's layer gets, and write the table.

    python -m kernels.tune --config FOLDER              # bf16 matrices
    python -m kernels.tune --config FOLDER --fp8 --rows 1 8 16

FOLDER has a model's config.json: a checkpoint, or a public shape (docs/kernels.md says how to write one).
Times plans of ours and the library's product inside whole layers, in CUDA graphs with PDL, with weights that
are not in cache; checks each winner against a product in float32; adds what won to the table of this GPU
(kernels/tuned/<gpu>.json, or --out). Shapes and rows that are there already are kept unless --again is given.
"""

from __future__ import annotations

import argparse
import datetime
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import triton

from kernels import compiling
from kernels.dimensions import DimensionsError, read_dimensions
from kernels.triton.linear_table import Table, TableError, read_table, table_path
from kernels.tune.candidates import BUCKETS
from kernels.tune.search import launch_all, search
from kernels.writable import UnwritableError, check_writable


def main() -> int:
    """Tune every given model; the table is written as it grows, so that a run may be cut short."""
    arguments = _arguments()
    try:
        models = [
            read_dimensions(folder, fp8=fp8, tensor_parallel=arguments.tensor_parallel)
            for folder in arguments.config
            for fp8 in arguments.dtypes
        ]
        gpu = compiling.this_gpu()
        path = arguments.out or table_path(gpu.name)
        check_writable("--out", path)
        check_writable("--json", arguments.json)
        table = read_table(path) if path.exists() else Table(gpu.name)
    except (DimensionsError, compiling.GpuError, TableError, UnwritableError) as error:
        print(error, file=sys.stderr)
        return 1
    began = time.perf_counter()
    known = Table() if arguments.again else table
    jobs = compiling.record(gpu.target, lambda: launch_all(models, arguments.rows, known, gpu))
    # Plans that the compiler refuses fail again when they are tried, and are passed over.
    failures = compiling.compile_jobs(gpu.target, jobs, compiling.default_processes())
    spent = time.perf_counter() - began
    print(f"{len(jobs)} kernels compiled in {spent:.0f} s, {len(failures)} failed", flush=True)

    raw: list[dict[str, Any]] = []
    for dimensions in models:
        for found in search(dimensions, arguments.rows, known, torch.device("cuda"), _report, gpu):
            for one in found:
                table = table.with_entry(one.product, one.rows, one.entry)
                raw.append(one.raw)
            known = known if arguments.again else table
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(Table(gpu.name, _about(), table.products).to_json())
            if arguments.json:
                arguments.json.write_text(json.dumps(raw, indent=1) + "\n")
    print(f"{path}: {len(raw)} entries measured in {time.perf_counter() - began:.0f} s", flush=True)
    return 0


def _about() -> dict[str, str]:
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return {"date": today, "torch": str(torch.__version__), "triton": triton.__version__}


def _report(line: str) -> None:
    print(line, flush=True)


def _arguments() -> Any:
    parser = argparse.ArgumentParser(
        prog="python -m kernels.tune",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, nargs="+", required=True, help="folders with a config.json")
    parser.add_argument("--fp8", action="store_true", help="e4m3 matrices instead of the model's dtype")
    parser.add_argument("--both", action="store_true", help="both dtypes")
    parser.add_argument("--rows", type=int, nargs="+", default=list(BUCKETS), help="default: %(default)s")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="the shapes of one of so many ranks")
    parser.add_argument("--again", action="store_true", help="measure what the table has as well")
    parser.add_argument("--out", type=Path, help="the table to add to; default: the one that ships")
    parser.add_argument("--json", type=Path, help="raw figures into this file")
    arguments = parser.parse_args()
    arguments.dtypes = [False, True] if arguments.both else [arguments.fp8]
    if wrong := [rows for rows in arguments.rows if not 1 <= rows <= BUCKETS[-1]]:
        parser.error(f"--rows has {wrong[0]}; numbers from 1 to {BUCKETS[-1]} are needed")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
