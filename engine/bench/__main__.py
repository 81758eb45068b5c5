"""`python -m engine.bench`: random weights in a public shape, the workloads by name, ours beside the limit.

    python -m engine.bench --shape llama-3.1-8b
    python -m engine.bench --shape llama-3.1-8b b1_decode prefill --runs 3 --json out.json

Of steps that decode and of those that compute prompts ("mixed") there are the number, the mean time and the
part of it in which the device waited for the host, in the run whose figure is printed; "most" is that part in
the run where it was most.

Needs torch, numpy and msgspec, and triton on a GPU; no service, no downloads.
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

from engine.bench.limits import ceilings, limit
from engine.bench.start import FAILURES, add_options, start
from engine.bench.table import HEADS, line, median_run
from engine.bench.workloads import WORKLOADS, run
from engine.messages import ReplicaInfo
from kernels.writable import UnwritableError, check_writable


def main() -> int:
    """Run the chosen workloads; a table on standard output, raw figures with --json. 1 where the engine
    cannot be started, or the file cannot be written."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as scratch:
        chosen = {name: WORKLOADS[name] for name in arguments.workloads or WORKLOADS}
        began = time.perf_counter()
        try:
            check_writable("--json", arguments.json)
            engine = start(arguments, Path(scratch), chosen)
        except (UnwritableError, *FAILURES) as error:
            print(error, file=sys.stderr)
            return 1
        info = engine.info
        start_s = time.perf_counter() - began
        print(f"{arguments.model or arguments.shape}: {_describe(info, start_s)}", flush=True)
        device = ceilings(info.devices[0])
        print(HEADS)
        results: dict[str, Any] = {"info": msgspec.structs.asdict(info), "start_s": start_s, "workloads": {}}
        for name, workload in chosen.items():
            warm = replace(workload, output_tokens=min(workload.output_tokens, 4))
            run(engine, warm, seed=-1)  # nothing compiles while the clock runs
            runs = [run(engine, workload, seed) for seed in range(arguments.runs)]
            best = None
            if device is not None:
                best = limit(engine.runner.config, workload, device, info.weights, info.kv_dtype)
            print(line(name, workload, runs, best), flush=True)
            results["workloads"][name] = {
                "figure": median_run(workload, runs).figure,
                "unit": workload.unit,
                "limit": best,
                "runs": [asdict(one) for one in runs],
            }
            if arguments.json:  # as it grows: a run may be cut short
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
        engine.close()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of: {', '.join(WORKLOADS)}")
    add_options(parser)
    parser.add_argument(
        "--runs", type=int, default=3, help="the one with the median figure counts (%(default)s)"
    )
    parser.add_argument("--json", type=Path, help="raw figures into this file")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}; there are: {', '.join(WORKLOADS)}")
    if arguments.runs < 1:
        parser.error(f"--runs is {arguments.runs}; at least 1 is needed")
    return arguments


def _describe(info: ReplicaInfo, start_s: float) -> str:
    gib = 2**30
    return (
        f"{info.dtype} (weights {info.weights}, KV {info.kv_dtype}) on {info.devices[0]}, "
        f"ready in {start_s:.1f} s; weights {info.weight_bytes / gib:.1f} GiB, "
        f"KV {info.kv_bytes / gib:.1f} in {info.kv_blocks} blocks, "
        f"all {info.used_bytes / gib:.1f}, predicted {info.predicted_bytes / gib:.1f}"
    )


if __name__ == "__main__":
    sys.exit(main())
