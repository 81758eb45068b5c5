"""Assembles the engine of rank 0 from its parts: scheduler, plan channels and runner."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.core import EngineCore, StepRunner
from engine.messages import ReplicaInfo, ReplicaSpec
from engine.plan_channel import PlanSender, check_plan_size
from engine.scheduling.scheduler import Scheduler
from engine.wire import Channel


def build_core(
    spec: ReplicaSpec, info: ReplicaInfo, runner: StepRunner, peers: Sequence[Channel[Any]]
) -> EngineCore:
    """Return the engine of a loaded replica. peers: the plan channels to the other ranks, in their order.

    Raises UnsupportedError if a plan for the other ranks could be too large for a channel.
    """
    if peers:
        check_plan_size(
            max_num_seqs=info.max_num_seqs,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=info.max_num_batched_tokens,
            kv_blocks=info.kv_blocks,
        )
        runner = PlanSender(runner, list(peers))
    scheduler = Scheduler(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_mixed_tokens=spec.max_mixed_tokens,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        blocks=info.kv_blocks,
        prefix_cache=spec.prefix_cache,
    )
    return EngineCore(scheduler, runner, overlap=spec.overlap)
