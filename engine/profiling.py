"""What the largest steps really take on a GPU, and what that leaves for KV."""

from __future__ import annotations

import torch

from engine.batch import RowTables
from engine.messages import Chunk, ReplicaSpec, RowSetup, SamplingParams, StepPlan
from engine.model.decoder import Decoder
from engine.sampler import Sampler
from engine.sizing import graph_bytes


def profile_cuda(decoder: Decoder, sampler: Sampler, tables: RowTables, spec: ReplicaSpec) -> int:
    """Bytes that are left for the KV pool on this rank's device, after running the largest steps.

    `tables` are used up. Every rank must call it.
    """
    device = decoder.device
    torch.cuda.reset_peak_memory_stats(device)
    run_largest_steps(decoder, sampler, tables, spec)
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


def run_largest_steps(decoder: Decoder, sampler: Sampler, tables: RowTables, spec: ReplicaSpec) -> None:
    """A chunk of the whole token budget at the end of the longest sequence, after which every row samples in
    the full variant; then steps in which every row takes part, with a chunk, decoding, and both beside each
    other. The kernels of such steps are loaded thereby."""
    # Every block table names block 0 throughout: what is read is nonsense, how much is not.
    pool = decoder.allocate_kv(1)
    for plan in _largest_steps(decoder.max_model_len, spec):
        tables.apply(plan)
        batch = tables.step_batch(plan)
        hidden = decoder.forward(batch.forward, pool)
        logits = decoder.logits(hidden)
        sampler.sample(logits, batch.sampling, tables)


def _largest_steps(max_model_len: int, spec: ReplicaSpec) -> list[StepPlan]:
    sampling = SamplingParams(
        max_tokens=1, temperature=1.0, top_p=0.9, min_p=0.01, repetition_penalty=1.1, logprobs=20
    )
    rows = list(range(spec.max_rows))
    setups = [RowSetup(row, sampling, 0, 1, [0]) for row in rows]
    count = max(1, min(spec.step_tokens, max_model_len - 1))
    deep = Chunk(0, max(0, max_model_len - 1 - count), [0] * count, rows)
    # Decodes share the pool: together they are about as long as the longest sequence or a step's budget.
    length = max(1, min(max_model_len - 2, max(max_model_len, spec.step_tokens) // spec.max_rows))
    chunks = [Chunk(row, length - 1, [0], [row]) for row in rows]
    plans = [
        StepPlan(0, setups, [], [], [], [deep]),
        StepPlan(1, [], [], [], [], chunks),
        StepPlan(2, [], [], [], rows, []),
        StepPlan(3, [], [], [], rows[1:], [Chunk(0, length - 1, [0], [0])]),
    ]
    # As far as a sequence may grow.
    return plans[: 2 + min(2, max_model_len - length)]
