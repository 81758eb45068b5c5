"""Tests of the size of the KV cache on a simulated GPU. The cache takes all memory that nothing else
needs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine import parallel
from engine.kv_memory import RankKvCache
from engine.memory import PoolTooSmall
from engine.messages import BLOCK_TOKENS, ReplicaSpec
from engine.rank_memory import GpuMemory
from engine.rank_messages import Progress
from engine.sizing import Sizing
from kernels import KvPool
from tests.engine.fake_driver import GRANULARITY, FakeDriver

TOTAL = 2000 * GRANULARITY
LAYERS = 3
BLOCK_SHAPE = (2, BLOCK_TOKENS, 8)
BLOCK_BYTES = LAYERS * 2 * 2 * BLOCK_TOKENS * 8 * 2


class Gpu:
    """A GPU's memory. `other_bytes` are used by weights and steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, other_bytes: int) -> None:
        self.driver = FakeDriver(TOTAL)
        self.other_bytes = other_bytes
        self.notes: list[str] = []
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (self.free_bytes, TOTAL))
        # The tensors of the simulated GPU are in host memory.
        monkeypatch.setattr(RankKvCache, "_least_over_ranks", lambda cache, number: number)

    @property
    def free_bytes(self) -> int:
        return TOTAL - self.other_bytes - self.driver.mapped_bytes

    def progress(self, report: Progress) -> None:
        if report.note:
            self.notes.append(report.note)

    def cache(self, **changes: Any) -> RankKvCache:
        fields: dict[str, Any] = {"replica": "r-0", "model_path": "", "gpu_memory_utilization": 0.75}
        spec = ReplicaSpec(**{**fields, **changes})
        sizes = Sizing(
            weight_bytes=0, kv_bytes_per_block=BLOCK_BYTES, kv_blocks=0, activation_bytes=0, table_bytes=0
        )
        length = spec.max_model_len or self.decoder.config.context_length
        memory = GpuMemory(self.driver, torch.device("cpu"), TOTAL)
        return RankKvCache(self.decoder, spec, sizes, memory, length)

    @property
    def decoder(self) -> Any:
        def allocate_kv(blocks: int, made: Any) -> list[KvPool]:
            shape = (blocks, *BLOCK_SHAPE)
            return [KvPool(made(shape, torch.float16), made(shape, torch.float16)) for _ in range(LAYERS)]

        return SimpleNamespace(
            device=torch.device("cuda", 0),
            ranks=parallel.single(),
            config=SimpleNamespace(context_length=100 * BLOCK_TOKENS),
            allocate_kv=allocate_kv,
        )


def test_the_cache_takes_the_memory_that_steps_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, other_bytes=100 * GRANULARITY)
    cache = gpu.cache(max_model_len=256)
    cache.allocate(gpu.progress)
    assert cache.blocks == 1400 * GRANULARITY // BLOCK_BYTES
    keys = cache.pools[0].keys
    assert gpu.driver.mapped_bytes == 2 * LAYERS * GRANULARITY
    gpu.other_bytes += 300 * GRANULARITY  # for CUDA graphs and the largest steps
    cache.grow(gpu.progress)
    assert cache.blocks == 1100 * GRANULARITY // BLOCK_BYTES
    for pool in cache.pools:
        assert pool.keys.shape == pool.values.shape == (cache.blocks, *BLOCK_SHAPE)
        assert not pool.keys.any() and not pool.values.any()
    assert cache.pools[0].keys.data_ptr() == keys.data_ptr()
    used = TOTAL - gpu.free_bytes
    assert 0.75 * TOTAL - BLOCK_BYTES - 2 * LAYERS * GRANULARITY < used <= 0.75 * TOTAL
    assert gpu.notes == []


def test_the_maximum_length_is_lowered_to_what_fits_and_reported_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch, other_bytes=1410 * GRANULARITY)
    cache = gpu.cache()
    cache.allocate(gpu.progress)
    gpu.other_bytes += 30 * GRANULARITY
    cache.grow(gpu.progress)
    assert cache.blocks < 100 and cache.max_model_len == cache.blocks * BLOCK_TOKENS
    (note,) = gpu.notes
    assert note.endswith(f"limits sequences to {cache.max_model_len} tokens (the checkpoint allows 6400)")


def test_too_little_memory_is_refused_before_and_after_the_steps_have_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch, other_bytes=1490 * GRANULARITY)
    with pytest.raises(PoolTooSmall, match="lower max_model_len to at most 192, or free memory"):
        gpu.cache(max_model_len=256).allocate(gpu.progress)
    gpu.other_bytes = 1000 * GRANULARITY
    cache = gpu.cache(max_model_len=256)
    cache.allocate(gpu.progress)
    gpu.other_bytes = 1490 * GRANULARITY
    with pytest.raises(PoolTooSmall, match="lower max_model_len to at most 128, or free memory"):
        cache.grow(gpu.progress)


def test_a_configured_number_of_blocks_is_allocated_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(monkeypatch, other_bytes=0)
    cache = gpu.cache(kv_blocks=40)
    cache.allocate(gpu.progress)
    held = gpu.driver.mapped_bytes
    assert held == 40 * BLOCK_BYTES and cache.max_model_len == 40 * BLOCK_TOKENS
    cache.grow(gpu.progress)
    assert cache.blocks == 40 and gpu.driver.mapped_bytes == held
