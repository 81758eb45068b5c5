"""Compiles the experts' kernels for Hopper. Prints the order of their loads and of their dependent-launch
instructions as JSON. Runs in a separate process, like `launches_of_serving`."""

from __future__ import annotations

import itertools
import json
import re

import torch

from kernels import Experts, Fp8Weight, Weight, compiling
from kernels.triton import experts
from kernels.triton.experts_plans import ExpertsPlan, LayerPlans, choose
from kernels.triton.linear_rows import allocate_workspace

GPU = compiling.GpuModel.of("NVIDIA H200", 90)
EVENTS = re.compile(r"griddepcontrol\.\w+|ld\.global|cp\.async\.c[ag]|wgmma\.mma_async|mma\.sync")


STREAM = LayerPlans(ExpertsPlan("stream", 1, 16, 128, 4, stages=2), ExpertsPlan("stream", 1, 16, 128, 8))


def launch(tokens: int, held: int, stream: bool = False) -> None:
    """Run a layer with the shape of Qwen3-30B-A3B on a rank that holds `held` of the 128 experts. With
    `stream`, use FP8 weights and the kernels in `experts_stream`."""

    def bf16(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    def matrices(*shape: int) -> Weight:
        values = torch.empty(shape, dtype=torch.float8_e4m3fn, device="meta")
        scales = torch.empty(shape[:-1], dtype=torch.float32, device="meta")
        return Fp8Weight(values, scales) if stream else bf16(*shape)

    layer = Experts(
        bf16(128, 2048), matrices(held, 1536, 2048), matrices(held, 2048, 768), 8, normalised=True
    )
    options = {"workspace": allocate_workspace(torch.device("meta"))}
    plans = STREAM if stream else choose(tokens, 8, 128, 2048, 768, torch.bfloat16)
    activation = experts.activate(bf16(tokens, 2048), bf16(2048), 1e-5, layer, plans=plans, **options)
    experts.weighted_sum(activation, layer, residual=bf16(tokens, 2048), **options)


if __name__ == "__main__":
    found = {}
    launches = [*itertools.product((1, 8, 2048), (128, 32)), (1, 128, True), (1, 32, True)]
    for tokens, held, *stream in launches:
        for job in compiling.record(GPU.target, lambda: launch(tokens, held, *stream)):  # noqa: B023
            name = job.name.split(".")[-1]
            if not re.match("_(up|down|grouped|combine)", name):
                continue
            name += "" if held == 128 else " of some experts"
            with compiling._offline(GPU.target):
                kernel = job.function.preload(job.specialisation)
            ptx = re.sub(r"//.*", "", kernel.asm["ptx"])
            found.setdefault(name, []).append(EVENTS.findall(ptx))
    print(json.dumps(found))
