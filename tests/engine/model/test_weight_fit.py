"""Tests that weights too large for a device are refused before any memory is allocated. The error must
contain both sizes and a remedy."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch

from engine import memory
from engine.bench.shapes import write_config
from engine.config import ModelConfig
from engine.families import read_config
from engine.memory import StepsTooLarge, WeightsTooLarge
from engine.messages import ReplicaSpec
from engine.model.decoder import Decoder
from engine.model.loader import load_dummy
from engine.model.weight_fit import WeightFit
from engine.parallel import single
from engine.sizing import weight_bytes
from engine.step_memory import steps_fit
from kernels import select_backend
from tests.engine.tiny import TINY

GIB = 2**30
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def tiny(tmp_path: Path) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return read_config(tmp_path)


@pytest.fixture
def big(tmp_path: Path) -> ModelConfig:
    return read_config(write_config("llama-3.1-70b", tmp_path))


def gpu(monkeypatch: pytest.MonkeyPatch, free: float, total: float, reserved: float = 0) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free * GIB), int(total * GIB)))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: int(reserved * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA Z9")


def fit(
    config: ModelConfig, dtype: str, fp8: bool = False, device: torch.device = CUDA, ranks: int = 1
) -> WeightFit:
    return WeightFit(config, config.shard(ranks, 0), dtype, fp8, device)


def test_a_model_that_exactly_fits_the_host_is_allocated_and_a_larger_one_is_refused(
    tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = weight_bytes(tiny, tiny.shard(1, 0), "float32", "float32")

    def made(available: int) -> Decoder:
        monkeypatch.setattr(memory, "available_host_bytes", lambda: available)
        return Decoder(tiny, single(), select_backend("cpu"), torch.float32, CPU)

    assert load_dummy(made(needed), seed=0) == needed
    with pytest.raises(
        WeightsTooLarge, match=r"the weights take .* GiB per rank \(float32\), but .* available"
    ):
        made(needed - 1)


@pytest.mark.parametrize(
    ("available", "remedy"),
    [
        (20, 'free memory, or set quantization = "fp8" (10.4 GiB), or set dtype = "bfloat16" (15.0 GiB)'),
        (12, 'free memory, or set quantization = "fp8" (10.4 GiB)'),
        (8, "free memory"),
    ],
)
def test_the_error_advises_settings_with_which_the_weights_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, available: int, remedy: str
) -> None:
    config = read_config(write_config("llama-3.1-8b", tmp_path))
    monkeypatch.setattr(memory, "available_host_bytes", lambda: available * GIB)
    with pytest.raises(WeightsTooLarge) as refused:
        fit(config, "float32", device=CPU).check()
    assert str(refused.value) == (
        f"the weights take 29.9 GiB per rank (float32), but only {available}.0 GiB of host memory are "
        f"available: {remedy}"
    )


def test_weights_are_compared_with_the_total_memory_of_a_gpu(
    big: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, free=3, total=79.2)
    with pytest.raises(WeightsTooLarge) as refused:
        fit(big, "bfloat16").check()
    assert str(refused.value) == (
        "the weights take 131.4 GiB per rank (bfloat16), but NVIDIA Z9 has 79.2 GiB: use more GPUs "
        '(tensor_parallel_size), or set quantization = "fp8" (67.7 GiB)'
    )
    fit(big, "bfloat16", fp8=True).check()
    fit(big, "bfloat16", ranks=2).check()
    gpu(monkeypatch, free=3, total=60)
    with pytest.raises(
        WeightsTooLarge, match=r"take 67.7 GiB per rank \(fp8\), but .* \(tensor_parallel_size\)$"
    ):
        fit(big, "bfloat16", fp8=True).check()


def test_running_out_of_memory_is_reported_with_sizes(
    big: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu(monkeypatch, free=0.5, total=140.4, reserved=139)
    fit(big, "bfloat16").check()
    with pytest.raises(WeightsTooLarge) as refused, fit(big, "bfloat16").explained():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total of")
    assert str(refused.value) == (
        "the weights take 131.4 GiB per rank (bfloat16), and loading them needs more than the 139.5 GiB "
        "that are free on NVIDIA Z9 (140.4 GiB in total): use more GPUs (tensor_parallel_size), or set "
        'quantization = "fp8" (67.7 GiB)'
    )


def test_ranks_on_a_cpu_share_the_host(tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = tiny.shard(2, 0)
    needed = weight_bytes(tiny, shard, "float32", "float32")
    one = WeightFit(tiny, shard, "float32", False, CPU, ranks=2)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 2 * needed)
    one.check()
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 2 * needed - 1)
    with pytest.raises(WeightsTooLarge, match="memory are available for 2 ranks"):
        one.check()


def test_steps_that_run_out_of_memory_are_reported_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(monkeypatch, free=2, total=24, reserved=21)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 16 * GIB)
    spec = ReplicaSpec(replica="r", model_path="m", max_num_seqs=1024, max_num_batched_tokens=8192)
    with pytest.raises(StepsTooLarge) as refused, steps_fit(spec, CUDA):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert str(refused.value) == (
        "steps with max_num_batched_tokens 8192 and max_num_seqs 1024 do not fit on NVIDIA Z9, where 17.0 of "
        "24.0 GiB are in use: lower max_num_batched_tokens or max_num_seqs, or use more GPUs "
        "(tensor_parallel_size)"
    )
    given = msgspec.structs.replace(spec, kv_blocks=9)
    lower = r"kv_blocks 9 do not fit .* lower kv_blocks, max_num_batched_tokens or max_num_seqs"
    with pytest.raises(StepsTooLarge, match=lower), steps_fit(given, CUDA):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_loading_without_enough_memory_is_reported_with_sizes(
    tiny: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = Decoder(tiny, single(), select_backend("cpu"), torch.float32, CPU)
    gpu(monkeypatch, free=0, total=1)

    def out_of_memory(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr("engine.model.loader._randomise", out_of_memory)
    with pytest.raises(WeightsTooLarge, match=r"on NVIDIA Z9 \(1\.0 GiB in total\)"):
        load_dummy(decoder, seed=0)


def test_the_cache_of_files_in_a_cgroup_counts_as_available(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "service"
    inner.mkdir()
    monkeypatch.setattr(memory, "_cgroups", lambda: [inner, tmp_path])
    assert memory.available_host_bytes() > 64 << 20
    (inner / "memory.max").write_text(f"{64 << 20}\n")
    (inner / "memory.current").write_text(f"{60 << 20}\n")
    stat = {"anon": 20 << 20, "file": 40 << 20, "inactive_file": 25 << 20, "active_file": 15 << 20}
    (inner / "memory.stat").write_text("".join(f"{name} {value}\n" for name, value in stat.items()))
    assert memory.available_host_bytes() == 44 << 20
