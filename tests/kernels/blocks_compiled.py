"""Compiles the kernels of layers with FP8 block scales for Hopper: every specialisation of the GEMM kernels
on tensor cores, and one of each other kernel. Prints each kernel's shared memory per program, the size of its
stack (spilled registers), and whether it uses Hopper's tensor-core instruction, as JSON. Runs in a separate
process, like `launches_of_serving`."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path

import torch
from triton import knobs

from kernels import Experts, Fp8Weight, Residual, compiling
from kernels.cuda import CudaOps
from kernels.triton.block_scales import scales_shape

GPU = compiling.GpuModel.of("NVIDIA H200", 90)
TOKENS = (1, 16, 64, 512, 8192)


def bf16(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="meta")


def blocks(*shape: int, block: tuple[int, int] = (128, 128)) -> Fp8Weight:
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
    return Fp8Weight(values, torch.empty(scales_shape(values.shape, block), device="meta"), block)


def launch(tokens: int) -> None:
    """Run the GEMMs of a dense layer, with and without kernels for Hopper only, and of layers with the
    experts of Qwen3-30B-A3B on one rank and on four ranks, whose blocks are smaller."""
    x, norm = Residual(bf16(tokens, 4096)), (bf16(4096), 1e-5)
    for ops in (CudaOps(pdl=True), CudaOps(pdl=True, hopper_multiprocessors=132)):
        ops.norm_linear(x, *norm, blocks(6144, 4096), bf16(6144))
        activated = ops.norm_gate_up(x, *norm, blocks(24576, 4096), None)
        ops.linear_add(activated, blocks(4096, 12288), None, x, None)
    for width, cut in ((768, 128), (192, 64)):
        gate_up = blocks(128, 2 * width, 2048, block=(cut, 128))
        down = blocks(128, 2048, width, block=(128, cut))
        layer = Experts(bf16(128, 2048), gate_up, down, 8, normalised=True)
        residual = Residual(bf16(tokens, 2048))
        activation = ops.norm_experts(residual, bf16(2048), 1e-5, layer)
        ops.experts_add(activation, layer, residual, None)


def stack_bytes(cubin: bytes) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", found)[0])


if __name__ == "__main__":
    found: dict[str, list[dict[str, object]]] = {}
    for job in compiling.record(GPU.target, lambda: [launch(tokens) for tokens in TOKENS]):
        name = job.name.split(".")[-1]
        kernels = found.setdefault(name, [])
        if kernels and not re.search("_dot$|_grouped$|_tiles$", name):
            continue
        with compiling._offline(GPU.target):
            kernel = job.function.preload(job.specialisation)
        kernels.append(
            {
                "specialisation": job.specialisation,
                "shared": kernel.metadata.shared,
                "stack": stack_bytes(kernel.asm["cubin"]),
                "wgmma": "wgmma.mma_async" in kernel.asm["ptx"],
            }
        )
    print(json.dumps(found))
