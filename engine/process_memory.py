"""Limits the memory that C libraries retain in the service's long-lived processes."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable

LARGE_BLOCK_BYTES = 256 << 10
"""Minimum size, in bytes, of a block that malloc maps separately, so that `free` returns it to the operating
system."""
MAX_ARENAS = 2
"""Maximum number of malloc arenas, each of which retains memory freed by its threads. glibc's default is
eight per CPU core."""
TRIM_EVERY_S = 10.0
"""Interval, in seconds, at which `return_memory_periodically` returns freed memory."""
KERNEL_CACHE_ENTRIES = 128
"""Maximum number of cached GEMM kernels, enough for five weight shapes and 25 token counts. An entry takes
about 0.4 MB, and creating it takes 0.6 ms (measured with the demo model in float32)."""

_M_MMAP_THRESHOLD = -3
_M_ARENA_MAX = -8
"""Parameters of mallopt, with their numbers from glibc's malloc.h."""


def return_freed_memory() -> None:
    """Configure malloc so that it returns large freed blocks to the operating system. Call before threads
    start.

    By default, whenever glibc frees a separately mapped block, it raises the threshold for separate mapping
    to the size of that block, up to 32 MiB. Request bodies are then allocated on the heap, where a freed
    block stays resident as long as a block at a higher address is in use. Does nothing with other C
    libraries.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, LARGE_BLOCK_BYTES)
        mallopt(_M_ARENA_MAX, MAX_ARENAS)


def return_memory_periodically() -> None:
    """Start a thread that returns freed memory to the operating system every TRIM_EVERY_S seconds.

    By default, glibc returns freed memory only at the end of the heap, so a small block still in use keeps
    all freed memory below it resident. While memory is being returned, threads that allocate memory may have
    to wait. Does nothing with other C libraries.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        threading.Thread(target=_trim_periodically, args=(trim,), name="return-memory", daemon=True).start()


def _trim_periodically(trim: Callable[[int], object]) -> None:
    while True:
        time.sleep(TRIM_EVERY_S)
        trim(0)


def bound_kernel_caches() -> None:
    """Limit the caches of compiled GEMM kernels in oneDNN and in torch. Call before torch is loaded.

    A CPU needs a separate kernel for each weight shape and each number of tokens in a step. By default, each
    cache holds 1,024 kernels, so the process grows by 500 MB as new token counts occur. Environment variables
    set by the operator take precedence.
    """
    for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
        os.environ.setdefault(name, str(KERNEL_CACHE_ENTRIES))
