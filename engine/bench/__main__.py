"""`python -m engine.bench`: run named workloads and print the results as fractions of the device's limit.

    python -m engine.bench --shape llama-3.1-8b
    python -m engine.bench --shape llama-3.1-8b b1_decode prefill --runs 3 --json out.json
    python -m engine.bench --shape llama-3.1-70b --tensor-parallel-size 4 --fp8 --kv-fp8

Unless --model is given, the model has random weights and the shape of a public model. The table shows the run
with the median result. For decode-only steps and for steps with prefill ("mixed"), it shows the step count,
the mean duration, and the fraction of time the device spent waiting for the host ("idle"). The "max" column
is the largest idle fraction of any run.

With several ranks, this process is rank 0 of a replica. The limit is computed from the bytes that one GPU
reads and the operations it performs; communication is ignored. A second line per workload shows the mean time
that rank 0 takes to encode and send a step's plan. For an MoE model on one rank, another line shows how many
distinct experts per layer a decode step reads, and how many the limit assumes.

The benchmark requires torch, numpy and msgspec, and triton on a GPU. It needs no running service and
downloads nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from engine.bench.limits import limit
from engine.bench.routing import count_experts
from engine.bench.start import FAILURES, add_options, devices_text, leave, started
from engine.bench.table import HEADING, line, median_run, plans_line
from engine.bench.workloads import WORKLOADS, EngineWorkload, run
from engine.ceilings import ceilings
from engine.generate import LocalEngine
from engine.messages import ReplicaInfo
from kernels.writable import UnwritableError, check_writable


def main() -> int:
    """Run the chosen workloads and print a table. Returns 1 if the engine cannot start, if a rank is lost, or
    if the --json file cannot be written."""
    arguments = _arguments()
    chosen = {name: WORKLOADS[name] for name in arguments.workloads or WORKLOADS}
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as scratch:
        began = time.perf_counter()
        try:
            check_writable("--json", arguments.json)
            with started(arguments, Path(scratch), chosen) as engine:
                _measure(engine, arguments, chosen, time.perf_counter() - began)
        except (UnwritableError, *FAILURES) as error:
            print(error, file=sys.stderr)
            return 1
    return 0


def _measure(
    engine: LocalEngine, arguments: argparse.Namespace, chosen: dict[str, EngineWorkload], start_s: float
) -> None:
    """Run the workloads, print the table, and write the --json file."""
    info = engine.info
    print(f"{arguments.model or arguments.shape}: {_describe(info, start_s)}", flush=True)
    device = ceilings(info.devices[0])
    print(HEADING)
    results: dict[str, Any] = {"info": msgspec.structs.asdict(info), "start_s": start_s, "workloads": {}}
    for name, workload in chosen.items():
        warm = replace(workload, output_tokens=min(workload.output_tokens, 4))
        run(engine, warm, seed=-1)  # compile the kernels before measuring
        runs = [run(engine, workload, seed) for seed in range(arguments.runs)]
        upper_bound = None
        if device is not None:
            config, ranks = engine.runner.config, info.tensor_parallel_size
            upper_bound = limit(config, workload, device, info.weights, info.kv_cache_dtype, ranks)
        print(line(name, workload, runs, upper_bound), flush=True)
        if info.tensor_parallel_size > 1:
            print(plans_line(workload, runs), flush=True)
        routing = count_experts(engine, workload)
        if routing is not None:
            print(routing.line(), flush=True)
        results["workloads"][name] = {
            "result": median_run(workload, runs).result,
            "unit": workload.unit,
            "limit": upper_bound,
            "experts": None if routing is None else asdict(routing),
            "runs": [asdict(one) for one in runs],
        }
        if arguments.json:  # write after each workload, in case the run is interrupted
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"one of {', '.join(WORKLOADS)}")
    add_options(parser)
    parser.add_argument(
        "--runs", type=int, default=3, help="runs per workload; the table shows the median (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="write the results of all runs to this file")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}; available: {', '.join(WORKLOADS)}")
    if arguments.runs < 1:
        parser.error(f"--runs is {arguments.runs}; it must be at least 1")
    return arguments


def _describe(info: ReplicaInfo, start_s: float) -> str:
    gib = 2**30
    share = ""
    if info.backend == "cuda":
        _, total = torch.cuda.mem_get_info()
        share = (
            f" ({(info.weight_bytes + info.kv_bytes) / (total * info.tensor_parallel_size):.1%} of GPU "
            "memory)"
        )
    return (
        f"{info.dtype} (weights {info.weights}, KV {info.kv_cache_dtype}) on {devices_text(info)}, ready in "
        f"{start_s:.1f} s; weights {info.weight_bytes / gib:.1f} GiB, KV {info.kv_bytes / gib:.1f} in "
        f"{info.kv_blocks} blocks{share}, total {info.used_bytes / gib:.1f}, predicted "
        f"{info.predicted_bytes / gib:.1f} ({info.predicted_bytes / info.used_bytes - 1:+.1%})"
    )


if __name__ == "__main__":
    leave(main())
