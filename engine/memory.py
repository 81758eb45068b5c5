"""How much memory there is, and how many KV blocks that makes. All in bytes."""

from __future__ import annotations

import os
from pathlib import Path

from engine.messages import BLOCK_TOKENS

CPU_MAX_KV_BYTES = 2 << 30
"""On a CPU, KV never takes more than this unless `kv_blocks` says so: the box has other tenants."""


class WeightsTooLarge(MemoryError):
    """A rank's weights do not fit its device: the message has both numbers."""


class StepsTooLarge(MemoryError):
    """What steps work with does not fit a GPU beside the rest: the message has the sizes."""


class PoolTooSmall(MemoryError):
    """The KV pool would not hold one sequence of the longest kind: the message has both numbers."""


class PoolTooLarge(MemoryError):
    """There is no memory for the KV pool that was asked for: the message has both numbers."""


def available_host_bytes() -> int:
    """Memory that new allocations can have: the machine's, or what is left in this process's cgroup (v2)."""
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
            continue  # the root group has no limit, and a controller may be off
    return available


def resident_bytes() -> int:
    """Memory of this process that is in RAM."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def check_blocks(blocks: int, max_model_len: int, bytes_per_block: int, given: bool) -> int:
    """`blocks`, if they hold a sequence of `max_model_len` tokens. Raises PoolTooSmall.

    given: they were configured (`kv_blocks`), not found from memory.
    """
    needed = -(-max_model_len // BLOCK_TOKENS)
    if blocks >= needed:
        return blocks
    fitting = max(0, blocks) * BLOCK_TOKENS
    remedy = f"lower max_model_len to at most {fitting}, or " if fitting else ""
    if given:
        raise PoolTooSmall(
            f"kv_blocks is {blocks}, but one sequence of max_model_len {max_model_len} tokens takes {needed} "
            f"blocks: {remedy}raise kv_blocks"
        )
    raise PoolTooSmall(
        f"memory for {max(0, blocks)} KV blocks of {bytes_per_block} bytes a rank is left, but one sequence "
        f"of max_model_len {max_model_len} tokens takes {needed}: {remedy}free memory, raise memory_fraction "
        "or kv_blocks, or use more ranks"
    )


def too_large(blocks: int, bytes_per_block: int, ranks: int, available_bytes: int) -> PoolTooLarge:
    """What to raise where `available_bytes` cannot hold the pools of `ranks` ranks."""
    needed = blocks * bytes_per_block * ranks
    most = max(0, available_bytes) // (bytes_per_block * ranks)
    # What is available changes by the moment: two digits of it, so that a second try says the same.
    most -= most % 10 ** max(0, len(str(most)) - 2)
    remedy = f"lower it to at most {most}, or leave it out" if most else "free memory"
    return PoolTooLarge(
        f"kv_blocks is {blocks}: they take {needed / 2**30:.1f} GiB ({bytes_per_block} bytes a block and "
        f"rank), but {max(0, available_bytes) / 2**30:.0f} GiB are available: {remedy}"
    )


def _cached_bytes(group: Path) -> int:
    """Of files that were read or written, such as a model's: the kernel gives them up for new allocations."""
    lines = (group / "memory.stat").read_text().splitlines()
    counts = dict(line.split() for line in lines if line.startswith(("active_file ", "inactive_file ")))
    return sum(map(int, counts.values()))


def _cgroups() -> list[Path]:
    """This process's cgroup and those around it, innermost first; empty without cgroup v2."""
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
