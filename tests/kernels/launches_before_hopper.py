"""Prints, as JSON, how many kernels a build foresees for Ampere and for Hopper, how many of them overlap with
the one in front, and what of the smallest of each name does not compile for Ampere: a process of its own, as
`launches_of_serving`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from kernels import PDL_FROM, compiling, rehearsal
from kernels.dimensions import read_dimensions
from kernels.triton.linear_table import Table


def main() -> None:
    dimensions = read_dimensions(Path(sys.argv[1]), max_rows=8, step_tokens=64)
    found = {}
    for capability in (80, 90):
        gpu = compiling.Gpu.of("any", capability)
        pdl = capability >= PDL_FROM
        jobs = compiling.record(gpu.target, lambda pdl=pdl: rehearsal.launch_all(dimensions, Table(), pdl))
        overlapping = [job for job in jobs if json.loads(job.specialisation)["options"]["launch_pdl"]]
        found[capability] = {"kernels": len(jobs), "overlapping": len(overlapping)}
        if not pdl:
            first = list({job.name: job for job in reversed(jobs)}.values())
            found["failures"] = [
                f"{one.name}: {one.error[:200]}" for one in compiling.compile_jobs(gpu.target, first, 2)
            ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
