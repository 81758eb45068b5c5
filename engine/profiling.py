"""What the largest steps really take on a GPU, and what that leaves for KV."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from engine.memory import StepsTooLarge
from engine.messages import ReplicaSpec
from engine.model.decoder import Decoder
from engine.sizing import graph_bytes
from engine.steps import Steps
from engine.warmup_steps import largest_steps


def profile_cuda(steps: Steps, spec: ReplicaSpec) -> int:
    """Bytes that are left for the KV pool on this rank's device, after running the largest steps over a block
    or more, which use up the tables. Every rank must call it. Raises StepsTooLarge where they do not fit."""
    decoder, device = steps.decoder, steps.decoder.device
    torch.cuda.reset_peak_memory_stats(device)
    with steps_fit(spec, device):
        for plan in largest_steps(decoder.max_model_len, spec.max_rows, spec.step_tokens):
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


@contextlib.contextmanager
def steps_fit(spec: ReplicaSpec, device: torch.device) -> Iterator[None]:
    """Around steps, or graphs of them, before a replica is ready. Raises StepsTooLarge where memory runs
    out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        held = total - free - torch.cuda.memory_reserved(device) + torch.cuda.memory_allocated(device)
        blocks = "" if spec.kv_blocks is None else f" and kv_blocks {spec.kv_blocks}"
        lower = "step_tokens or max_rows" if spec.kv_blocks is None else "kv_blocks, step_tokens or max_rows"
        raise StepsTooLarge(
            f"steps of step_tokens {spec.step_tokens} and max_rows {spec.max_rows}{blocks} take more memory "
            f"than {torch.cuda.get_device_name(device)} has beside the {held / 2**30:.1f} GiB that are taken "
            f"of its {total / 2**30:.1f}: lower {lower}, or use more GPUs (tensor_parallel_size)"
        ) from error


def logits_bytes(decoder: Decoder, rows: int) -> int:
    """Of the buffer that the graphs write."""
    return rows * decoder.shard.vocab * decoder.dtype.itemsize
