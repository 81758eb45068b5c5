"""Starts the engine for the benchmark and the profiler, which share their command-line options."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from engine.bench.shapes import SHAPES, write_config
from engine.bench.workloads import EngineWorkload
from engine.ceilings import device_model
from engine.config import DTYPE_BYTES, CheckpointError, UnsupportedError
from engine.device import DeviceError
from engine.families import read_config
from engine.garbage import settle_garbage
from engine.generate import LocalEngine
from engine.messages import ReplicaInfo, ReplicaSpec
from engine.parallel import RankFailureError
from engine.progress import no_progress
from engine.rank_messages import Progress

FAILURES = (
    CheckpointError,
    UnsupportedError,
    DeviceError,
    MemoryError,
    torch.OutOfMemoryError,
    RankFailureError,
)
"""Engine exceptions that are reported without a traceback."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the command-line options used by `started`."""
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="public shape (%(default)s)"
    )
    parser.add_argument("--model", type=Path, help="checkpoint folder to use instead of a public shape")
    parser.add_argument(
        "--load-format", choices=["safetensors", "dummy"], help="dummy generates random weights"
    )
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPE_BYTES])
    parser.add_argument(
        "--tensor-parallel-size",
        type=int,
        default=1,
        metavar="N",
        help="split the model over N GPUs, or N processes on a CPU (%(default)s)",
    )
    parser.add_argument(
        "--expert-parallel",
        action="store_true",
        help="give each rank a subset of whole experts instead of a slice of every expert",
    )
    parser.add_argument("--fp8", action="store_true", help="quantise the layers' weights")
    parser.add_argument("--kv-fp8", action="store_true", help="quantise the KV cache")
    parser.add_argument("--gpu-memory-utilization", type=float, help="fraction of the device's memory to use")
    parser.add_argument(
        "--max-num-seqs", type=int, default=1024, help="maximum number of running sequences (%(default)s)"
    )
    parser.add_argument(
        "--max-num-batched-tokens", type=int, default=8192, help="token budget of a step (%(default)s)"
    )
    parser.add_argument(
        "--max-model-len", type=int, help="maximum sequence length; default: the workloads' longest sequence"
    )
    parser.add_argument(
        "--kv-blocks", type=int, help="number of KV blocks; default: as many as fit into memory"
    )


@contextmanager
def started(
    arguments: argparse.Namespace, scratch: Path, workloads: Mapping[str, EngineWorkload]
) -> Iterator[LocalEngine]:
    """Start an engine that can run the sequences of `workloads`. The engine is configured by the options from
    `add_options` and closed when the `with` statement ends. Progress is shown on standard error if that is a
    terminal. `scratch` is a folder for the model shape's configuration file. Raises the exceptions in
    FAILURES.
    """
    with closed_at_end(_start(arguments, scratch, workloads)) as engine:
        yield engine


@contextmanager
def closed_at_end(engine: LocalEngine) -> Iterator[LocalEngine]:
    """Close the engine when the `with` statement ends. If the statement's body raises RankFailureError and
    the cause is known, add the cause to the exception."""
    try:
        yield engine
    except RankFailureError as error:
        raise RankFailureError(engine.explain(error)) from error
    finally:
        engine.close()


def leave(code: int) -> NoReturn:
    """Exit the process immediately, because torch.distributed's threads can block a normal exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def devices_text(info: ReplicaInfo) -> str:
    """Return the names of a replica's devices, e.g. "cuda:0 NVIDIA H200" or "2 × NVIDIA H200 (NCCL)"."""
    if info.tensor_parallel_size == 1:
        return info.devices[0]
    return f"{info.tensor_parallel_size} × {device_model(info.devices[0])} ({info.collectives})"


def _start(
    arguments: argparse.Namespace, scratch: Path, workloads: Mapping[str, EngineWorkload]
) -> LocalEngine:
    model = arguments.model or write_config(arguments.shape, scratch)
    spec = ReplicaSpec(
        replica="bench-0",
        model_path=str(model),
        load_format=arguments.load_format or ("safetensors" if arguments.model else "dummy"),
        device=arguments.device,
        dtype=arguments.dtype,
        max_model_len=_max_model_len(arguments, model, workloads),
        max_num_seqs=arguments.max_num_seqs,
        max_num_batched_tokens=arguments.max_num_batched_tokens,
        kv_blocks=arguments.kv_blocks,
        quantization="fp8" if arguments.fp8 else "auto",
        kv_cache_dtype="fp8" if arguments.kv_fp8 else "auto",
        tensor_parallel_size=arguments.tensor_parallel_size,
        expert_parallel=arguments.expert_parallel,
    )
    if arguments.gpu_memory_utilization is not None:
        spec = msgspec.structs.replace(spec, gpu_memory_utilization=arguments.gpu_memory_utilization)
    engine = LocalEngine(spec, _show if sys.stderr.isatty() else no_progress)
    settle_garbage()
    return engine


def _max_model_len(
    arguments: argparse.Namespace, model: Path, workloads: Mapping[str, EngineWorkload]
) -> int:
    """Return the value of --max-model-len, which defaults to the length of the workloads' longest sequence.
    Raises UnsupportedError if the sequences are too long for the given value or for the model."""
    name, longest = max(workloads.items(), key=lambda item: item[1].sequence_tokens)
    needed, given = longest.sequence_tokens, arguments.max_model_len
    longest_text = (
        f"{name} has sequences of {needed} tokens ({longest.prompt_tokens} in, {longest.output_tokens} out)"
    )
    if given is not None and given < needed:
        raise UnsupportedError(
            f"--max-model-len is {given} tokens, but {longest_text}",
            "raise it, leave it out, or choose other workloads",
        )
    config = read_config(model)
    config.check_parallel(arguments.tensor_parallel_size)
    limit = config.context_limit
    if limit < needed:
        model_name = arguments.model or arguments.shape
        raise UnsupportedError(
            f"{model_name} allows sequences of up to {limit} tokens, but {longest_text}",
            "choose other workloads or another model",
        )
    return given or needed


def _show(progress: Progress) -> None:
    share = f" {progress.done / progress.total:.0%}" if progress.total else ""
    text = "" if progress.stage == "ready" else f"{progress.stage} {progress.detail}{share}"
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
