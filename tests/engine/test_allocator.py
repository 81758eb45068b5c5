"""What malloc keeps of freed memory."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys
from engine.allocator import return_freed_memory

def resident_mb():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20

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


def left_mb(returns: str) -> int:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, returns], capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


def test_freed_large_blocks_return_to_the_system_although_small_ones_lie_between_them() -> None:
    assert left_mb("yes") < 20
    assert left_mb("no") > 50, "glibc returns them by itself: the setting is not needed any more"
