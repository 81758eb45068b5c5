"""The GPU kernels' limits: supported model shapes and required GPU properties."""

from __future__ import annotations

HEAD_DIMS = (16, 32, 64, 128, 256)
"""Supported values of head_dim. Attention tiles need a power-of-two width, and tensor cores need at least 16.
At a width of 512, two pipeline stages of keys and values would exceed a multiprocessor's shared memory."""

MAX_GROUP = 128
"""Maximum number of query heads per KV head. Prefill attention packs them into the rows of one tile."""

LARGEST_ROW = 65536
"""Maximum row length, in elements, for norms and quantisation. A program keeps a whole row in registers."""

WIDE_HEADS_SHARED = 113 << 10
"""Bytes of shared memory that prefill attention needs for a head_dim above 128."""

MAX_EXPERTS = 512
"""Maximum number of experts in a layer. The program that chooses a token's experts compares all experts'
logits in registers."""

MAX_TOP_K = 32
"""Maximum number of experts per token."""

MIN_CAPABILITY = 80
"""Minimum compute capability (times ten). Older GPUs lack bfloat16."""

MIN_FP8_CAPABILITY = 89
"""Minimum compute capability (times ten) for FP8 (e4m3)."""

FP8_ALIGNMENT = 16
"""Both dimensions of an e4m3 matrix must be multiples of this, as `torch._scaled_mm` requires."""


def shared_bytes(capability: int) -> int:
    """Return the shared memory available to a program, in bytes, as listed in NVIDIA's CUDA programming
    guide. capability: compute capability times ten."""
    return {80: 163, 87: 163, 90: 227, 100: 227, 103: 227}.get(capability, 99) << 10
