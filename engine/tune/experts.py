"""`python -m engine.tune.experts`: measure which kernels are fastest for mixture-of-experts layers, and write
the results to this GPU's table.

    python -m engine.tune.experts --config FOLDER --both
    python -m engine.tune.experts --config FOLDER --fp8 --tensor-parallel 4 --expert-parallel --tokens 1 8 64

FOLDER contains the model's config.json (see docs/kernels.md). Each layer is timed as a whole, in CUDA graphs,
with weights that are not in the L2 cache (`kernels.tune.experts`). The fastest kernels' results are checked
against the reference implementation. The table is kernels/tuned/<gpu>.json, or --out. Existing entries are
kept unless --again is given.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from engine.build import read_served
from engine.config import CheckpointError, UnsupportedError
from engine.model.decoder import TORCH_DTYPES
from engine.replica_model import ReplicaModel
from engine.tune.writing import compile_launches, write_table
from kernels import compiling
from kernels.triton.experts_plans import ExpertsShape
from kernels.triton.linear_table import Table, TableError, read_table, table_path
from kernels.tune.experts import TOKENS, ExpertsChain, families, search
from kernels.writable import UnwritableError, check_writable


def main() -> int:
    """Tune a model's experts. Returns 1 if the model or a file cannot be used. The table is written after
    each token count."""
    arguments = _arguments()
    try:
        models = [
            read_served(
                arguments.config,
                fp8=fp8,
                tensor_parallel_size=arguments.tensor_parallel,
                expert_parallel=arguments.expert_parallel,
            )
            for fp8 in ([False, True] if arguments.both else [arguments.fp8])
        ]
        if models[0].config.experts is None:
            raise UnsupportedError(f"{arguments.config} has no experts", "tune it with python -m engine.tune")
        gpu = compiling.this_gpu()
        path = arguments.out or table_path(gpu.name)
        check_writable("--out", path)
        table = read_table(path) if path.exists() else Table(gpu.name)
    except (CheckpointError, UnsupportedError, compiling.GpuError, TableError, UnwritableError) as error:
        print(error, file=sys.stderr)
        return 1
    began = time.perf_counter()
    wanted = [
        (served, shape_of(served), tokens)
        for served in models
        for tokens in arguments.tokens
        if arguments.again or tokens not in table.experts.get(shape_of(served), {})
    ]
    compile_launches(gpu, lambda: _launch(wanted, gpu))
    with torch.inference_mode():
        for chain, tokens in _chains(wanted, torch.device("cuda"), gpu.pdl):
            found = search(chain, gpu.shared_bytes, lambda line: print(line, flush=True))
            table = table.with_experts(chain.shape, tokens, found)
            write_table(path, table, gpu)
    print(f"{path}: {len(wanted)} entries measured in {time.perf_counter() - began:.0f} s", flush=True)
    return 0


Wanted = list[tuple[ReplicaModel, ExpertsShape, int]]
"""Table entries to measure, as a list of (model, shape of its experts, token count)."""


def shape_of(served: ReplicaModel) -> ExpertsShape:
    """Return the dimensions of a rank's part of an MoE layer."""
    config = served.config
    assert config.experts is not None
    here = config.shard(served.tensor_parallel_size, 0).experts(config.experts)
    dtype = torch.float8_e4m3fn if served.fp8 else TORCH_DTYPES[served.dtype]
    sizes = (config.experts.count, config.experts.top_k, config.hidden_size, here.width, here.count)
    return ExpertsShape(dtype, *sizes)


def _launch(wanted: Wanted, gpu: compiling.GpuModel) -> None:
    """Launch the kernels of every plan that the search may try."""
    for chain, tokens in _chains(wanted, torch.device("meta"), gpu.pdl):
        for family in families(chain.shape, tokens, gpu.shared_bytes):
            for plans in family.changes():
                chain.run(plans)


def _chains(wanted: Wanted, device: torch.device, pdl: bool) -> Iterator[tuple[ExpertsChain, int]]:
    for served, shape, tokens in wanted:
        yield ExpertsChain(shape, tokens, TORCH_DTYPES[served.dtype], device, pdl=pdl), tokens


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m engine.tune.experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", type=Path, required=True, help="folder that contains a config.json")
    parser.add_argument(
        "--fp8", action="store_true", help="tune experts in e4m3 instead of the model's dtype"
    )
    parser.add_argument("--both", action="store_true", help="tune experts in both dtypes")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), help="numbers of tokens")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="number of ranks (%(default)s)")
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        help="give each rank a subset of whole experts instead of a slice of every expert",
    )
    parser.add_argument(
        "--again", action="store_true", help="remeasure entries that are already in the table"
    )
    parser.add_argument("--out", type=Path, help="table to update (default: kernels/tuned/<gpu>.json)")
    arguments = parser.parse_args()
    if wrong := [tokens for tokens in arguments.tokens if not 1 <= tokens <= 8192]:
        parser.error(f"--tokens contains {wrong[0]}; use numbers from 1 to 8192")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
