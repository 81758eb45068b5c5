"""Tests of the garbage collector's settings. They run in a separate process, because the settings are
permanent."""

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


def test_collections_skip_loaded_objects_and_are_rare() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=600)
