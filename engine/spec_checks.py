"""Checks the parts of a replica's configuration that can be checked without a checkpoint or a device."""

from __future__ import annotations

from engine.config import DTYPE_BYTES, UnsupportedError
from engine.messages import ReplicaSpec
from engine.sizing import FP8


def check_spec(spec: ReplicaSpec) -> None:
    """Raise UnsupportedError if the configuration is invalid on every device."""
    if spec.load_format not in ("safetensors", "dummy"):
        raise UnsupportedError(f"load_format is {spec.load_format!r}", 'use "safetensors" or "dummy"')
    if spec.dtype != "auto" and spec.dtype not in DTYPE_BYTES:
        raise UnsupportedError(f"dtype is {spec.dtype!r}", f"use auto, {', '.join(DTYPE_BYTES)}")
    if spec.max_num_seqs < 1:
        raise UnsupportedError(f"max_num_seqs is {spec.max_num_seqs}", "it must be at least 1")
    for name, value in (("quantization", spec.quantization), ("kv_cache_dtype", spec.kv_cache_dtype)):
        if value not in ("auto", FP8):
            raise UnsupportedError(f"{name} is {value!r}", f'use "auto" or "{FP8}"')
    if spec.max_num_batched_tokens < spec.max_num_seqs:
        raise UnsupportedError(
            f"max_num_batched_tokens is {spec.max_num_batched_tokens}, but {spec.max_num_seqs} sequences "
            "decode one token each in a step",
            "raise max_num_batched_tokens or lower max_num_seqs",
        )
    if (
        spec.max_mixed_tokens is not None
        and not spec.max_num_seqs <= spec.max_mixed_tokens <= spec.max_num_batched_tokens
    ):
        raise UnsupportedError(
            f"max_mixed_tokens is {spec.max_mixed_tokens}",
            "it must be at least max_num_seqs "
            f"({spec.max_num_seqs}) and at most max_num_batched_tokens "
            f"({spec.max_num_batched_tokens}), or left out",
        )
    if not 0.0 < spec.gpu_memory_utilization <= 1.0:
        raise UnsupportedError(
            f"gpu_memory_utilization is {spec.gpu_memory_utilization}", "it must be above 0 and at most 1"
        )
    if spec.threads is not None and spec.threads < 1:
        raise UnsupportedError(f"threads is {spec.threads}", "it must be at least 1, or left out")
