"""What the largest steps really take on a GPU, and what that leaves for KV."""

from __future__ import annotations

import torch

from engine.messages import ReplicaSpec
from engine.model.decoder import Decoder
from engine.rehearsal import largest_steps
from engine.sizing import graph_bytes
from engine.steps import Steps


def profile_cuda(steps: Steps, spec: ReplicaSpec) -> int:
    """Bytes that are left for the KV pool on this rank's device, after running the largest steps over a block
    or more, which use up the tables. Every rank must call it. Raises WeightsTooLarge where they do not fit.
    """
    decoder, device = steps.decoder, steps.decoder.device
    torch.cuda.reset_peak_memory_stats(device)
    with decoder.room.explained():
        for plan in largest_steps(decoder.max_model_len, spec):
            steps.run(plan)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    dtype = str(decoder.dtype).removeprefix("torch.")
    graphs = graph_bytes(decoder.config, decoder.shard, dtype, spec.max_rows, spec.step_tokens)
    graphs += logits_bytes(decoder, spec.max_rows)
    return int(total * spec.memory_fraction) - outside_torch - peak - graphs


def logits_bytes(decoder: Decoder, rows: int) -> int:
    """Of the buffer that the graphs write."""
    return rows * decoder.shard.vocab * decoder.dtype.itemsize
