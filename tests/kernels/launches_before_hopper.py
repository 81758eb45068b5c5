"""Prints, as JSON, how many kernels a build and a search of plans foresee for Ampere and for Hopper, how many
of them overlap with the one in front, and what of the smallest of a build's of each name does not compile for
Ampere: a process of its own, as `launches_of_serving`."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

from kernels import compiling, rehearsal
from kernels.dimensions import read_dimensions
from kernels.triton.linear_table import Table
from kernels.tune import search


def main() -> None:
    dimensions = read_dimensions(Path(sys.argv[1]), max_num_seqs=8, max_num_batched_tokens=64)
    found = {}
    for capability in (80, 90):
        gpu = compiling.Gpu.of("any", capability)
        jobs = compiling.record(gpu.target, partial(rehearsal.launch_all, dimensions, Table(), gpu))
        tuning = partial(search.launch_all, [dimensions], [1, 16], Table(), gpu)
        found[capability] = counts(jobs)
        found[f"{capability} tuning"] = counts(compiling.record(gpu.target, tuning))
        if not gpu.pdl:
            first = list({job.name: job for job in reversed(jobs)}.values())
            found["failures"] = [
                f"{one.name}: {one.error[:200]}" for one in compiling.compile_jobs(gpu.target, first, 2)
            ]
    print(json.dumps(found))


def counts(jobs: list[compiling.Job]) -> dict[str, int]:
    overlapping = [job for job in jobs if json.loads(job.specialisation)["options"]["launch_pdl"]]
    return {"kernels": len(jobs), "overlapping": len(overlapping)}


if __name__ == "__main__":
    main()
