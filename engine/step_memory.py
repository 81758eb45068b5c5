"""Runs the largest steps on a GPU and raises an error with a remedy if there is too little memory for
them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from engine.memory import StepsTooLarge
from engine.messages import ReplicaSpec
from engine.steps import StepExecutor
from engine.warmup_steps import largest_steps


def run_largest_steps(steps: StepExecutor, max_model_len: int, spec: ReplicaSpec) -> None:
    """Run the steps that use the most memory, so that torch's allocator keeps this memory for later steps.
    All ranks must call this function. `steps` needs only one KV block; its tables are invalid afterwards.
    """
    for plan in largest_steps(max_model_len, spec.max_num_seqs, spec.max_num_batched_tokens):
        steps.run(plan)


@contextlib.contextmanager
def steps_fit(spec: ReplicaSpec, device: torch.device) -> Iterator[None]:
    """Convert out-of-memory errors to StepsTooLarge. Used around the steps and graph captures of a starting
    replica."""
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
