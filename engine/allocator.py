"""Settings of glibc's malloc for the long-lived processes of the service."""

from __future__ import annotations

import ctypes

LARGE_BLOCK_BYTES = 256 << 10
"""A block of at least this size is a mapping of its own, so `free` returns it to the system."""
MAX_ARENAS = 2
"""Each arena keeps memory that its threads have freed; the default is eight for each core."""

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
"""Both of glibc's malloc.h."""


def return_freed_memory() -> None:
    """Have malloc return freed large blocks to the system. Call before threads start.

    By default glibc raises its threshold for mappings to the size of the largest block that was freed, up to
    32 MiB. From then on request bodies and tensors lie in the heap, where one small block behind a large one
    keeps the large one resident after it is freed. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(_M_ARENA_MAX, MAX_ARENAS)
