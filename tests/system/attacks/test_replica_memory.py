"""Tests that a CPU replica's memory rises until every block of its KV cache has been used, and no further."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.checkpoints import write_constant_checkpoint
from tests.system.service import Service, service
from tests.system.usage import MEGABYTE, fill_kv_cache

pytestmark = pytest.mark.system


def test_memory_rises_with_the_first_use_of_each_kv_block_and_then_stays(tmp_path: Path) -> None:
    draw, blocks = random.Random(11), 1000
    model = write_constant_checkpoint(tmp_path / "demo", token_id=100, head_dim=64)
    with service("--model", f"demo={model}", "--kv-blocks", str(blocks), kind=Service) as running:
        kv_mb = running.replica()["kv_bytes"] / MEGABYTE
        # The first prompts of this length also allocate a workspace and compile kernels, so they are not
        # measured.
        first = fill_kv_cache(running, 30, draw)
        full = fill_kv_cache(running, blocks, draw)
        again = fill_kv_cache(running, blocks, draw)
    assert kv_mb > 50  # far more than this small model's workspace, which the allocator sometimes frees
    assert 0.7 * kv_mb < full - first < 1.1 * kv_mb
    assert again - full < 0.1 * kv_mb
