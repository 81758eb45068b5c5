"""Measures the available memory in bytes and defines the errors raised when a replica's memory is
insufficient."""

from __future__ import annotations

import os
from pathlib import Path

from engine.messages import BLOCK_TOKENS

CPU_MAX_KV_BYTES = 2 << 30
"""Maximum size, in bytes, of the KV cache on a CPU if `kv_blocks` is not set. The limit leaves memory for
other processes."""


class WeightsTooLarge(MemoryError):
    """Raised if a rank's weights do not fit on its device. The message gives the required and the available
    size."""


class StepsTooLarge(MemoryError):
    """Raised if the largest steps' activations do not fit on a GPU in addition to the weights and the KV
    cache. The message contains the sizes."""


class PoolTooSmall(MemoryError):
    """Raised if the KV pool is too small for a single sequence of maximum length. The message gives the
    required and the available number of blocks."""


class PoolTooLarge(MemoryError):
    """Raised if the configured KV pool does not fit into memory. The message gives the required and the
    available size."""


def available_host_bytes() -> int:
    """Return how many bytes of host memory this process can still allocate within the limits of the machine
    and of its cgroups (v2)."""
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for group in _cgroups():
        try:
            limit = (group / "memory.max").read_text().strip()
            if limit != "max":
                used = int((group / "memory.current").read_text()) - _cached_bytes(group)
                available = min(available, max(0, int(limit) - used))
        except (OSError, ValueError):
            continue  # the root cgroup has no limit, and the memory controller may be disabled
    return available


def resident_bytes() -> int:
    """Return this process's resident memory in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_blocks(blocks: int, max_model_len: int, bytes_per_block: int, given: bool) -> int:
    """Return `blocks` if that many KV blocks can hold a sequence of `max_model_len` tokens, otherwise raise
    PoolTooSmall. `given` is true if `kv_blocks` was configured, and false if it was derived from the
    available memory.
    """
    needed = -(-max_model_len // BLOCK_TOKENS)
    if blocks >= needed:
        return blocks
    fitting = max(0, blocks) * BLOCK_TOKENS
    remedy = f"lower max_model_len to at most {fitting}, or " if fitting else ""
    if given:
        raise PoolTooSmall(
            f"kv_blocks is {blocks}, but one sequence of max_model_len {max_model_len} tokens needs {needed} "
            f"blocks: {remedy}raise kv_blocks"
        )
    raise PoolTooSmall(
        f"the available memory holds {max(0, blocks)} KV blocks of {bytes_per_block} bytes per rank, but one "
        f"sequence of max_model_len {max_model_len} tokens needs {needed}: {remedy}free memory, raise "
        "gpu_memory_utilization or kv_blocks, or use more ranks"
    )


def too_large(blocks: int, bytes_per_block: int, ranks: int, available_bytes: int) -> PoolTooLarge:
    """Return the error for KV pools of `ranks` ranks that do not fit into `available_bytes`."""
    needed = blocks * bytes_per_block * ranks
    most = max(0, available_bytes) // (bytes_per_block * ranks)
    # Round the suggested `kv_blocks` down to two significant digits, so that small fluctuations in available
    # memory do not make it too large.
    most -= most % 10 ** max(0, len(str(most)) - 2)
    remedy = f"lower it to at most {most}, or leave it out" if most else "free memory"
    return PoolTooLarge(
        f"kv_blocks is {blocks}, which needs {needed / 2**30:.1f} GiB ({bytes_per_block} bytes per block and "
        f"rank), but only {max(0, available_bytes) / 2**30:.0f} GiB are available: {remedy}"
    )


def _cached_bytes(group: Path) -> int:
    """Return the size of a cgroup's file cache, which the kernel reclaims when memory is needed."""
    lines = (group / "memory.stat").read_text().splitlines()
    counts = dict(line.split() for line in lines if line.startswith(("active_file ", "inactive_file ")))
    return sum(map(int, counts.values()))


def _cgroups() -> list[Path]:
    """Return this process's cgroup and its ancestors, innermost first, or nothing if cgroup v2 is not in
    use."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    root = Path("/sys/fs/cgroup")
    for line in lines:
        if line.startswith("0::"):
            inner = root / line[3:].strip("/")
            return [path for path in (inner, *inner.parents) if path.is_relative_to(root)]
    return []
