"""Measures the memory that the largest steps use on a GPU, and computes the memory left for the KV cache."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from engine.memory import StepsTooLarge
from engine.messages import ReplicaSpec
from engine.model.decoder import Decoder
from engine.sizing import graph_bytes
from engine.steps import StepExecutor
from engine.warmup_steps import largest_steps


def profile_cuda(steps: StepExecutor, spec: ReplicaSpec) -> int:
    """Run the largest steps, and return the number of bytes left for the KV pool on this rank's device.

    All ranks must call this function. `steps` needs only one KV block, and its tables are invalid afterwards.
    Raises StepsTooLarge if the steps do not fit into GPU memory.
    """
    decoder, device = steps.decoder, steps.decoder.device
    torch.cuda.reset_peak_memory_stats(device)
    with steps_fit(spec, device):
        for plan in largest_steps(decoder.max_model_len, spec.max_num_seqs, spec.max_num_batched_tokens):
            steps.run(plan)
    torch.cuda.synchronize(device)
    free, total = torch.cuda.mem_get_info(device)
    outside_torch = total - free - torch.cuda.memory_reserved(device)
    peak = torch.cuda.max_memory_reserved(device)
    torch.cuda.empty_cache()
    dtype = str(decoder.dtype).removeprefix("torch.")
    graphs = graph_bytes(decoder.config, decoder.shard, dtype, spec.max_num_seqs, spec.max_num_batched_tokens)
    graphs += logits_bytes(decoder, spec.max_num_seqs)
    return int(total * spec.gpu_memory_utilization) - outside_torch - peak - graphs


@contextlib.contextmanager
def steps_fit(spec: ReplicaSpec, device: torch.device) -> Iterator[None]:
    """Convert an out-of-memory error into StepsTooLarge if it occurs in the steps or graph captures of a
    starting replica."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free, total = torch.cuda.mem_get_info(device)
        held = total - free - torch.cuda.memory_reserved(device) + torch.cuda.memory_allocated(device)
        blocks = "" if spec.kv_blocks is None else f" and kv_blocks {spec.kv_blocks}"
        lower = (
            "max_num_batched_tokens or max_num_seqs"
            if spec.kv_blocks is None
            else "kv_blocks, max_num_batched_tokens or max_num_seqs"
        )
        raise StepsTooLarge(
            f"steps with max_num_batched_tokens {spec.max_num_batched_tokens} and max_num_seqs "
            f"{spec.max_num_seqs}{blocks} do not fit on "
            f"{torch.cuda.get_device_name(device)}, where {held / 2**30:.1f} of {total / 2**30:.1f} GiB are "
            f"in use: lower {lower}, or use more GPUs (tensor_parallel_size)"
        ) from error


def logits_bytes(decoder: Decoder, rows: int) -> int:
    """Return the size, in bytes, of the CUDA graphs' logits buffer."""
    return rows * decoder.shard.vocab * decoder.dtype.itemsize
