"""Prints what a replica on a GPU would launch that a build did not foresee: one kernel a line.

A process of its own, since Triton decides once whether it interprets: `python -m
tests.kernels.launches_of_serving FOLDER FP8 KV_FP8`. The engine's own decoder, tables, graphs' bodies and
sampler run on meta tensors, and Triton notes what it would have compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from engine import profiling
from engine.batch import RowTables
from engine.families import read_config
from engine.graphs import DecodeGraphs
from engine.kernel_build import dimensions
from engine.kernel_loading import load_kernels
from engine.messages import Chunk, ReplicaSpec, RowSetup, SamplingParams, StepPlan
from engine.model.decoder import TORCH_DTYPES, Decoder
from engine.parallel import single
from engine.prompt_graphs import PromptGraphs
from engine.sampler import Sampler
from engine.sizing import EXPANSION_BLOCKS, FP8, product_ladder
from kernels import compiling, rehearsal
from kernels.cuda import CudaOps
from kernels.draws import Variant
from kernels.triton import sampling
from kernels.triton.linear_table import load_table

META = torch.device("meta")
GPU = compiling.Gpu.of("NVIDIA H200", 90)
ROWS, STEP_TOKENS = 80, 300


def main() -> None:
    folder, fp8, kv_fp8 = Path(sys.argv[1]), sys.argv[2] == "1", sys.argv[3] == "1"
    config = read_config(folder)
    spec = ReplicaSpec(replica="r", model_path=str(folder), max_rows=ROWS, step_tokens=STEP_TOKENS)
    foreseen = dimensions(
        config,
        spec,
        dtype=config.dtype,
        weights=FP8 if fp8 else config.dtype,
        kv_dtype=FP8 if kv_fp8 else config.dtype,
    )
    table = load_table(GPU.name)
    built = compiling.record(GPU.target, lambda: rehearsal.launch_all(foreseen, table))
    decoder = Decoder(
        config,
        single(),
        CudaOps(EXPANSION_BLOCKS, table),
        TORCH_DTYPES[config.dtype],
        META,
        max_model_len=1000,
        fp8=fp8,
        kv_fp8=kv_fp8,
    )
    sampler = Sampler(single(), META, sampling, vocab_size=config.vocab_size)

    def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    with (
        mock.patch("engine.batch.upload", upload),
        mock.patch("engine.sampling_tables.upload", upload),
        torch.inference_mode(),
    ):
        needed = compiling.record(GPU.target, lambda: serve(decoder, sampler, spec))
    known = {(job.name, job.specialisation) for job in built}
    print(f"{len(built)} foreseen, {len(needed)} launched")
    for job in needed:
        if (job.name, job.specialisation) not in known:
            print("MISSING", job.name, job.specialisation)


def serve(decoder: Decoder, sampler: Sampler, spec: ReplicaSpec) -> None:
    """Graphs of every size and way to sample, those of prompts, the profiling steps, what is loaded ahead,
    and steps of prompts and edited rows."""
    sizes = (ROWS, 17, decoder.config.vocab_size, META, product_ladder(ROWS))
    tables = RowTables(*sizes)
    kv = decoder.allocate_kv(20)
    graphs = DecodeGraphs(decoder, kv, tables, sampler, ROWS)
    for size in graphs.sizes:
        graphs._forward(size)
        for variant in Variant:
            graphs._sample(size, variant)
    prompts = PromptGraphs(decoder, kv, tables, spec.step_tokens)
    for size in prompts.sizes:
        prompts._run(size)
    profiling.run_largest_steps(decoder, sampler, tables, spec)
    load_kernels(decoder, kv, tables.block_table, spec.step_tokens, ROWS)
    every = (
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, temperature=1.0),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9),
        SamplingParams(max_tokens=9, logit_bias={3: 1.0}),
        SamplingParams(max_tokens=9, temperature=1.0, min_tokens=4, stop_token_ids=(5,)),
        SamplingParams(max_tokens=9, temperature=1.0, top_k=4, presence_penalty=0.5),
    )
    for step, params in enumerate(every):
        for chunk, decodes in ((7, 0), (1, 3), (200, 40)):
            rows = list(range(decodes + 2))
            setups = [RowSetup(row, params, 0, 1, [0]) for row in rows]
            prompt = Chunk(decodes, 0, [0] * chunk, [decodes, decodes + 1])
            plan = StepPlan(step, setups, [], [], list(range(decodes)), [prompt])
            tables = RowTables(*sizes)
            tables.apply(plan)
            batch = tables.step_batch(plan)
            hidden = decoder.forward(batch.forward, kv)
            logits = decoder.logits(hidden)
            sampler.sample(logits, batch.sampling, tables)


if __name__ == "__main__":
    main()
