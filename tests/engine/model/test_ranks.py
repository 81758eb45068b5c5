"""Tests, with real processes, that several ranks compute the same results as one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.parallel import RankFailureError, join, single
from kernels.draws import BAD_TOKEN
from tests.engine.rank_group import rank_context

from . import rank_worker
from .checkpoints import OLMOE_EXPERTS, QWEN2_EXPERTS, QWEN3_EXPERTS, Case, Fp8, make, quantise

GROUPS = [
    # The vocabulary is divisible by neither number of ranks, so its last shard is padded. With 2 ranks, the
    # KV heads are split; with 4 ranks, each KV head is also replicated.
    Case("biased", "llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    Case("normed", "qwen3", {"head_dim": 32}, shard_size="100KB"),
    Case("windowed", "qwen2", {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}),
    Case("shared expert", "qwen2_moe", QWEN2_EXPERTS),
    Case("normed over heads, fused experts", "olmoe", OLMOE_EXPERTS, fused_experts=True),
]


def _run_group(size: int, folders: list[Path], tokens: list[int], folder: Path) -> dict[str, Any]:
    result = folder / "result.pt"
    context = rank_context("cpu")
    arguments = (str(folder / "rendezvous"), folders, tokens, result)
    processes = [
        context.Process(target=rank_worker.main, args=(size, rank, *arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 300
    for process in processes:
        process.join(max(0.1, deadline - time.monotonic()))
    for process in processes:
        process.kill()
    assert result.exists(), f"exit codes {[process.exitcode for process in processes]}"
    return torch.load(result)


FP8 = {
    "quantised": "meant",
    "blocks": "meant of blocks",
    "FP8 KV": "biased",
    "FP8 weights and KV": "biased",
    "FP8 experts": "shared expert",
    "whole experts, FP8": "shared expert",
    "whole experts, blocks": "meant of blocks",
}
"""Quantised variants, each with the checkpoint with whose logits it is compared."""
DIFFERENT_SCALES = 1.5
"""Maximum distance between the FP8 logits of several ranks and those of one rank, as a multiple of the
distance between one rank and the unquantised model (both as root mean squares). The scales of o and down, and
of their inputs, differ between shards, so the rounding errors differ but have the same magnitude. If the
errors were independent, the ratio would be the square root of 2."""
SAME_SCALES = 0.25
"""Like `DIFFERENT_SCALES`, but for ranks with equal scales. Their results differ only where a sum lies close
to the boundary between two e4m3 values."""
NO_WORSE = 1.25
"""Maximum distance between the FP8 logits of several ranks and those of the unquantised model, as a multiple
of the distance between one rank and the unquantised model."""


WIDER = Case("wider", "qwen3_moe", {**QWEN3_EXPERTS, "hidden_size": 192, "moe_intermediate_size": 160})
"""A model whose FP8 blocks are split across ranks."""


def _quantised(folder: Path) -> list[Path]:
    """Create two quantised checkpoints and, for each of them, an unquantised checkpoint with the dequantised
    values."""
    found = []
    for name, meant, case, how in (
        ("quantised", "meant", GROUPS[0], Fp8("per output", per_channel=True, scales_apart=True)),
        ("blocks", "meant of blocks", WIDER, Fp8("per block", blocks=True)),
    ):
        tensors = quantise(make(case, folder / name), how)
        save_file(tensors, make(case, folder / meant) / "model.safetensors")
        found += [folder / name, folder / meant]
    return found


def _distance(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    """Return the root mean square of the differences between two tensors."""
    return float((torch.cat(one) - torch.cat(other)).square().mean().sqrt())


@pytest.mark.parametrize("size", [2, 4])
def test_several_ranks_compute_the_logits_of_one_and_detect_a_death(size: int, tmp_path: Path) -> None:
    folders = [make(case, tmp_path / case.name) for case in GROUPS]
    tokens = torch.randint(3, 157, (120,), generator=torch.Generator().manual_seed(1)).tolist()
    folders += _quantised(tmp_path)
    result = _run_group(size, folders, tokens, tmp_path)
    alone = rank_worker.logits_of_all(folders, single(), tokens)
    for name, expected in alone.items():
        for found, wanted in zip(result["logits"][name], expected, strict=True):
            assert found.shape == wanted.shape
            assert name in FP8 or (found - wanted).abs().max() < 2e-5, name
    for name, plain in FP8.items():
        own = _distance(alone[name], alone[plain])
        assert own > 0.01, f"{name} is not quantised"
        among = SAME_SCALES if name == "FP8 KV" else DIFFERENT_SCALES
        assert _distance(result["logits"][name], alone[name]) < among * own, name
        assert _distance(result["logits"][name], alone[plain]) < NO_WORSE * own, name

    total = float(sum(range(size)))
    reduced, last_dim, stack, ones, added, best = result["collectives"]
    assert reduced.tolist() == [[total, 10.0 * size + total]]
    assert last_dim.tolist() == [[value for rank in range(size) for value in (rank, 10.0 + rank)]]
    assert stack.tolist() == [[[rank, 10.0 + rank]] for rank in range(size)]
    assert ones.tolist() == [size] * 3
    assert added.tolist() == [[0.5 + total, 0.5 + 10.0 * size + total]]
    assert best.tolist() == [10 * (size - 1), 1, BAD_TOKEN, BAD_TOKEN, BAD_TOKEN]

    assert f"rank 0 of {size}" in result["failure"]
    assert "restart the whole replica" in result["failure"]
    # The time is far below the group's timeout of 60 s, so the rank must have been notified of the death.
    assert result["seconds"] < 30


def test_one_rank_needs_no_group() -> None:
    ranks = join(1, 0, "", "gloo")
    tensor = torch.arange(6.0).view(2, 3)
    assert (ranks.size, ranks.rank) == (1, 0)
    assert ranks.all_reduce(tensor) is tensor
    assert ranks.all_gather_last_dim(tensor) is tensor
    assert ranks.all_gather_stack(tensor).shape == (1, 2, 3)
    ranks.close()
    single().close()


def test_a_rank_that_does_not_find_the_others_times_out(tmp_path: Path) -> None:
    with pytest.raises(
        RankFailureError, match=r"rank 0 of 2 did not find the other ranks within 0\.5 s through .*rendezvous"
    ):
        join(2, 0, str(tmp_path / "rendezvous"), "gloo", timeout_seconds=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2, "/tmp/x", "gloo"), "rank is 2; with 2 ranks it must be from 0 to 1"),
        ((2, 0, "/tmp/x", "mpi"), "backend is 'mpi'; use gloo on CPU and nccl on CUDA"),
        ((2, 0, "", "gloo"), "rendezvous_path is empty; 2 ranks need a file to find each other"),
    ],
)
def test_invalid_arguments_of_join_are_named(arguments: tuple[int, int, str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join(*arguments)
