"""Tests that C libraries return freed memory to the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

BEGINNING = """
import os, sys, time
from engine import process_memory
from engine.process_memory import bound_kernel_caches, return_freed_memory, return_memory_periodically

def resident_mb():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20
"""

LARGE_BLOCKS = """
if sys.argv[1] == "yes":
    return_freed_memory()
before = resident_mb()
bytes(bytearray(16 << 20))  # glibc raises its threshold when such a block is freed
large, small = [], []
for _ in range(50):
    large.append(b"x" * (2 << 20))
    small.append(bytearray(4000))
large.clear()
print(resident_mb() - before)
"""

SMALL_BLOCKS = """
if sys.argv[1] == "yes":
    process_memory.TRIM_EVERY_S = 0.1
    return_memory_periodically()
before = resident_mb()
blocks = [b"x" * 20_000 for _ in range(5000)]
last = b"x" * 20_001  # keeps glibc from returning the blocks below it
blocks.clear()
deadline = time.monotonic() + (60 if sys.argv[1] == "yes" else 1)
while resident_mb() - before >= 20 and time.monotonic() < deadline:
    time.sleep(0.05)
print(resident_mb() - before)
"""

KERNELS = """
if sys.argv[1] == "yes":
    bound_kernel_caches()
import torch
weight = torch.ops.mkldnn._reorder_linear_weight(torch.randn(64, 64))
for tokens in range(1, 900):
    if tokens == 400:
        before = resident_mb()
    torch.ops.mkldnn._linear_pointwise(torch.randn(tokens, 64), weight, None, "none", [], "")
print(resident_mb() - before)
"""


def growth_mb(program: str, bounded: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", BEGINNING + program, bounded],
        capture_output=True,
        text=True,
        timeout=600,
        check=True,
        env={key: value for key, value in os.environ.items() if "CACHE_CAPACITY" not in key},
    )
    return int(done.stdout)


def test_freed_large_blocks_return_to_the_system_although_small_ones_lie_between_them() -> None:
    assert growth_mb(LARGE_BLOCKS, "yes") < 20
    assert growth_mb(LARGE_BLOCKS, "no") > 50, (
        "glibc returns large blocks without the setting, so it is no longer needed"
    )


def test_freed_small_blocks_return_to_the_system_periodically() -> None:
    assert growth_mb(SMALL_BLOCKS, "yes") < 20
    assert growth_mb(SMALL_BLOCKS, "no") > 50, (
        "glibc returns small blocks without the thread, so it is no longer needed"
    )


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_new_numbers_of_tokens_take_no_more_memory_once_the_kernel_caches_are_full() -> None:
    assert growth_mb(KERNELS, "yes") < 20
    assert growth_mb(KERNELS, "no") > 40, (
        "the caches stay small without the setting, so it is no longer needed"
    )
