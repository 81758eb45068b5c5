"""`python -m engine.bench`: random weights in a public shape, the workloads by name, ours beside the limit.

    python -m engine.bench --shape llama-3.1-8b
    python -m engine.bench --shape llama-3.1-8b b1_decode prefill --runs 3 --json out.json

Needs torch, triton and msgspec; no service, no downloads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import msgspec

from engine.bench.limits import ceilings, limit
from engine.bench.start import FAILURES, add_options, start
from engine.bench.workloads import WORKLOADS, Measured, run
from engine.messages import ReplicaInfo


def main() -> int:
    """Run the chosen workloads; a table on standard output, raw figures with --json. 1 where the engine
    cannot be started."""
    arguments = _arguments()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as scratch:
        chosen = {name: WORKLOADS[name] for name in arguments.workloads or WORKLOADS}
        longest = max(workload.prompt_tokens + workload.output_tokens for workload in chosen.values())
        began = time.perf_counter()
        try:
            engine = start(arguments, Path(scratch), longest)
        except FAILURES as error:
            print(error, file=sys.stderr)
            return 1
        info = engine.info
        start_s = time.perf_counter() - began
        print(f"{arguments.model or arguments.shape}: {_describe(info, start_s)}", flush=True)
        device = ceilings(info.devices[0])
        print(
            f"{'workload':16}{'ours':>12}{'unit':>9}{'limit':>10}{'of it':>8}"
            f"{'steps: decode':>15}{'ms':>8}{'idle':>7}{'mixed':>7}{'ms':>8}{'idle':>7}"
        )
        results: dict[str, Any] = {"info": msgspec.structs.asdict(info), "start_s": start_s, "workloads": {}}
        for name, workload in chosen.items():
            warm = replace(workload, output_tokens=min(workload.output_tokens, 4))
            run(engine, warm, seed=-1)  # nothing compiles while the clock runs
            runs = [run(engine, workload, seed) for seed in range(arguments.runs)]
            figure = statistics.median(one.figure for one in runs)
            best = None
            if device is not None:
                best = limit(engine.runner.config, workload, device, info.weights, info.kv_dtype)
            _print_row(name, workload.unit, figure, best, workload.less_is_better, runs)
            results["workloads"][name] = {
                "figure": figure,
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
    parser.add_argument("--runs", type=int, default=3, help="the median of them counts (%(default)s)")
    parser.add_argument("--json", type=Path, help="raw figures into this file")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}; there are: {', '.join(WORKLOADS)}")
    if arguments.runs < 1:
        parser.error(f"--runs is {arguments.runs}; at least 1 is needed")
    return arguments


def _print_row(
    name: str, unit: str, figure: float, best: float | None, less_is_better: bool, runs: list[Measured]
) -> None:
    of_it = ""
    if best is not None:
        of_it = f"{100 * (best / figure if less_is_better else figure / best):.0f} %"
    run = runs[0]
    limit_text = "" if best is None else f"{best:,.0f}"
    print(
        f"{name:16}{figure:>12,.1f}{unit:>9}{limit_text:>10}{of_it:>8}"
        f"{run.decode.count:>15}{run.decode.ms:>8.2f}{100 * run.decode.idle_fraction:>6.1f}%"
        f"{run.mixed.count:>7}{run.mixed.ms:>8.2f}{100 * run.mixed.idle_fraction:>6.1f}%",
        flush=True,
    )


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
