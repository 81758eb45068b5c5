"""Compiles the collectives over peer memory for Hopper. Runs in a separate process, like
`launches_of_serving`."""

from __future__ import annotations

import torch

from kernels import compiling
from kernels.triton import all_gather, all_reduce, all_reduce_norm
from kernels.triton.peer_arena import PROGRAMS, Arena

GPU = compiling.GpuModel.of("NVIDIA H200", 90)


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launch() -> None:
    """Launch every kernel on each of two ranks."""
    for rank in range(2):
        addresses, calls = empty(2, dtype=torch.int64), empty(PROGRAMS, dtype=torch.int32)
        arena = Arena(rank, 2, addresses, calls, stop_address=0, items=16)
        x, squares = empty(3, 1024), empty(1, 3, dtype=torch.float32)
        for two_shot in (False, True):
            all_reduce.all_reduce_add(x, x, arena, two_shot=two_shot)
        all_reduce.all_reduce_add(
            x, x, arena, two_shot=False, gain=empty(1024), scaled=empty(3, 1024), squares=squares
        )
        all_reduce.all_reduce_add(x, x, arena, two_shot=False, add=False)
        for hidden in (1024, 5120, 8192):
            rows = empty(3, hidden)
            all_reduce_norm.all_reduce_norm_fp8(rows, rows, empty(hidden), 1e-5, arena)
        all_gather.all_gather(empty(1, dtype=torch.int32), 1, arena, pdl=False, fence=True)
        for words in (5, 100_000):
            all_gather.all_gather(empty(words, dtype=torch.int32), words, arena)
        all_gather.best_of_ranks(empty(5, dtype=torch.float32), empty(5, dtype=torch.int64), arena)


if __name__ == "__main__":
    jobs = compiling.record(GPU.target, launch)
    failures = compiling.compile_jobs(GPU.target, jobs, 2)
    print(*(failure.error for failure in failures), sep="\n", end="")
    print(len(jobs), "kernels,", len(failures), "failures")
