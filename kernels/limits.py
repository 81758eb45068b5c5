"""The limits of the GPU kernels: supported model shapes and required GPU properties."""

from __future__ import annotations

HEAD_DIMS = (16, 32, 64, 128, 256)
"""Supported values of head_dim. Attention tiles need a power-of-two width, and tensor cores need at least 16.
With a width of 512, keys and values in two pipeline stages would exceed the shared memory of a
multiprocessor."""

MAX_GROUP = 128
"""Maximum number of query heads per KV head. Prefill attention packs these query heads into the rows of one
tile."""

LARGEST_ROW = 65536
"""Maximum row length, in elements, for norms and quantisation. One program keeps a whole row in registers."""

WIDE_HEADS_SHARED = 113 << 10
"""Bytes of shared memory that prefill attention needs if head_dim is greater than 128."""

MAX_EXPERTS = 512
"""Maximum number of experts in a layer. The program that chooses a token's experts compares the logits of all
experts in registers."""

MAX_TOP_K = 32
"""Maximum number of experts that a token can choose."""

MIN_CAPABILITY = 80
"""Minimum compute capability, times ten. It is the lowest compute capability that supports bfloat16."""

MIN_FP8_CAPABILITY = 89
"""Minimum compute capability, times ten, for FP8. It is the lowest compute capability that supports e4m3."""

FP8_ALIGNMENT = 16
"""Both dimensions of an e4m3 matrix must be multiples of this number (a requirement of
`torch._scaled_mm`)."""


def shared_bytes(capability: int) -> int:
    """Return the bytes of shared memory available to one program, as listed in NVIDIA's CUDA programming
    guide. capability: compute capability times ten."""
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(capability, 99) << 10
