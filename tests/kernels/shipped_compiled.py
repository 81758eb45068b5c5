"""For each form, compiles the shipped plan that needs the most shared memory, with all fused operations, for
Hopper. Prints the shared memory of each kernel as JSON. Runs in a separate process, like
`launches_of_serving`."""

from __future__ import annotations

import json

import torch

from kernels import compiling
from kernels.triton import linear
from kernels.triton.linear_table import Product
from kernels.tune.candidates import shared_bytes
from tests.kernels.shipped_plans import FP8, PARTS, Shipped, shipped_plans

GPU = compiling.GpuModel.of("NVIDIA H200", 90)
META = torch.device("meta")


def multiply(shipped: Shipped, rows: int, k: int) -> None:
    plan, n = shipped.plan, shipped.plan.block_n * 5 // 2

    def bf16(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    weight = torch.empty((n, k), dtype=shipped.dtype, device=META)
    options = {"bias": bf16(n), "residual": bf16(rows, n), "eps": 1e-5, "plan": plan}
    if shipped.dtype == FP8:
        scale = torch.empty(n, dtype=torch.float32, device=META)
        linear.linear_fp8(bf16(rows, k), weight, scale, norm_weight=bf16(k), **options)
        return
    if plan.tiled:
        squares = torch.empty((PARTS, rows), dtype=torch.float32, device=META)
        deferred_norm = linear.allocate_deferred_norm(plan, bf16(rows, n))
        options |= {"squares": squares, "next_gain": bf16(n), "deferred_norm": deferred_norm}
    linear.linear(bf16(rows, k), weight, **options)


if __name__ == "__main__":
    found = {}
    for form in ("gemv", "stream", "dot", "tiles"):
        hungriest, expected, use = max(
            (
                (one, shared_bytes(one.plan, Product(one.dtype, 4096, k)), (rows, k))
                for one in shipped_plans()
                for rows, k in one.uses
                if one.plan.form == form
            ),
            key=lambda each: (each[1], each[0].plan.stages),
        )
        jobs = compiling.record(GPU.target, lambda: multiply(hungriest, *use))  # noqa: B023
        (job,) = [job for job in jobs if ".linear_" in job.name]
        with compiling._offline(GPU.target):
            kernel = job.function.preload(job.specialisation)
        found[form] = {"plan": str(hungriest), "expected": expected, "shared": kernel.metadata.shared}
    print(json.dumps(found))
