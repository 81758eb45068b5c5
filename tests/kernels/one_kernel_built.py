"""Compiles one kernel twice for a GPU that need not be present. Each time, prints the kernel's name, the
number of failures and the binaries in Triton's cache with their times. Runs in a separate process, like
`launches_of_serving`."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from kernels import compiling
from kernels.triton import fused

GPU = compiling.GpuModel.of("NVIDIA H200", 90)


def launch() -> None:
    x = torch.empty((4, 64), dtype=torch.bfloat16, device="meta")
    fused.rms_norm(x, torch.empty(64, dtype=torch.bfloat16, device="meta"), 1e-5)


if __name__ == "__main__":
    for _ in range(2):
        (job,) = compiling.record(GPU.target, launch)
        failures = compiling.compile_jobs(GPU.target, [job], 1)
        files = sorted(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin"))
        times = [f"{file.name} written at {file.stat().st_mtime_ns}" for file in files]
        print(job.name.split(".")[-1], len(failures), "failures", *times)
