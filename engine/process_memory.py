"""Limits the memory that C libraries keep in the long-lived processes of the service."""

from __future__ import annotations

import ctypes
import os

LARGE_BLOCK_BYTES = 256 << 10
"""A block of at least this size gets its own mapping, so `free` returns it to the system."""
MAX_ARENAS = 2
"""Number of malloc arenas. Each arena keeps memory that its threads have freed; the default is eight for each
core."""
KERNEL_CACHE_ENTRIES = 128
"""Number of cached GEMMs: five shapes of weights for 25 numbers of tokens. An entry takes about 0.4 MB, and
creating one takes 0.6 ms (demo model, float32)."""

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
"""Both constants come from glibc's malloc.h."""


def return_freed_memory() -> None:
    """Have malloc return freed large blocks to the system. Call before threads start.

    By default glibc raises its threshold for mappings to the size of the largest block that was freed, up to
    32 MiB. From then on request bodies lie in the heap, where one small block behind a large one keeps the
    large one resident after it is freed. With other C libraries this function does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(_M_ARENA_MAX, MAX_ARENAS)


def bound_kernel_caches() -> None:
    """Bound the caches of compiled GEMMs in oneDNN, and in torch's layer above it. Call before torch is
    loaded.

    On a CPU each number of tokens in a step needs a kernel for each shape of weights. By default each cache
    keeps 1,024 kernels, so the process grows by 500 MB as new numbers of tokens occur. Variables that the
    operator has set are kept.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNEL_CACHE_ENTRIES))
