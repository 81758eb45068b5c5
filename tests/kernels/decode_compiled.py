"""Compiles decode attention with a `Rotation` for Hopper, and prints the order of each kernel's memory
accesses as JSON. Runs in a separate process, like `launches_of_serving`."""

from __future__ import annotations

import json
import re
from functools import partial
from unittest import mock

import torch

from kernels import Rotation, compiling
from kernels.triton import attention_decode

GPU = compiling.GpuModel.of("NVIDIA H200", 90)
META = torch.device("meta")
HEADS, SIZE = 32, 128
EVENTS = re.compile(
    r"griddepcontrol\.\w+|ld\.global[\w.]*|st\.global[\w.]*|atom\.[\w.]*|cp\.async\.bulk\.tensor"
)


def launch(sequences: int, kv_heads: int, fp8: bool) -> None:
    """Launch decode attention with a different dtype for each kind of data, so that PTX shows which data each
    load reads. Lengths, slots and angles have 32 bits, page numbers have 64 bits, and the result of the qkv
    GEMM has 16 bits."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=META)

    pool = empty(64, kv_heads, 64, SIZE, dtype=torch.float8_e4m3fn if fp8 else torch.bfloat16)
    scales = empty(64, kv_heads, 64, dtype=torch.float32) if fp8 else None
    words = empty(sequences, dtype=torch.int32)
    attention_decode.decode(
        empty(sequences, (HEADS + 2 * kv_heads) * SIZE),
        pool,
        pool,
        empty(256, 64, dtype=torch.int64),
        words,
        words,
        0.1,
        attention_decode.allocate_workspace(sequences, HEADS, kv_heads, SIZE, META),
        k_scales=scales,
        v_scales=scales,
        rotation=Rotation(empty(4096, SIZE, dtype=torch.float32), empty(SIZE), empty(SIZE), 1e-5),
    )


if __name__ == "__main__":
    found = {}
    with mock.patch.object(attention_decode, "multiprocessors_of", lambda _device: 132):
        for sequences, kv_heads, fp8 in ((8, 8, False), (8, 4, False), (4, 4, True)):
            (job,) = compiling.record(GPU.target, partial(launch, sequences, kv_heads, fp8))
            with compiling._offline(GPU.target):
                ptx = re.sub(r"//.*", "", job.function.preload(job.specialisation).asm["ptx"])
            found[f"{sequences} x {kv_heads} {'fp8' if fp8 else 'bf16'}"] = EVENTS.findall(ptx)
    print(json.dumps(found))
