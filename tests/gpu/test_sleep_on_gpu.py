"""Tests that a sleeping replica on a GPU releases its memory and is unchanged after waking."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engine import device_arena
from engine.cuda_driver import CudaDriver
from engine.device_arena import DeviceArena
from engine.generate import LocalEngine
from engine.memory import resident_bytes
from engine.messages import ReplicaSpec, SamplingParams
from engine.rank_memory import GpuMemory
from engine.sleeping import RankSleep
from tests.demo_model.asking import engine, questions
from tests.engine.rank_group import Member, RankEngine, results, start_ranks
from tests.gpu.test_ranks_on_gpu import SHAPE

pytestmark = pytest.mark.gpu

MIB = 1 << 20
SLACK = 64 * MIB
"""Allowed difference, in bytes, between measurements of the GPU's memory. The memory used by other processes
on the GPU and by torch's caches of small blocks changes by less than this."""
CUDA = torch.device("cuda", 0)


def used_bytes() -> int:
    free, total = torch.cuda.mem_get_info(CUDA)
    return int(total - free)


@pytest.fixture(autouse=True)
def freed() -> Iterator[None]:
    """Free the memory of earlier tests before the test, and the memory of this test after it."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


def test_the_arena_keeps_addresses_and_graphs_replay_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device_arena, "PIECE_BYTES", 64 * MIB)
    memory = GpuMemory(CudaDriver(CUDA), CUDA, torch.cuda.get_device_properties(CUDA).total_memory)
    weight = memory.empty_weights((4096, 8192), torch.bfloat16).normal_()
    bias = memory.empty_weights((4096,), torch.bfloat16).normal_()
    cache = memory.zeroed_kv((128 * MIB,), torch.bfloat16)
    assert (weight.device, weight.dtype) == (CUDA, torch.bfloat16)
    assert all(tensor.data_ptr() % device_arena.ALIGNMENT == 0 for tensor in (weight, bias, cache))
    x, out = torch.randn(16, 8192, device=CUDA).bfloat16(), torch.empty(16, 4096, device=CUDA).bfloat16()

    def compute() -> None:
        cache[:16] += 1
        torch.matmul(x, weight.t(), out=out)
        out.add_(bias).add_(cache[:1])

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        compute()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        compute()
        graph.capture_end()
    torch.cuda.synchronize()
    cache.zero_()
    graph.replay()
    torch.cuda.synchronize()
    expected, kept = out.clone(), weight.clone()
    addresses = [tensor.data_ptr() for tensor in (weight, bias, cache)]
    sleep = RankSleep(memory, 1, list)
    held, used = memory.held_bytes, used_bytes()
    assert held >= weight.nbytes + bias.nbytes + cache.nbytes
    for _ in range(3):
        slept = sleep.change(True)
        assert slept.asleep, slept.problem
        assert slept.freed_bytes == held and memory.held_bytes == 0
        assert used - used_bytes() >= held - SLACK
        # Other tensors can use the released memory.
        other = torch.full((held // 2,), 7, dtype=torch.uint8, device=CUDA)
        assert int(other[-1]) == 7
        del other
        torch.cuda.empty_cache()
        out.zero_()
        woken = sleep.change(False)
        assert not woken.asleep, woken.problem
        assert [tensor.data_ptr() for tensor in (weight, bias, cache)] == addresses
        assert torch.equal(weight, kept)
        assert not cache.any()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, expected)


def test_an_arena_that_is_no_longer_used_returns_its_memory() -> None:
    before = used_bytes()
    arena = DeviceArena(CudaDriver(CUDA), 1 << 34)
    tensor = arena.empty((512 * MIB,), torch.uint8).fill_(1)
    assert used_bytes() - before >= 500 * MIB
    del arena
    gc.collect()
    assert int(tensor[-1]) == 1
    del tensor
    gc.collect()
    assert used_bytes() - before < SLACK


def test_lack_of_memory_is_reported_and_the_rank_can_wake_later() -> None:
    _, total = torch.cuda.mem_get_info(CUDA)
    memory = GpuMemory(CudaDriver(CUDA), CUDA, total)
    with pytest.raises(torch.OutOfMemoryError):
        memory.empty_weights((total - 512 * MIB,), torch.uint8)
    weight = memory.empty_weights((256 * MIB,), torch.uint8).fill_(3)
    memory.zeroed_kv((4 << 30,), torch.uint8)
    sleep = RankSleep(memory, 1, list)
    assert sleep.change(True).asleep
    free, _ = torch.cuda.mem_get_info(CUDA)
    other = torch.empty(free - (2 << 30), dtype=torch.uint8, device=CUDA)
    refused = sleep.change(False)
    assert refused.asleep and "weights and KV cache need 4.2 GiB" in refused.problem
    assert memory.held_bytes == 0
    del other
    torch.cuda.empty_cache()
    assert not sleep.change(False).asleep
    assert weight.eq(3).all()


def answers(made: LocalEngine) -> list[list[int]]:
    prompts, _ = questions()
    sampling = SamplingParams(max_tokens=40)
    return [samples[0].token_ids for samples in made.generate(prompts[:32], sampling)]


@pytest.mark.parametrize(
    ("weights", "kv_cache_dtype"), [("auto", "auto"), ("fp8", "fp8")], ids=["bfloat16", "FP8"]
)
def test_the_demo_model_gives_the_same_answers_in_fifty_rounds_that_leak_nothing(
    weights: str, kv_cache_dtype: str
) -> None:
    made = engine("cuda", "bfloat16", kv_cache_dtype, weights)
    expected = answers(made)
    measured = []
    for number in range(50):
        awake = used_bytes()
        slept = made.change_memory(True)
        assert slept.asleep, slept.problem
        # torch also keeps memory for other purposes. The decrease may therefore be up to SLACK less than the
        # size of the weights and the cache.
        assert slept.freed_bytes >= made.info.weight_bytes + made.info.kv_bytes
        assert awake - used_bytes() >= made.info.weight_bytes + made.info.kv_bytes - SLACK
        woken = made.change_memory(False)
        assert not woken.asleep, woken.problem
        if number % 10 == 9:
            assert answers(made) == expected
            made.runner.memory.check(1)  # waits until the copies in host memory have been freed
            measured.append((used_bytes(), resident_bytes(), len(os.listdir("/proc/self/fd"))))
    made.scheduler.check()
    made.close()
    (device, host, descriptors), (device_end, host_end, descriptors_end) = measured[0], measured[-1]
    assert device_end - device < SLACK
    assert host_end - host < SLACK
    assert descriptors_end == descriptors


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_ranks_sleep_and_wake_together(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"num_key_value_heads": 4}))
    spec = ReplicaSpec(
        replica="two-0",
        model_path=str(tmp_path),
        load_format="dummy",
        device="cuda",
        tensor_parallel_size=2,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        kv_blocks=256,
    )
    first, _ = results(start_ranks(2, tmp_path / "ranks", "cuda", sleeps_and_wakes, spec), tmp_path / "ranks")
    assert first == "done"


def sleeps_and_wakes(member: Member, spec: ReplicaSpec) -> str:
    runner = member.runner(spec)
    if member.rank:
        member.follow_rank_0(runner)
        return "done"
    made = RankEngine(spec, runner, member.peers)
    prompts = [[(7 * place + start) % 900 + 3 for place in range(40 + start)] for start in range(8)]
    sampling = SamplingParams(max_tokens=32)
    expected = [samples[0].token_ids for samples in made.generate(prompts, sampling, cache_salt="a")]
    for number in range(5):
        slept = made.change_memory(True)
        assert slept.asleep, slept.problem
        assert slept.freed_bytes >= made.info.weight_bytes + made.info.kv_bytes
        assert not made.change_memory(False).asleep
        salt = str(number)
        assert [
            samples[0].token_ids for samples in made.generate(prompts, sampling, cache_salt=salt)
        ] == expected
    made.release_peers()
    return "done"
