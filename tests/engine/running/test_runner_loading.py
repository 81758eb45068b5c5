"""Tests of loading a replica: the properties that it reports, the size of its KV pool, and invalid
configurations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from engine import memory
from engine.config import UnsupportedError
from engine.device import DeviceError
from engine.generate import LocalEngine
from engine.memory import PoolTooLarge, PoolTooSmall, available_host_bytes
from engine.messages import ReplicaInfo, SamplingParams
from engine.parallel import single
from engine.runner import ModelRunner
from tests.engine.running.tiny_model import CONFIG, VOCAB, quiet, spec_of


def test_info_describes_the_loaded_replica(engine: LocalEngine, folder: Path) -> None:
    info: ReplicaInfo = engine.info
    assert (info.backend, info.devices, info.dtype) == ("cpu", ["cpu"], "float32")
    assert (info.kv_blocks, info.max_model_len, info.vocab_size) == (40, 256, VOCAB)
    decoder = engine.runner.decoder
    per_block = sum(2 * torch.zeros(decoder.kv_shape(1)).nbytes for _ in decoder.layers)
    assert info.kv_bytes == 40 * per_block
    assert info.weight_bytes == 4 * info.parameters


def test_without_kv_blocks_the_pool_is_sized_from_free_memory(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = ModelRunner(spec_of(folder, kv_blocks=None), single(), quiet)
    per_block = big.info().kv_bytes // big.kv_blocks
    assert big.info().kv_bytes <= memory.CPU_MAX_KV_BYTES
    assert big.info().kv_bytes > memory.CPU_MAX_KV_BYTES - per_block or available_host_bytes() < 4 << 30
    big.close()
    working = big._predict(None).activation_bytes
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 2 * (working + 7 * per_block))
    small = ModelRunner(spec_of(folder, kv_blocks=None, gpu_memory_utilization=0.5), single(), quiet)
    assert small.kv_blocks == 7
    small.close()
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 2 * (working + 3 * per_block))
    with pytest.raises(PoolTooSmall, match=r"3 KV blocks .* 256 tokens needs 4.*at most 192"):
        ModelRunner(
            spec_of(folder, kv_blocks=None, gpu_memory_utilization=0.5, max_model_len=256), single(), quiet
        )
    said: list[str] = []
    short = ModelRunner(
        spec_of(folder, kv_blocks=None, gpu_memory_utilization=0.5),
        single(),
        lambda progress: said.append(progress.note),
    )
    assert (short.kv_blocks, short.max_model_len, short.info().max_model_len) == (3, 192, 192)
    assert "memory for the KV cache limits sequences to 192 tokens (the checkpoint allows 256)" in said
    short.close()


@pytest.mark.parametrize("kv_blocks", [10, None])
def test_the_maximum_length_is_lowered_to_what_memory_holds(
    kv_blocks: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For the model's full length, the rotary table alone would take 64 TB."""
    values = {**CONFIG, "max_position_embeddings": 10**12}
    (tmp_path / "config.json").write_text(json.dumps(values))
    monkeypatch.setattr(memory, "CPU_MAX_KV_BYTES", 10 * 2 * 2 * 2 * 64 * 16 * 4)
    said: list[str] = []
    runner = ModelRunner(
        spec_of(tmp_path, kv_blocks=kv_blocks), single(), lambda progress: said.append(progress.note)
    )
    assert (runner.kv_blocks, runner.info().max_model_len) == (10, 640)
    assert (
        "memory for the KV cache limits sequences to 640 tokens (the checkpoint allows 1000000000000)" in said
    )
    runner.close()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"kv_blocks": 3, "max_model_len": 256},
            PoolTooSmall,
            r"kv_blocks is 3.*256 tokens needs 4 blocks.*at most 192",
        ),
        ({"device": "tpu"}, UnsupportedError, "device is 'tpu'"),
        ({"dtype": "int8"}, UnsupportedError, "dtype is 'int8'"),
        ({"load_format": "gguf"}, UnsupportedError, "load_format is 'gguf'"),
        ({"threads": 0}, UnsupportedError, "threads is 0"),
        ({"max_num_seqs": 0}, UnsupportedError, "max_num_seqs is 0"),
        (
            {"max_num_seqs": 65, "max_num_batched_tokens": 64},
            UnsupportedError,
            "max_num_batched_tokens is 64, but 65 sequences",
        ),
        (
            {"max_num_seqs": 2, "max_mixed_tokens": 1},
            UnsupportedError,
            "max_mixed_tokens is 1; it must be at least max_num_seqs",
        ),
        ({"gpu_memory_utilization": float("nan")}, UnsupportedError, "gpu_memory_utilization is nan"),
        ({"gpu_memory_utilization": 1.5}, UnsupportedError, "gpu_memory_utilization is 1.5"),
        (
            {"kv_blocks": 10**12},
            PoolTooLarge,
            r"kv_blocks is 1000000000000, which needs \d{4,}\.\d GiB .* GiB are available: lower it to",
        ),
        ({"max_model_len": 100_000}, UnsupportedError, "max_model_len is 100000"),
    ],
)
def test_an_invalid_spec_is_refused_with_field_and_value(
    folder: Path, changes: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ModelRunner(spec_of(folder, **changes), single(), quiet)


def test_a_pool_larger_than_the_available_memory_is_refused_despite_overcommit(folder: Path) -> None:
    most = available_host_bytes()
    per_block = 2 * 64 * 4  # the smallest possible block: one float32 element per token for keys and values
    with pytest.raises(PoolTooLarge, match="are available"):
        ModelRunner(spec_of(folder, kv_blocks=most // per_block), single(), quiet)


def test_head_dimensions_without_a_gpu_kernel_are_refused_before_loading_but_run_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"head_dim": 24}))
    made = LocalEngine(spec_of(tmp_path, device="cpu", dtype="bfloat16"))
    ((sample,),) = made.generate([[3, 4, 5]], SamplingParams(max_tokens=4))
    made.close()
    assert len(sample.token_ids) == 4

    read: list[str] = []
    monkeypatch.setattr("engine.runner.select_device", lambda *_asked: torch.device("cuda"))
    monkeypatch.setattr("engine.runner.Decoder", lambda *_given, **_options: read.append("decoder"))
    with pytest.raises(
        UnsupportedError, match=r"head_dim is 24; .* serve this model on the CPU, or in float32"
    ):
        ModelRunner(spec_of(tmp_path, device="cuda", dtype="bfloat16", max_model_len=64), single(), quiet)
    assert not read


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs only without a GPU")
def test_a_fallback_to_the_cpu_is_reported_and_an_explicit_gpu_request_fails(folder: Path) -> None:
    with pytest.raises(DeviceError, match=r'needs 1 CUDA device, but only 0 .*, or set device = "cpu"$'):
        ModelRunner(spec_of(folder, device="cuda"), single(), quiet)
    said: list[str] = []
    runner = ModelRunner(
        spec_of(folder, device="auto"), single(), lambda progress: said.append(progress.note)
    )
    assert runner.info().backend == "cpu"
    assert "no GPU found: using the CPU" in said
    runner.close()
