"""The engine that a benchmark or a profile runs, from the options that both have."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec
import torch

from engine.bench.shapes import SHAPES, write_config
from engine.config import DTYPE_BYTES, CheckpointError, UnfitError
from engine.device import DeviceError
from engine.garbage import settle_garbage
from engine.generate import LocalEngine
from engine.messages import ReplicaSpec

FAILURES = (CheckpointError, UnfitError, DeviceError, MemoryError, torch.OutOfMemoryError)
"""What `start` raises of which a person needs the message alone."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """What `start` reads."""
    parser.add_argument(
        "--shape", choices=sorted(SHAPES), default="llama-3.1-8b", help="default: %(default)s"
    )
    parser.add_argument("--model", type=Path, help="a checkpoint's folder, instead of random weights")
    parser.add_argument("--load-format", choices=["safetensors", "dummy"], help="dummy: random weights")
    parser.add_argument("--device", default="auto", choices=["auto", "cuda", "cpu"])
    parser.add_argument("--dtype", default="auto", choices=["auto", *DTYPE_BYTES])
    parser.add_argument("--fp8", action="store_true", help="quantise the layers' weights")
    parser.add_argument("--kv-fp8", action="store_true", help="quantise the cache")
    parser.add_argument("--memory-fraction", type=float, help="part of the device's memory to use")
    parser.add_argument("--max-rows", type=int, default=1024, help="most sequences at once (%(default)s)")
    parser.add_argument("--step-tokens", type=int, default=8192, help="most tokens of a step (%(default)s)")
    parser.add_argument("--max-model-len", type=int, help="without it, what the workloads need")
    parser.add_argument("--kv-blocks", type=int, help="without it, what memory allows")


def start(arguments: argparse.Namespace, scratch: Path, longest: int) -> LocalEngine:
    """The engine of `add_options`, for sequences of up to `longest` tokens, as a replica runs it. How far it
    is stands on standard error where that is a terminal. `scratch` is a folder for a shape's configuration.
    Raises FAILURES."""
    spec = ReplicaSpec(
        replica="bench-0",
        model_path=str(arguments.model or write_config(arguments.shape, scratch)),
        load_format=arguments.load_format or ("safetensors" if arguments.model else "dummy"),
        device=arguments.device,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_len or longest,
        max_rows=arguments.max_rows,
        step_tokens=arguments.step_tokens,
        kv_blocks=arguments.kv_blocks,
        weights="fp8" if arguments.fp8 else "auto",
        kv_dtype="fp8" if arguments.kv_fp8 else "auto",
    )
    if arguments.memory_fraction is not None:
        spec = msgspec.structs.replace(spec, memory_fraction=arguments.memory_fraction)
    engine = LocalEngine(spec, _show if sys.stderr.isatty() else lambda stage, fraction: None)
    settle_garbage()
    return engine


def _show(stage: str, fraction: float) -> None:
    text = "" if stage == "ready" else f"{stage} {fraction:.0%}"
    print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
