"""Tests that the sizes predicted from the config equal the actual sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import sizing
from engine.config import ModelConfig
from engine.families import read_config
from engine.model.decoder import TORCH_DTYPES, Decoder
from kernels import select_backend

from .checkpoints import EXPERTS, OLMOE_EXPERTS, QWEN2_EXPERTS, QWEN3_EXPERTS, SMALL, Case, make, oracle

CASES = [
    Case("llama", "llama"),
    Case(
        "tied with biases", "llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    Case("mistral", "mistral", {"head_dim": 24}),
    Case("qwen2", "qwen2"),
    Case("qwen3", "qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    Case("qwen3 moe", "qwen3_moe", {**QWEN3_EXPERTS, "mlp_only_layers": [1]}),
    Case("qwen2 moe", "qwen2_moe", QWEN2_EXPERTS),
    Case("mixtral", "mixtral", EXPERTS),
    Case("olmoe", "olmoe", {**OLMOE_EXPERTS, "num_key_value_heads": 4}),
]
STEP: dict[str, Any] = {
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "max_model_len": 512,
    "on_gpu": False,
}


class FirstRank:
    """A stand-in for rank 0 of a group, without communication."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp("model"))


def test_parameters_are_those_of_transformers(folder: Path) -> None:
    expected = sum(parameter.numel() for parameter in oracle(folder).parameters())
    assert sizing.parameters(read_config(folder)) == expected


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(
    ("dtype", "weights", "kv_fp8"),
    [
        ("float32", "float32", False),
        ("bfloat16", "bfloat16", False),
        ("bfloat16", "fp8", True),
        ("float32", "fp8-block", False),
    ],
)
def test_weights_and_blocks_are_exact(
    folder: Path, size: int, dtype: str, weights: str, kv_fp8: bool
) -> None:
    config = read_config(folder)
    layouts = [config] if config.experts is None else [config, config.with_whole_experts()]
    for layout in layouts:
        _check_sizes(layout, size, dtype, weights, kv_fp8)


def _check_sizes(config: ModelConfig, size: int, dtype: str, weights: str, kv_fp8: bool) -> None:
    ranks: Any = FirstRank(size)
    cpu, ops = torch.device("cpu"), select_backend("cpu")
    fp8, fp8_blocks = weights != dtype, weights == sizing.FP8_BLOCKS
    decoder = Decoder(
        config, ranks, ops, TORCH_DTYPES[dtype], cpu, fp8=fp8, fp8_blocks=fp8_blocks, kv_fp8=kv_fp8
    )
    predicted = sizing.predict(
        config,
        dtype=dtype,
        weights=weights,
        kv_cache_dtype=sizing.FP8 if kv_fp8 else dtype,
        tensor_parallel_size=size,
        blocks=5,
        **STEP,
    )
    pieces = decoder.weight_shards()
    held = [each for piece in pieces for each in (piece.target, piece.scales) if each is not None]
    assert any(each.dtype == torch.float8_e4m3fn for each in held) == fp8
    assert predicted.weight_bytes == sum(each.nbytes for each in held)
    pools = decoder.allocate_kv(5)
    # `tensors()` must list all tensors of the cache, because copies and clears of blocks use it.
    assert predicted.kv_bytes == sum(each.nbytes for pool in pools for each in pool.tensors())
    assert (pools[0].keys.dtype == torch.float8_e4m3fn) == kv_fp8
    assert pools[0].keys.shape == decoder.kv_shape(5)
    assert predicted.total_bytes == predicted.fixed_bytes + predicted.kv_bytes


def test_a_known_model_has_its_known_size(tmp_path: Path) -> None:
    """Checks the sizes of Llama 3.1 8B: 8,030,261,248 parameters, and 128 KiB of bfloat16 KV per token."""
    big = {
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "vocab_size": 128256,
    }
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, **big, "model_type": "llama"}))
    config = read_config(tmp_path)
    assert sizing.parameters(config) == 8_030_261_248
    assert sizing.kv_bytes_per_block(config, "bfloat16", 1) == 64 * 128 * 1024
    assert sizing.kv_bytes_per_block(config, "bfloat16", 8) == 64 * 16 * 1024
    assert sizing.kv_bytes_per_block(config, "bfloat16", 16) == 64 * 16 * 1024
    # Each element takes one byte. In every layer, each head of a token also takes 4 bytes for the scale of
    # its key and 4 bytes for the scale of its value. The total is 33/64 of the size in bfloat16.
    assert sizing.kv_bytes_per_block(config, "fp8", 1) == 64 * 66 * 1024
