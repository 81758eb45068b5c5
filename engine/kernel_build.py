"""Compiling a replica's kernels while its weights load, where `python -m kernels.build` has not done it.

A start that finds them costs a hash of a few files. One that does not has them compiled by other processes,
on every core, instead of one by one when they are first launched; and no request compiles any.
"""

from __future__ import annotations

import logging
import subprocess
from typing import TYPE_CHECKING

import torch

from engine.config import ModelConfig, UnsupportedError
from engine.messages import ReplicaSpec
from engine.sizing import FP8

if TYPE_CHECKING:
    from kernels.dimensions import Dimensions

log = logging.getLogger(__name__)


class KernelBuild:
    """The compilation of one replica's kernels; `wait` before the first one is launched."""

    def __init__(self, process: subprocess.Popen[bytes] | None = None) -> None:
        self._process = process

    @property
    def running(self) -> bool:
        """Whether there is something to wait for."""
        return self._process is not None and self._process.poll() is None

    def wait(self) -> None:
        """Until it has ended. A kernel that could not be compiled ahead is compiled, or fails, when it is
        launched; the log says why."""
        if self._process is not None and (code := self._process.wait()):
            log.warning("kernels could not be compiled ahead (exit code %d): see above", code)


def start_build(
    config: ModelConfig,
    spec: ReplicaSpec,
    *,
    dtype: str,
    weights: str,
    kv_cache_dtype: str,
    device: torch.device,
) -> KernelBuild:
    """Compile what is not in Triton's cache yet, in other processes. float32 has no kernels of ours."""
    if device.type != "cuda" or dtype == "float32":
        return KernelBuild()
    # Here, since a replica on a CPU needs no Triton.
    from kernels import build, compiling

    gpu = compiling.current_gpu(device)
    wanted = dimensions(config, spec, dtype=dtype, weights=weights, kv_cache_dtype=kv_cache_dtype)
    return KernelBuild() if build.is_built(wanted, gpu) else KernelBuild(build.start(wanted, gpu))


def check_kernels(
    config: ModelConfig,
    spec: ReplicaSpec,
    *,
    dtype: str,
    weights: str,
    kv_cache_dtype: str,
    device: torch.device,
) -> None:
    """Raises UnsupportedError for a model that cannot be split over the ranks, or that the kernels of a GPU,
    or of this one, cannot serve; float32 and the CPU have none."""
    config.check_parallel(spec.tensor_parallel_size)
    if device.type != "cuda" or dtype == "float32":
        return
    from kernels import compiling
    from kernels.dimensions import DimensionsError, check, check_gpu

    wanted = dimensions(config, spec, dtype=dtype, weights=weights, kv_cache_dtype=kv_cache_dtype)
    try:
        check(wanted)
        gpu = compiling.current_gpu(device)
        check_gpu(wanted, gpu.name, gpu.target.arch)
    except DimensionsError as error:
        raise UnsupportedError(str(error)) from None


def dimensions(
    config: ModelConfig, spec: ReplicaSpec, *, dtype: str, weights: str, kv_cache_dtype: str
) -> Dimensions:
    """Of the kernels that a replica needs; those that `kernels.dimensions` reads from the same file."""
    from kernels.dimensions import Dimensions

    return Dimensions(
        hidden=config.hidden_size,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head_dim=config.head_dim,
        intermediate=config.intermediate_size,
        vocab=config.vocab_size,
        qk_norm=config.qk_norm,
        qkv_bias=config.qkv_bias,
        o_bias=config.o_bias,
        mlp_bias=config.mlp_bias,
        windows=tuple(sorted(set(config.sliding_windows), key=lambda window: window or 0)),
        dtype=dtype,
        fp8=weights == FP8,
        kv_fp8=kv_cache_dtype == FP8,
        tensor_parallel=spec.tensor_parallel_size,
        max_num_seqs=spec.max_num_seqs,
        max_num_batched_tokens=spec.max_num_batched_tokens,
    )
