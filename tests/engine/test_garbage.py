"""Python's collector in a process that steps; in one of its own, since the change is for good."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc
from engine.garbage import settle_garbage

loaded = [[number] for number in range(100_000)]
seen = len(gc.get_objects())
settle_garbage()
left = len(gc.get_objects())
assert left < seen - len(loaded), (seen, left)
assert gc.get_freeze_count() >= len(loaded)
came = [[number] for number in range(10_000)]
assert gc.get_count()[0] >= len(came), "a collection has walked over what runs"
"""


def test_what_was_loaded_is_not_walked_over_again_and_what_runs_seldom() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
