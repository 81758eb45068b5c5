"""Prints how many collective kernels a build enumerates for a model on several ranks. It prints one line for
each kind of pass: `whole` passes, and passes that are computed in two `halves`.

Runs in a separate process, like `launches_of_serving`.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

from engine import sizing
from engine.build import read_served
from engine.launch_enumeration import launch_all
from kernels import compiling
from kernels.triton.linear_table import Table

GPU = compiling.GpuModel.of("any", 90)


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    for overlap_from in (1 << 30, 1024):
        sizing.OVERLAP_FROM_TOKENS = overlap_from
        served = read_served(folder, tensor_parallel_size=ranks, max_num_seqs=4, max_num_batched_tokens=1280)
        jobs = compiling.record(GPU.target, lambda served=served: launch_all(served, GPU, Table()))
        kernels = ("_all_reduce_add", "_all_gather", "_best_of_ranks", "_sum_parts")
        names = Counter(job.name.split(".")[-1] for job in jobs)
        print(*(names[kernel] for kernel in kernels))


if __name__ == "__main__":
    main()
