"""Prints, as JSON, how many kernels a build and a tuning search compile for Ampere and for Hopper, and how
many of these kernels use programmatic dependent launch. For Ampere, the program also compiles one kernel of
each name in the build, and prints the kernels that fail to compile. Runs in a separate process, like
`tests.engine.launches_of_serving`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from engine.build import read_served
from engine.launch_enumeration import launch_all
from engine.tune import tuning
from kernels import compiling
from kernels.triton.linear_table import Table
from tests import quick_recording


def main() -> None:
    served = read_served(Path(sys.argv[1]), max_num_seqs=8, max_num_batched_tokens=64)
    gpu = compiling.GpuModel.of("any", 80)
    launch = partial(launch_all, served, gpu, Table())
    original = compiling.record(gpu.target, launch)
    quick_recording.install()
    assert compiling.record(gpu.target, launch) == original, "`tests.quick_recording` changes the results"
    found = {}
    for capability in (80, 90):
        gpu = compiling.GpuModel.of("any", capability)
        jobs = compiling.record(gpu.target, partial(launch_all, served, gpu, Table()))
        tuned = compiling.record(gpu.target, partial(tuning.launch_all, [served], [1, 16], Table(), gpu))
        found[capability] = counts(jobs)
        found[f"{capability} tuning"] = counts(tuned)
        if not gpu.pdl:
            first = list({job.name: job for job in reversed(jobs)}.values())
            found["failures"] = [
                f"{one.name}: {one.error[:200]}" for one in compiling.compile_jobs(gpu.target, first, 2)
            ]
    print(json.dumps(found))


def counts(jobs: list[compiling.CompileJob]) -> dict[str, int]:
    overlapping = [job for job in jobs if json.loads(job.specialisation)["options"]["launch_pdl"]]
    return {"kernels": len(jobs), "overlapping": len(overlapping)}


if __name__ == "__main__":
    main()
