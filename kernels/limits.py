"""The limits of our GPU kernels: supported model shapes, and required GPU properties."""

from __future__ import annotations

HEAD_DIMS = (16, 32, 64, 128, 256)
"""Supported values of head_dim. Attention's tiles are a power of two wide, and tensor cores need at least 16.
Two pipeline stages of keys and values that are 512 wide exceed the shared memory of a multiprocessor."""

MAX_GROUP = 128
"""Maximum number of query heads per KV head: they are rows of one tile in the attention of prompts."""

LARGEST_ROW = 65536
"""Maximum number of elements of a row for a norm or a quantisation, because one program holds the row in
registers."""

WIDE_HEADS_SHARED = 113 << 10
"""Bytes of shared memory that the attention of prompts needs for heads wider than 128."""

MAX_EXPERTS = 512
"""Maximum number of experts of a layer. The program that chooses a token's experts compares all of their
logits in registers."""

MAX_TOP_K = 32
"""Maximum number of experts that a token chooses."""

MIN_CAPABILITY = 80
"""Minimum compute capability, times ten: the first that supports bfloat16."""

MIN_FP8_CAPABILITY = 89
"""Minimum compute capability, times ten, for FP8: the first that supports e4m3."""

FP8_ALIGNMENT = 16
"""`torch._scaled_mm` requires both dimensions of an e4m3 matrix to be multiples of this."""


def shared_bytes(capability: int) -> int:
    """Return how many bytes of shared memory one program can have on a GPU of a compute capability (times
    ten), as NVIDIA's CUDA programming guide lists them."""
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(capability, 99) << 10
