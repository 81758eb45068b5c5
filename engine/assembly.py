"""Builds rank 0's step loop from its components: the scheduler, the plan channels and the model runner."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence

from engine.core import EngineCore, StepRunner
from engine.messages import ReplicaInfo, ReplicaSpec
from engine.plan_channel import PlanSender, check_plan_size
from engine.scheduling.scheduler import Scheduler


def build_core(
    spec: ReplicaSpec,
    info: ReplicaInfo,
    runner: StepRunner,
    peers: Sequence[socket.socket],
    on_exit: Callable[[str], None],
) -> EngineCore:
    """Return the engine core for a loaded replica.

    `peers` are rank 0's sockets to the other ranks, in rank order. If another rank stops accepting plans,
    `on_exit` (normally `Ranks.abandon`) is called with the reason.

    Raises UnsupportedError if a plan for the other ranks could exceed the channel's message size limit.
    """
    if peers:
        check_plan_size(
            max_num_seqs=info.max_num_seqs,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=info.max_num_batched_tokens,
            kv_blocks=info.kv_blocks,
        )
    scheduler = Scheduler(
        max_num_seqs=info.max_num_seqs,
        max_num_batched_tokens=info.max_num_batched_tokens,
        max_mixed_tokens=spec.max_mixed_tokens,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        blocks=info.kv_blocks,
        prefix_cache=spec.prefix_cache,
    )
    plans = PlanSender(peers, on_exit) if peers else None
    return EngineCore(scheduler, runner, overlap=spec.overlap, plans=plans)
