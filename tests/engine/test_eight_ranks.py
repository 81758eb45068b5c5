"""Tests that eight ranks on a CPU generate the same tokens as one rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.generate import LocalEngine
from engine.messages import ReplicaSpec, SamplingParams
from tests.engine.rank_group import Member, RankEngine, results, start_ranks
from tests.engine.tiny import TINY

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]

RANKS = 8
SHAPE = TINY | {"num_attention_heads": 8, "head_dim": 16, "num_key_value_heads": 2, "intermediate_size": 96}
"""A shape in which each KV head is replicated on four ranks and the last rank's part of the vocabulary is
padded."""
PROMPTS = [[(7 * place + 13 * start) % 150 + 3 for place in range(5 + 40 * start)] for start in range(4)]
REQUESTS = [
    SamplingParams(max_tokens=20, ignore_eos=True),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=1.0, seed=3),
    SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, top_p=0.9, top_k=20, seed=4),
    SamplingParams(max_tokens=8, ignore_eos=True, logprobs=3),
]


def serve(member: Member, spec: ReplicaSpec) -> Any:
    runner = member.runner(spec)
    if member.rank > 0:
        member.follow_rank_0(runner)
        return None
    engine = RankEngine(spec, runner, member.peers)
    tokens = [samples[0].token_ids for samples in engine.generate(PROMPTS, REQUESTS)]
    engine.release_peers()
    return tokens


def test_eight_ranks_generate_the_tokens_of_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    fields: dict[str, Any] = {
        "replica": "test-0",
        "model_path": str(tmp_path),
        "load_format": "dummy",
        "device": "cpu",
        "kv_blocks": 32,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 256,
    }
    on_eight = ReplicaSpec(**fields, tensor_parallel_size=RANKS)
    started = start_ranks(RANKS, tmp_path / "ranks", "cpu", serve, on_eight)
    found = results(started, tmp_path / "ranks", 540.0)[0]
    engine = LocalEngine(ReplicaSpec(**fields))
    assert found == [samples[0].token_ids for samples in engine.generate(PROMPTS, REQUESTS)]
    engine.close()
