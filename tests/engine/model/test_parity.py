"""Tests that logits and greedy tokens, computed with the paged cache, equal those of transformers for every
model family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.families import read_config
from engine.model.decoder import Decoder
from engine.model.loader import load
from engine.parallel import single
from engine.progress import no_progress
from kernels import select_backend

from .checkpoints import EXPERTS, OLMOE_EXPERTS, QWEN2_EXPERTS, QWEN3_EXPERTS, Case, make, oracle
from .driver import Driver, greedy, load_decoder, teacher_forced

TOLERANCE = 2e-5
LENGTHS = [1, 2, 63, 64, 65, 127, 128, 129, 190, 300]
CHUNKS = [100, 7, 64]
DECODES = 6


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 5000.0, "rope_type": kind, **fields}}


def _in_the_words_of_version_4(values: dict[str, Any]) -> None:
    rope = values.pop("rope_parameters")
    values["rope_theta"] = rope.pop("rope_theta")
    values["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    values["torch_dtype"] = values.pop("dtype")


def _as_published(values: dict[str, Any]) -> None:
    values["num_experts"] = values.pop("num_local_experts")


CASES = [
    Case("llama 2, as many KV heads as heads", "llama", {"num_key_value_heads": 4}),
    Case(
        "llama, tied, one KV head, in shards",
        "llama",
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        shard_size="60KB",
    ),
    Case(
        "llama with all biases, wide heads",
        "llama",
        {"attention_bias": True, "mlp_bias": True, "head_dim": 24},
    ),
    Case("llama, linear rope", "llama", _rope("linear", factor=3.0)),
    Case(
        "llama 3.1 rope",
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    Case(
        "llama 3.1 rope, older fields",
        "llama",
        _rope(
            "llama3",
            factor=4.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=128,
        ),
        edit=_in_the_words_of_version_4,
    ),
    Case("llama, yarn", "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    Case(
        "llama, yarn with every field",
        "llama",
        _rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=64,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=0.9,
            mscale_all_dim=0.4,
            truncate=False,
        ),
    ),
    Case(
        "qwen2, yarn with its own attention factor",
        "qwen2",
        _rope("yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=1.2),
    ),
    Case("llama, dynamic rope within its positions", "llama", _rope("dynamic", factor=4.0)),
    Case("mistral, no window", "mistral", {"sliding_window": None, "head_dim": 32}),
    Case("mistral, a window below a block", "mistral", {"sliding_window": 50}),
    Case("qwen2", "qwen2", shard_size="100KB"),
    Case(
        "qwen2, tied, windows in the upper layers",
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 70,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
        },
        edit=lambda values: values.pop("layer_types"),
    ),
    Case(
        "qwen3, tied, with biases",
        "qwen3",
        {"head_dim": 16, "attention_bias": True, "tie_word_embeddings": True},
    ),
    Case("mixtral, fused experts, in shards", "mixtral", EXPERTS, shard_size="100KB", fused_experts=True),
    Case(
        "mixtral, a window, one expert per token",
        "mixtral",
        {**EXPERTS, "sliding_window": 50, "num_experts_per_tok": 1},
    ),
    Case(
        "qwen3 moe, normalised, fused experts, a dense layer",
        "qwen3_moe",
        {**QWEN3_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [1]},
        fused_experts=True,
    ),
    Case(
        "qwen3 moe, every other layer dense, as published",
        "qwen3_moe",
        {**QWEN3_EXPERTS, "decoder_sparse_step": 2, "attention_bias": True},
        edit=_as_published,
    ),
    Case(
        "qwen3 moe, windows, every expert chosen",
        "qwen3_moe",
        {**QWEN3_EXPERTS, "use_sliding_window": True, "sliding_window": 70, "num_experts_per_tok": 8},
    ),
    Case(
        "qwen2 moe, normalised, windows, no biases",
        "qwen2_moe",
        {
            **QWEN2_EXPERTS,
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 70,
            "max_window_layers": 2,
        },
        edit=lambda values: values.pop("layer_types"),
    ),
    Case(
        "qwen2 moe, the first layer dense, in shards",
        "qwen2_moe",
        {**QWEN2_EXPERTS, "mlp_only_layers": [0]},
        shard_size="100KB",
    ),
    Case("olmoe", "olmoe", OLMOE_EXPERTS),
    Case(
        "olmoe, normalised, with biases",
        "olmoe",
        {**OLMOE_EXPERTS, "norm_topk_prob": True, "attention_bias": True, "num_key_value_heads": 4},
    ),
]


def _tokens(count: int, vocab_size: int) -> list[int]:
    return torch.randint(3, vocab_size, (count,), generator=torch.Generator().manual_seed(7)).tolist()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_and_greedy_tokens_equal_those_of_transformers(case: Case, tmp_path: Path) -> None:
    folder = make(case, tmp_path)
    model = oracle(folder)
    decoder = load_decoder(folder)
    tokens = _tokens(max(LENGTHS) + DECODES, decoder.config.vocab_size)
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    assert expected.std() > 0.3, "the logits are too small for a meaningful comparison"

    chunk_sizes = [CHUNKS[index % len(CHUNKS)] for index in range(len(LENGTHS))]
    found = teacher_forced(Driver(decoder, blocks=48), tokens, LENGTHS, chunk_sizes, DECODES)
    for length, chunk, logits in zip(LENGTHS, chunk_sizes, found, strict=True):
        difference = (logits - expected[: length + DECODES]).abs().max().item()
        assert difference < TOLERANCE, f"prompt of {length} in chunks of {chunk}"

    prompt = tokens[:120]
    with torch.no_grad():
        reply = model.generate(
            torch.tensor([prompt]), max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    wanted = reply[0, len(prompt) :].tolist()
    got, gaps = greedy(Driver(decoder, blocks=8, seed=1), prompt, 16, chunk_size=64)
    for token, other, gap in zip(got, wanted, gaps, strict=True):
        if token != other:
            assert gap < TOLERANCE
            break


@pytest.mark.parametrize("chunk", CHUNKS)
def test_any_chunk_size_gives_the_logits_of_transformers(chunk: int, tmp_path: Path) -> None:
    folder = make(Case("window", "mistral", {"sliding_window": 90}), tmp_path)
    decoder = load_decoder(folder)
    tokens = _tokens(310, decoder.config.vocab_size)
    with torch.no_grad():
        expected = oracle(folder)(torch.tensor([tokens])).logits[0]
    lengths = [*LENGTHS, 8, 14, 99, 100, 101, 199, 200, 201]
    found = teacher_forced(Driver(decoder, blocks=80), tokens, lengths, [chunk] * len(lengths), 3)
    for length, logits in zip(lengths, found, strict=True):
        assert (logits - expected[: length + 3]).abs().max() < TOLERANCE, length


def test_dynamic_rope_is_frozen_at_the_maximum_length(tmp_path: Path) -> None:
    """transformers derives the RoPE base from the longest sequence that it has processed. Results are
    therefore equal only if that sequence has max_model_len tokens."""
    changes = {"max_position_embeddings": 128, **_rope("dynamic", factor=4.0)}
    folder = make(Case("dynamic", "llama", changes), tmp_path)
    tokens = _tokens(300, 157)
    with torch.no_grad():
        expected = oracle(folder)(torch.tensor([tokens])).logits[0]
    decoder = load_decoder(folder, max_model_len=300)
    (found,) = teacher_forced(Driver(decoder, blocks=8), tokens, [290], [64], 10)
    assert (found - expected).abs().max() < TOLERANCE
    with torch.no_grad():
        short = oracle(folder)(torch.tensor([tokens[:100]])).logits[0]
    assert (found[:100] - short).abs().max() > 1e-2, "short sequences use the frozen base, too"


def test_weights_in_bfloat16_are_run_in_float32_as_transformers_does(tmp_path: Path) -> None:
    folder = make(Case("bf16", "qwen3", {"head_dim": 16}), tmp_path, torch.bfloat16)
    decoder = load_decoder(folder)
    assert decoder.config.dtype == "bfloat16"
    tokens = _tokens(80, decoder.config.vocab_size)
    with torch.no_grad():
        expected = oracle(folder)(torch.tensor([tokens])).logits[0]
    (found,) = teacher_forced(Driver(decoder, blocks=4), tokens, [70], [64], 10)
    assert (found - expected).abs().max() < TOLERANCE


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_decoder_in_half_precision_stays_near_float32(dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make(Case("half", "llama", {"attention_bias": True}), tmp_path)
    config = read_config(folder)
    decoder = Decoder(config, single(), select_backend("cpu"), dtype, torch.device("cpu"))
    load(decoder, folder, no_progress)
    tokens = _tokens(140, config.vocab_size)
    (found,) = teacher_forced(Driver(decoder, blocks=4), tokens, [130], [64], 10)
    (exact,) = teacher_forced(Driver(load_decoder(folder), blocks=4), tokens, [130], [64], 10)
    assert found.dtype == dtype
    found = found.float()
    assert (found - exact).abs().max() < (0.15 if dtype == torch.bfloat16 else 0.02)
