"""Test that a CPU replica's memory rises until every block of its KV cache has been used, and no further."""

from __future__ import annotations

import random

import psutil
import pytest

from tests.system.service import Service, service

pytestmark = pytest.mark.system

BLOCK_TOKENS = 64
PROMPT_BLOCKS = 30


def fill(running: Service, blocks: int, draw: random.Random) -> int:
    """Compute random prompts that use this number of KV blocks. Return the replica's resident memory in
    bytes."""
    with running.http() as http:
        for _ in range(blocks // PROMPT_BLOCKS + 1):
            prompt = [draw.randrange(7, 5000) for _ in range(PROMPT_BLOCKS * BLOCK_TOKENS)]
            answer = http.post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
    return int(psutil.Process(running.replica()["pids"][0]).memory_info().rss)


def test_memory_rises_with_the_first_use_of_each_kv_block_and_then_stays() -> None:
    draw, blocks = random.Random(11), 400
    with service("--kv-blocks", str(blocks)) as running:
        kv_bytes = running.replica()["kv_bytes"]
        # The first prompts of this length also allocate the workspace and compile kernels.
        fewest = fill(running, 2 * PROMPT_BLOCKS, draw)
        full = fill(running, blocks, draw)
        again = fill(running, 2 * blocks, draw)
    assert kv_bytes > 200e6
    assert 0.7 * kv_bytes < full - fewest < 1.1 * kv_bytes
    assert again - full < 0.05 * kv_bytes
