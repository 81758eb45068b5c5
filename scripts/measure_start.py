"""Prints when each stage of an engine's start began, in seconds since this process was started.

    python scripts/measure_start.py --shape llama-3.1-8b [--weights fp8 --kv-dtype fp8]

Random weights, made on the device. With an empty TRITON_CACHE_DIR: how long a start takes where
`python -m kernels.build` has not run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path


def since_start() -> float:
    """Seconds since the kernel started this process, imports of the interpreter included."""
    ticks = int(Path("/proc/self/stat").read_text().rsplit(")", 1)[1].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return uptime - ticks / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--max-rows", type=int, default=1024)
    parser.add_argument("--max-model-len", type=int, default=8448)
    arguments = parser.parse_args()
    from engine.bench.shapes import write_config
    from engine.bench.start import FAILURES
    from engine.generate import LocalEngine
    from engine.messages import ReplicaSpec, SamplingParams

    print(f"{since_start():7.2f}  imported", flush=True)
    before = ""

    def progress(stage: str, fraction: float) -> None:
        nonlocal before
        if stage != before:
            print(f"{since_start():7.2f}  {stage}", flush=True)
        before = stage

    with tempfile.TemporaryDirectory() as scratch:
        spec = ReplicaSpec(
            replica="start-0",
            model_path=str(write_config(arguments.shape, Path(scratch))),
            load_format="dummy",
            device=arguments.device,
            weights=arguments.weights,
            kv_dtype=arguments.kv_dtype,
            max_model_len=arguments.max_model_len,
            max_rows=arguments.max_rows,
            step_tokens=8192,
        )
        try:
            engine = LocalEngine(spec, progress)
        except FAILURES as error:
            raise SystemExit(str(error)) from None
    began = time.perf_counter()
    for prompt in (300, 20):
        engine.generate([[1] * prompt] * 2, SamplingParams(max_tokens=4, ignore_eos=True))
        print(f"{since_start():7.2f}  answered, {time.perf_counter() - began:.2f} s later", flush=True)
    engine.close()


if __name__ == "__main__":
    main()
