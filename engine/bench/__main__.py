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
from engine.bench.shapes import SHAPES, write_config
from engine.bench.workloads import WORKLOADS, Measured, run
from engine.config import DTYPE_BYTES
from engine.generate import LocalEngine
from engine.messages import ReplicaInfo, ReplicaSpec


def main() -> int:
    """Run the chosen workloads; a table on standard output, raw figures with --json."""
    arguments = _arguments()
    with tempfile.TemporaryDirectory(prefix="engine-bench-") as scratch:
        folder = arguments.model or write_config(arguments.shape, Path(scratch))
        chosen = {name: WORKLOADS[name] for name in arguments.workloads or WORKLOADS}
        longest = max(workload.prompt_tokens + workload.output_tokens for workload in chosen.values())
        began = time.perf_counter()
        engine = LocalEngine(
            ReplicaSpec(
                replica="bench-0",
                model_path=str(folder),
                load_format=arguments.load_format or ("safetensors" if arguments.model else "dummy"),
                device=arguments.device,
                dtype=arguments.dtype,
                max_model_len=arguments.max_model_len or longest,
                max_rows=arguments.max_rows,
                step_tokens=arguments.step_tokens,
                kv_blocks=arguments.kv_blocks,
                weights="fp8" if arguments.fp8 else "auto",
                kv_dtype="fp8" if arguments.kv_fp8 else "auto",
                **(
                    {}
                    if arguments.memory_fraction is None
                    else {"memory_fraction": arguments.memory_fraction}
                ),
            )
        )
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
        engine.close()
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("workloads", nargs="*", metavar="WORKLOAD", help=f"of: {', '.join(WORKLOADS)}")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama-3.1-8b")
    parser.add_argument("--model", type=Path, help="a checkpoint's folder, instead of random weights")
    parser.add_argument("--load-format", choices=["safetensors", "dummy"])
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPE_BYTES])
    parser.add_argument("--fp8", action="store_true", help="quantise the layers' weights")
    parser.add_argument("--kv-fp8", action="store_true", help="quantise the cache")
    parser.add_argument("--memory-fraction", type=float)
    parser.add_argument("--runs", type=int, default=3, help="the median counts")
    parser.add_argument("--max-rows", type=int, default=1024)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--max-model-len", type=int, help="without it, what the workloads need")
    parser.add_argument("--kv-blocks", type=int)
    parser.add_argument("--json", type=Path, help="raw figures into this file")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.workloads if name not in WORKLOADS]
    if unknown:
        parser.error(f"unknown workload {unknown[0]!r}; there are: {', '.join(WORKLOADS)}")
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
