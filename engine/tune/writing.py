"""Compiles the kernels that a tuner launches and writes the table of results. Shared by the linear tuner and
the expert tuner."""

from __future__ import annotations

import datetime
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import triton

from kernels import compiling
from kernels.triton.linear_table import Table


def compile_launches(gpu: compiling.GpuModel, launch: Callable[[], object]) -> None:
    """Compile the kernels launched by `launch`, in one process per CPU core."""
    began = time.perf_counter()
    torch.set_num_threads(1)  # avoids OpenMP threads, which must not exist when this process forks
    jobs = compiling.record(gpu.target, launch)
    # Ignore compiler errors here: plans that the compiler rejects also fail when measured, and are then
    # skipped.
    failures = compiling.compile_jobs(gpu.target, jobs, compiling.default_processes())
    seconds = time.perf_counter() - began
    print(f"{len(jobs)} kernels compiled in {seconds:.0f} s, {len(failures)} failed", flush=True)


def write_table(path: Path, table: Table, gpu: compiling.GpuModel) -> None:
    """Write a table with today's date and the software versions."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    about = {"date": today, "torch": str(torch.__version__), "triton": triton.__version__}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(replace(table, gpu=gpu.name, about=about).to_json())
