"""Compiles one kernel for a GPU that need not be present. Runs in a separate process, like
`launches_of_serving`."""

from __future__ import annotations

import torch

from kernels import compiling
from kernels.triton import fused

GPU = compiling.GpuModel.of("NVIDIA H200", 90)


def launch() -> None:
    x = torch.empty((4, 64), dtype=torch.bfloat16, device="meta")
    fused.rms_norm(x, torch.empty(64, dtype=torch.bfloat16, device="meta"), 1e-5)


if __name__ == "__main__":
    jobs = compiling.record(GPU.target, launch)
    failures = compiling.compile_jobs(GPU.target, jobs, 1)
    print(*(job.name.split(".")[-1] for job in jobs), "compiled", len(failures) or "no", "failures")
