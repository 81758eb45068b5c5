"""`python -m engine.bench.collectives`: compare the engine's fused all-reduce with those of NCCL and torch,
by message size.

    python -m engine.bench.collectives --gpus 2 --hidden 8192 --json out.json

The table shows the time per call in microseconds, measured in a CUDA graph of many calls. NCCL and torch
compute only the all-reduce. The engine's kernels also add the residual. Columns with "+norm" include the
partial RMSNorm. "+FP8 norm" is the one-shot kernel that also computes the quantised RMSNorm, with one program
per row. "then FP8 norm" is the total time of the two kernels that "+FP8 norm" replaces. The torch functions
come from `torch.distributed._symmetric_memory` and run without NVLink multicast.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
COLUMNS = (
    "nccl",
    "torch one-shot",
    "torch two-shot",
    "one-shot",
    "one-shot +norm",
    "two-shot",
    "two-shot +norm",
    "+FP8 norm",
    "then FP8 norm",
)
_REPLAYS = 15


def main() -> int:
    """Run the benchmark on the first `--gpus` GPUs of this machine and print a table. Returns 1 if there are
    too few GPUs."""
    parser = argparse.ArgumentParser(
        prog="python -m engine.bench.collectives",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, default=2, help="number of ranks, one per GPU (%(default)s)")
    parser.add_argument("--hidden", type=int, default=8192, help="elements per row (%(default)s)")
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="row counts (%(default)s)")
    parser.add_argument("--json", type=Path, help="write the table to this file")
    arguments = parser.parse_args()
    if arguments.gpus < 2 or torch.cuda.device_count() < arguments.gpus:
        print(
            f"--gpus is {arguments.gpus}; at least 2 are needed, and this machine has "
            f"{torch.cuda.device_count()}",
            file=sys.stderr,
        )
        return 1
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (arguments, folder), nprocs=arguments.gpus)
    return 0


def _rank(rank: int, arguments: Any, folder: str) -> None:
    from engine.peer_memory import PeerMemory

    world, hidden = arguments.gpus, arguments.hidden
    torch.cuda.set_device(rank)
    store = dist.FileStore(f"{folder}/meeting", world)
    dist.init_process_group(
        "nccl", store=store, rank=rank, world_size=world, device_id=torch.device("cuda", rank)
    )
    memory = PeerMemory(rank, world)
    dist.barrier()
    if rank == 0:
        print(f"{world} × {torch.cuda.get_device_name()}, {hidden} bfloat16 per row, µs per call")
        print(f"{'rows':>5} " + " ".join(f"{name:>14}" for name in COLUMNS), flush=True)
    table: dict[int, dict[str, float]] = {}
    for rows in arguments.rows:
        table[rows] = _measure(memory, rows, hidden)
        if rank == 0:
            cells = (
                f"{table[rows][name]:14.2f}" if name in table[rows] else f"{'—':>14}" for name in COLUMNS
            )
            print(f"{rows:5d} " + " ".join(cells), flush=True)
    if rank == 0 and arguments.json:
        about = {
            "device": torch.cuda.get_device_name(),
            "gpus": world,
            "hidden": hidden,
            "torch": torch.__version__,
        }
        arguments.json.write_text(json.dumps({**about, "us": table}, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _measure(memory: Any, rows: int, hidden: int) -> dict[str, float]:
    import torch.distributed._symmetric_memory as symmetric

    from kernels.triton import all_reduce, all_reduce_norm, fused

    assert dist.group.WORLD is not None
    group = dist.group.WORLD.group_name
    device = torch.device("cuda", torch.cuda.current_device())
    shared = symmetric.empty((rows, hidden), dtype=torch.bfloat16, device=device)
    symmetric.rendezvous(shared, group)
    shared.zero_()
    x = torch.randn(rows, hidden, device="cuda").bfloat16()
    residual, summed = torch.zeros_like(x), torch.zeros_like(x)
    runs: dict[str, Callable[[], object]] = {
        "nccl": lambda: dist.all_reduce(summed),
        "torch one-shot": lambda: torch.ops.symm_mem.one_shot_all_reduce(shared, "sum", group),
        "torch two-shot": lambda: torch.ops.symm_mem.two_shot_all_reduce_(shared, "sum", group),
    }
    if all_reduce.fits(rows, hidden, memory.arena):
        parts = all_reduce.squares_parts(hidden)
        norm = {
            "gain": torch.randn(hidden, device="cuda").bfloat16(),
            "scaled": torch.empty_like(x),
            "squares": torch.empty(parts, rows, device="cuda"),
        }
        for name, two_shot in (("one-shot", False), ("two-shot", True)):
            run = functools.partial(all_reduce.all_reduce_add, x, residual, memory.arena, two_shot=two_shot)
            runs |= {name: run, f"{name} +norm": functools.partial(run, **norm)}
        if all_reduce_norm.fits(rows, hidden, memory.arena):
            gain, one_shot = norm["gain"], runs["one-shot"]
            runs["+FP8 norm"] = functools.partial(
                all_reduce_norm.all_reduce_norm_fp8, x, residual, gain, 1e-5, memory.arena
            )

            def then_norm() -> None:
                one_shot()
                fused.rms_norm_fp8(residual, gain, 1e-5, pdl=True)

            runs["then FP8 norm"] = then_norm
    return {name: _microseconds(run, 150 if rows <= 128 else 30) for name, run in runs.items()}


def _microseconds(run: Callable[[], object], calls: int) -> float:
    """Return the median time per call, measured by replaying a CUDA graph of `calls` calls. An untimed replay
    before each timed one synchronises the ranks."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run()
        run()
        torch.cuda.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for _ in range(calls):
            run()
        graph.capture_end()
        times = []
        for _ in range(_REPLAYS):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            dist.barrier()
            torch.cuda.synchronize()
            graph.replay()
            began.record()
            graph.replay()
            ended.record()
            stream.synchronize()
            times.append(1e3 * began.elapsed_time(ended) / calls)
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    sys.exit(main())
