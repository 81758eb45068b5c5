"""What our GPU kernels can serve: shapes of a model, and properties of a GPU."""

from __future__ import annotations

HEAD_DIMS = (16, 32, 64, 128, 256)
"""Widths of a head. Attention's tiles are a power of two wide, and tensor cores need at least 16; two stages
of keys and values that are 512 wide do not fit the shared memory of a multiprocessor."""

MAX_GROUP = 128
"""Query heads of a KV head: they are rows of one tile in the attention of prompts."""

LARGEST_ROW = 65536
"""The most elements of a row that one program can hold in registers, for a norm or a scale."""

WIDE_HEADS_SHARED = 113 << 10
"""Bytes of shared memory that the attention of prompts takes for heads wider than 128."""

MIN_CAPABILITY = 80
"""Compute capability, times ten: the first that has bfloat16."""

MIN_FP8_CAPABILITY = 89
"""Compute capability, times ten: the first that has e4m3."""

FP8_ALIGNMENT = 16
"""Both sides of an e4m3 matrix are multiples of this for `torch._scaled_mm`."""


def shared_bytes(capability: int) -> int:
    """Return how many bytes of shared memory one program can have on a GPU of a compute capability (times
    ten), as NVIDIA's CUDA programming guide lists them."""
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(capability, 99) << 10
