"""Prints when each stage of an engine's start began, in seconds since its process was started.

    python scripts/measure_start.py --shape llama-3.1-8b [--quantization fp8 --kv-cache-dtype fp8] [--runs 3
    --json OUT]

Random weights, made on the device. With an empty TRITON_CACHE_DIR: how long a start takes where
`python -m engine.build` has not run; the second of several runs then finds what the first has built.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    arguments = _arguments()
    if arguments.started_at is not None:
        start(arguments)
        return
    runs = []
    for number in range(arguments.runs):
        print(f"run {number + 1}", flush=True)
        runs.append(follow())
    if arguments.json:
        asked = {name: value for name, value in vars(arguments).items() if name not in ("json", "started_at")}
        arguments.json.write_text(json.dumps({"asked": asked, "runs": runs}, indent=1) + "\n")


def follow() -> list[dict[str, float | str]]:
    """One start in a process of its own: its stages, as they begin."""
    # The clock is the machine's, so that the time before the interpreter runs counts.
    command = [sys.executable, __file__, *sys.argv[1:], "--started-at", repr(time.monotonic())]
    stages: list[dict[str, float | str]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            stages.append(json.loads(line))
            print(f"{stages[-1]['s']:7.2f}  {stages[-1]['stage']}", flush=True)
    if process.returncode:
        raise SystemExit(process.returncode)
    return stages


def start(arguments: argparse.Namespace) -> None:
    """In the process that is timed: a line for each stage."""

    def tell(stage: str) -> None:
        print(
            json.dumps({"s": round(time.monotonic() - arguments.started_at, 3), "stage": stage}), flush=True
        )

    from engine.bench.shapes import write_config
    from engine.bench.start import FAILURES
    from engine.generate import LocalEngine
    from engine.messages import ReplicaSpec, SamplingParams
    from kernels.writable import UnwritableError, check_writable

    tell("imported")
    before = ""

    def progress(stage: str, fraction: float) -> None:
        nonlocal before
        if stage != before:
            tell(stage)
        before = stage

    with tempfile.TemporaryDirectory() as scratch:
        spec = ReplicaSpec(
            replica="start-0",
            model_path=str(write_config(arguments.shape, Path(scratch))),
            load_format="dummy",
            device=arguments.device,
            quantization=arguments.quantization,
            kv_cache_dtype=arguments.kv_cache_dtype,
            max_model_len=arguments.max_model_len,
            max_num_seqs=arguments.max_num_seqs,
            max_num_batched_tokens=8192,
        )
        try:
            # Here, since the process that writes it loads no torch: the first run would find torch's files
            # in memory.
            check_writable("--json", arguments.json)
            engine = LocalEngine(spec, progress)
        except (UnwritableError, *FAILURES) as error:
            raise SystemExit(str(error)) from None
    for prompt in (300, 20):
        engine.generate([[1] * prompt] * 2, SamplingParams(max_tokens=4, ignore_eos=True))
        tell(f"answered prompts of {prompt} tokens")
    engine.close()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--max-num-seqs", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=8448)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--json", type=Path, help="the stages of every run into this file")
    parser.add_argument("--started-at", type=float, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
