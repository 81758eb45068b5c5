"""Compiles prefill attention of Hopper and prints, as JSON, in which order it computes and waits; a process
of its own, as `launches_of_serving`."""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from functools import partial

import torch
from triton import knobs

from kernels import compiling
from kernels.triton import attention_prefill_hopper

GPU = compiling.Gpu.of("NVIDIA H200", 90)
META = torch.device("meta")
EVENTS = {
    "HGMMA": "product",
    "WARPGROUP.DEPBAR.LE gsb0, 0x0": "wait for all",
    "WARPGROUP.DEPBAR.LE gsb0, 0x1": "wait for all but the last",
    "MUFU.EX2": "weight",
    "STL": "spill",
    "LDL": "spill",
}
"""Instructions as a disassembler writes them, by how they begin."""


def launch(group: int, dtype: torch.dtype, expanded: bool) -> None:
    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    q, pool = empty(100, 8 * group, 128), empty(64, 8, 64, 128)
    table = None if expanded else empty(4, 64, dtype=torch.int64)
    tiles = empty(9, 4, dtype=torch.int32)
    attention_prefill_hopper.prefill(q, pool, pool, table, tiles, 0.1, torch.empty_like(q), 132)


def disassembled(cubin: bytes) -> list[str]:
    """Its instructions, without what they are predicated on."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "-sass", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@\S+\s+)?(.*?)\s*;", text, re.MULTILINE)


if __name__ == "__main__":
    found = {}
    for name, case in {
        "bf16": (4, torch.bfloat16, False),
        "f16 expanded": (64, torch.float16, True),
    }.items():
        (job,) = compiling.record(GPU.target, partial(launch, *case))
        with compiling._offline(GPU.target):
            kernel = job.function.preload(job.specialisation)
            job.function.device_caches.clear()
        instructions = disassembled(kernel.asm["cubin"])
        found[name] = {
            "events": [
                event for one in instructions for begin, event in EVENTS.items() if one.startswith(begin)
            ],
            "shared": kernel.metadata.shared,
        }
    print(json.dumps(found))
