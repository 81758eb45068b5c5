"""Prints what a replica on a GPU would launch that a build did not foresee, and what it would launch first
when it serves, though the start is to load everything: one kernel a line.

A process of its own, since Triton decides once whether it interprets: `python -m
tests.kernels.launches_of_serving FOLDER FP8 KV_FP8 RANKS`. The engine's own decoder, tables, graphs' bodies
and sampler run on meta tensors, and Triton notes what it would have compiled. Of several ranks the first is
taken: they have no graphs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from engine.device_tables import Padding, SlotTables
from engine.families import read_config
from engine.graphs import DecodeGraphs
from engine.kernel_build import dimensions
from engine.kernel_loading import load_kernels
from engine.messages import ReplicaSpec, SamplingParams
from engine.model.decoder import TORCH_DTYPES, Decoder
from engine.plan import Chunk, SlotSetup, StepPlan
from engine.prompt_graphs import PromptGraphs
from engine.rehearsal import every_kind, largest_steps
from engine.sampler import Sampler
from engine.sizing import EXPANSION_BLOCKS, FP8, gemm_sizes
from engine.steps import StepExecutor
from kernels import PAGE_TOKENS, compiling, rehearsal
from kernels.cuda import CudaOps
from kernels.draws import Variant
from kernels.triton import sampling
from kernels.triton.linear_table import load_table

META = torch.device("meta")


class Lonely:
    """A place in a group that hears of the others what it says itself."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor] * self.size, dim=-1)

    def all_gather_stack(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack([tensor] * self.size)


GPU = compiling.Gpu.of("NVIDIA H200", 90)
ROWS, STEP_TOKENS, COLUMNS = 80, 300, 17


def main() -> None:
    folder, fp8, kv_fp8 = Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1"
    ranks = Lonely(int(sys.argv[4]))
    config = read_config(folder)
    spec = ReplicaSpec(
        replica="r",
        model_path=str(folder),
        max_num_seqs=ROWS,
        max_num_batched_tokens=STEP_TOKENS,
        tensor_parallel_size=ranks.size,
    )
    foreseen = dimensions(
        config,
        spec,
        dtype=config.dtype,
        weights=FP8 if fp8 else config.dtype,
        kv_cache_dtype=FP8 if kv_fp8 else config.dtype,
    )
    table = load_table(GPU.name)
    built = compiling.record(GPU.target, lambda: rehearsal.launch_all(foreseen, table, GPU))
    decoder = Decoder(
        config,
        ranks,
        CudaOps(EXPANSION_BLOCKS, table, pdl=GPU.pdl, hopper_multiprocessors=132),
        TORCH_DTYPES[config.dtype],
        META,
        max_model_len=COLUMNS * PAGE_TOKENS,
        fp8=fp8,
        kv_fp8=kv_fp8,
    )
    shard = decoder.shard
    sampler = Sampler(
        ranks,
        META,
        sampling,
        vocab_size=config.vocab_size,
        first_vocab=shard.first_vocab,
        vocab=shard.vocab,
        vocab_real=shard.vocab_real,
    )

    def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    with (
        mock.patch("engine.device_tables.upload", upload),
        mock.patch("engine.sampling_tables.upload", upload),
        mock.patch("engine.steps.upload", upload),
        torch.inference_mode(),
    ):
        begun: list[StepExecutor] = []
        loaded = compiling.record(GPU.target, lambda: begun.append(start(decoder, sampler, spec)))
        served = compiling.record(GPU.target, lambda: serve(begun[0]))
    long = sum(".attention_prefill_hopper." in job.name for job in served)
    print(f"{len(built)} foreseen, {len(loaded)} loaded, {len(served)} served, {long} for long prompts")
    _print_others("UNFORESEEN", loaded + served, built)
    _print_others("LATE", served, loaded)


def _print_others(word: str, jobs: list[compiling.Job], known: list[compiling.Job]) -> None:
    there = {(job.name, job.specialisation) for job in known}
    for job in jobs:
        if (job.name, job.specialisation) not in there:
            print(word, job.name, job.specialisation)


def start(decoder: Decoder, sampler: Sampler, spec: ReplicaSpec) -> StepExecutor:
    """Do the launches of a starting replica, and return the executor that serves afterwards."""
    padding = Padding(gemm_sizes(spec.max_num_batched_tokens), gemm_sizes(ROWS))

    def steps() -> StepExecutor:
        tables = SlotTables(ROWS, COLUMNS, decoder.config.vocab_size, META, padding)
        return StepExecutor(decoder, decoder.allocate_kv(20), tables, sampler)

    apart = steps()
    for plan in largest_steps(decoder.max_model_len, spec):
        apart.run(plan)
    serving = steps()
    if spec.tensor_parallel_size == 1:
        capture(serving, spec)
    load_kernels(decoder, serving.kv, serving.tables.block_table, spec.max_num_batched_tokens, ROWS)
    apart = steps()
    for plan in every_kind(decoder.max_model_len, spec):
        apart.run(plan)
    return serving


def capture(serving: StepExecutor, spec: ReplicaSpec) -> None:
    """The bodies of all graphs."""
    decoder, sampler = serving.decoder, serving.sampler
    graphs = DecodeGraphs(decoder, serving.kv, serving.tables, sampler, ROWS)
    for size in graphs.sizes:
        graphs._forward(size)
        for variant in Variant:
            graphs._sample(size, variant)
    prompts = PromptGraphs(decoder, serving.kv, serving.tables, spec.max_num_batched_tokens)
    for size in prompts.sizes:
        prompts._run(size)


def serve(steps: StepExecutor) -> None:
    """Steps of prompts and decodes in many numbers and ways."""
    every = (
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, temperature=1.0),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9),
        SamplingParams(max_tokens=9, logit_bias={3: 1.0}),
        SamplingParams(max_tokens=9, temperature=1.0, min_tokens=4, stop_token_ids=(5,)),
        SamplingParams(max_tokens=9, temperature=1.0, top_k=4, presence_penalty=0.5),
    )
    for params in every:
        for chunk, decodes in ((7, 0), (1, 3), (2, 20), (200, 40), (129, 17), (240, 60)):
            rows = list(range(decodes + 2))
            setups = [SlotSetup(row, params, 0, 1, [0]) for row in rows]
            for samples in ([], [decodes], [decodes, decodes + 1]):
                prompt = Chunk(decodes, 0, [0] * chunk, samples)
                steps.run(StepPlan(0, setups, [], [], rows[:decodes], [prompt]))
            for few in (1, 2, 3, 5, 9, 17, 33, len(rows)):
                steps.run(StepPlan(0, [], [], [], rows[:few], []))
    for chunk in (1, 40, 64):
        prompt = Chunk(0, COLUMNS * PAGE_TOKENS - chunk, [0] * chunk, [0])
        steps.run(StepPlan(0, [], [], [], [], [prompt]))


if __name__ == "__main__":
    main()
