"""Compiles some GEMMs with `linear_tiles` for Hopper, and prints the order of their operations as JSON. Runs
in a separate process, like `launches_of_serving`."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import torch

from kernels import compiling
from kernels.triton import linear
from kernels.triton.linear_plans import GemmPlan

GPU = compiling.GpuModel.of("NVIDIA H200", 90)
META = torch.device("meta")
PLAN = GemmPlan("tiles", 8, 64, 128, 4, 6)
EVENTS = {
    r"griddepcontrol\.launch_dependents": "launch_dependents",
    r"griddepcontrol\.wait": "wait",
    r"cp\.async\.bulk\.tensor": "copy",
    r"ld\.global": "load",
    r"wgmma\.mma_async": "product",
}


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device=META)


def split() -> None:
    plan = replace(PLAN, split=2)
    linear.linear(bf16(8, 4096), bf16(4096, 4096), residual=bf16(8, 4096), plan=plan)


def gated() -> None:
    linear.linear(bf16(8, 4096), bf16(28672, 4096), silu_mul=True, plan=PLAN)


def gaining() -> None:
    deferred_norm = linear.allocate_deferred_norm(PLAN, bf16(8, 4096))
    residual = bf16(8, 4096)
    shared = {"next_gain": bf16(4096), "deferred_norm": deferred_norm}
    linear.linear(bf16(8, 4096), bf16(4096, 4096), residual=residual, plan=PLAN, **shared)


def normed_after() -> None:
    squares = torch.empty((64, 8), dtype=torch.float32, device=META)
    linear.linear(bf16(8, 4096), bf16(28672, 4096), silu_mul=True, squares=squares, eps=1e-5, plan=PLAN)


def fp8() -> None:
    weight = torch.empty((4096, 4096), dtype=torch.float8_e4m3fn, device=META)
    scale = torch.empty(4096, dtype=torch.float32, device=META)
    x = torch.empty((8, 4096), dtype=torch.float8_e4m3fn, device=META)
    plan = replace(PLAN, block_k=256)
    linear.linear_fp8(x, weight, scale, x_scale=torch.empty(8, device=META), plan=plan)


if __name__ == "__main__":
    found = {}
    for launch in (split, gated, gaining, normed_after, fp8):
        (job,) = compiling.record(GPU.target, launch)
        with compiling._offline(GPU.target):
            kernel = job.function.preload(job.specialisation)
        ptx = re.sub(r"//.*", "", kernel.asm["ptx"])
        matches = re.finditer("|".join(EVENTS), ptx)
        events = [
            next(name for pattern, name in EVENTS.items() if re.match(pattern, match[0])) for match in matches
        ]
        found[launch.__name__] = {
            "events": events,
            "stages": PLAN.stages,
            "shared": kernel.metadata.shared,
        }
    print(json.dumps(found))
