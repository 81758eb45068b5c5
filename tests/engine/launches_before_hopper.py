"""Prints, as JSON, how many kernels a build and a tuning search compile for Ampere and for Hopper, and how
many of these kernels use programmatic dependent launch. For Ampere, the program also compiles one kernel of
each name in the build, and prints the kernels that fail to compile. For Hopper, it compares the build's
kernels with those that Triton describes at every launch. Runs in a separate process, like
`tests.engine.launches_of_serving`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget

from engine.build import read_served
from engine.launch_enumeration import launch_all
from engine.tune import tuning
from kernels import compiling
from kernels.triton.linear_table import Table


def main() -> None:
    served = read_served(Path(sys.argv[1]), max_num_seqs=8, max_num_batched_tokens=64)
    found = {}
    for capability in (80, 90):
        gpu = compiling.GpuModel.of("any", capability)
        launch = partial(launch_all, served, gpu, Table())
        jobs = compiling.record(gpu.target, launch)
        if gpu.hopper:
            assert jobs == described_at_every_launch(gpu.target, launch)
        tuned = compiling.record(gpu.target, partial(tuning.launch_all, [served], [1, 16], Table(), gpu))
        found[capability] = counts(jobs)
        found[f"{capability} tuning"] = counts(tuned)
        if not gpu.pdl:
            first = list({job.name: job for job in reversed(jobs)}.values())
            found["failures"] = [
                f"{one.name}: {one.error[:200]}" for one in compiling.compile_jobs(gpu.target, first, 2)
            ]
    print(json.dumps(found))


def described_at_every_launch(target: GPUTarget, launch: Callable[[], object]) -> list[compiling.CompileJob]:
    """Return the specialisations that Triton describes if it describes every launch, without duplicates."""
    found: dict[tuple[str, str], compiling.CompileJob] = {}

    def note(fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        job = compiling.CompileJob(f"{fn.module}.{fn.name}", fn.jit_function, compile["specialization_data"])
        found.setdefault((job.name, job.specialisation), job)
        return True

    with compiling._offline(target), knobs.runtime.scope():
        knobs.runtime.jit_cache_hook = note
        launch()
    return list(found.values())


def counts(jobs: list[compiling.CompileJob]) -> dict[str, int]:
    overlapping = [job for job in jobs if json.loads(job.specialisation)["options"]["launch_pdl"]]
    return {"kernels": len(jobs), "overlapping": len(overlapping)}


if __name__ == "__main__":
    main()
