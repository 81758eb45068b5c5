"""Prints, one per line, the kernels that a replica on a GPU launches while serving but did not launch during
warm-up. The list must be empty, because builds compile, and startups load, only the kernels that warm-up
launches.

Runs in a separate process, because Triton decides once per process whether it interprets kernels: `python -m
tests.engine.launches_of_serving FOLDER FP8 KV_FP8 RANKS WHOLE_EXPERTS`. The engine's own steps run on meta
tensors, and Triton records which kernels it would have compiled. With several ranks, only the first rank
serves. FP8 is 0, 1 or "blocks" (one scale per block).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from engine.device_tables import Padding
from engine.families import read_config
from engine.launch_enumeration import MetaReplica, launch_all
from engine.messages import SamplingParams
from engine.plan import Chunk, SlotSetup, StepPlan
from engine.replica_model import ReplicaModel
from engine.sizing import gemm_sizes
from engine.steps import StepExecutor
from kernels import PAGE_TOKENS, compiling
from kernels.triton.linear_table import load_table

GPU = compiling.GpuModel.of("NVIDIA H200", 90)
ROWS, MAX_NUM_BATCHED_TOKENS, COLUMNS = 80, 700, 17


def main() -> None:
    config = read_config(Path(sys.argv[1]))
    replica_model = ReplicaModel(
        config=config.with_whole_experts() if sys.argv[5] == "1" else config,
        dtype="bfloat16",
        fp8=sys.argv[2] != "0",
        fp8_blocks=sys.argv[2] == "blocks",
        kv_fp8=sys.argv[3] == "1",
        tensor_parallel_size=int(sys.argv[4]),
        max_num_seqs=ROWS,
        max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS,
    )
    table = load_table(GPU.name)
    built = compiling.record(GPU.target, lambda: launch_all(replica_model, GPU, table))
    started: list[StepExecutor] = []
    replica = MetaReplica(replica_model, 0, GPU, table, max_model_len=COLUMNS * PAGE_TOKENS)
    with torch.inference_mode():
        loaded = compiling.record(GPU.target, lambda: started.append(replica.launch_warm_up()))
        # A replica pads passes to more sizes than the build enumerates.
        started[0].tables._padding = Padding(gemm_sizes(MAX_NUM_BATCHED_TOKENS), gemm_sizes(ROWS))
        served = compiling.record(GPU.target, lambda: serve(started[0]))
    long = sum(".attention_prefill_hopper." in job.name for job in served)
    print(f"{len(built)} built, {len(loaded)} loaded, {len(served)} served, {long} for long prompts")
    _print_others("NOT BUILT", loaded + served, built)
    _print_others("NOT LOADED", served, loaded)


def _print_others(words: str, jobs: list[compiling.CompileJob], known: list[compiling.CompileJob]) -> None:
    there = {(job.name, job.specialisation) for job in known}
    for job in jobs:
        if (job.name, job.specialisation) not in there:
            print(words, job.name, job.specialisation)


def serve(steps: StepExecutor) -> None:
    """Run steps with many different numbers of prompts and decodes, and with every sampling variant."""
    every = (
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, temperature=1.0),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9),
        SamplingParams(max_tokens=9, logit_bias={3: 1.0}),
        SamplingParams(max_tokens=9, temperature=1.0, min_tokens=4, stop_token_ids=(5,)),
        SamplingParams(max_tokens=9, temperature=1.0, top_k=4, presence_penalty=0.5),
    )
    shapes = ((7, 0), (1, 3), (2, 20), (200, 40), (129, 17), (600, 5), (240, 60))
    for number, params in enumerate(every):
        for index, (chunk, decodes) in enumerate(shapes):
            rows = list(range(decodes + 2))
            setups = [SlotSetup(row, params, 0, 1, [0]) for row in rows]
            sampled = ([], [decodes], [decodes, decodes + 1])
            # Run every number of samples with the first set of sampling parameters. Run only one number of
            # samples with each of the other sets.
            for samples in sampled if number == 0 else (sampled[(number + index) % 3],):
                prompt = Chunk(decodes, 0, [0] * chunk, samples)
                steps.run(StepPlan(0, setups, [], [], rows[:decodes], [prompt]))
        # The last prompt's setup covers all slots used here, so the decodes may use any of these slots.
        for few in (1, 2, 3, 5, 7, 9, 17, 19, 22, 33, 42, 62)[:: 1 if number == 0 else 2]:
            steps.run(StepPlan(0, [], [], [], rows[:few], []))
    for chunk in (1, 40, 64):
        prompt = Chunk(0, COLUMNS * PAGE_TOKENS - chunk, [0] * chunk, [0])
        steps.run(StepPlan(0, [], [], [], [], [prompt]))


if __name__ == "__main__":
    main()
