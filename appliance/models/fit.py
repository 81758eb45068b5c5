"""Predicts with `engine.sizing` whether a replica of a model fits into memory, without loading the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from appliance.models.gpus import DetectedGpu, find_gpus
from appliance.quantities import of_bytes
from appliance.settings import ModelSettings
from engine import sizing

CPU_MAX_KV_BYTES = 2 << 30
"""The engine's limit on the size of the KV cache on a CPU, over all ranks (`engine.memory`)."""


class UnfitError(Exception):
    """Raised if the model cannot run on this machine. `remedy` explains how to fix the problem."""

    def __init__(self, what: str, remedy: str) -> None:
        super().__init__(what)
        self.remedy = remedy


@dataclass(frozen=True, kw_only=True)
class MemoryFit:
    """The predicted memory of each rank of a replica, in bytes."""

    model_type: str
    parameters: int
    on_gpu: bool
    dtype: str
    weights: str
    kv_cache_dtype: str
    longest: int
    """Length in tokens of the longest sequence that the settings or the checkpoint allow."""
    blocks: int
    """The configured number of KV blocks, or as many blocks as fit."""
    usable_bytes: int
    weight_bytes: int
    fixed_bytes: int
    """Memory of the weights plus working memory."""
    block_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def needed_bytes(self) -> int:
        return self.fixed_bytes + self.kv_bytes


def fit(model: ModelSettings, gpus: list[DetectedGpu], available_bytes: int) -> MemoryFit:
    """Predict a replica's memory. `available_bytes` is the memory available to a model on the CPU. On a GPU,
    all memory is treated as free.

    Raises UnfitError for a checkpoint or settings that cannot run at all.
    """
    ranks = model.tensor_parallel_size
    on_gpu = model.device == "cuda" or (model.device == "auto" and bool(gpus))
    if on_gpu and len(gpus) < ranks:
        needed = "one GPU" if ranks == 1 else f"{ranks} GPUs"
        raise UnfitError(
            f"tensor_parallel_size = {ranks} needs {needed}, but {len(gpus)} are available",
            f"lower tensor_parallel_size to {len(gpus)}" if gpus else 'set device = "cpu"',
        )
    memory = min(gpu.memory_bytes for gpu in gpus[:ranks]) if on_gpu else available_bytes // ranks
    usable = int(memory * model.gpu_memory_utilization)
    try:
        config = sizing.read_config(model.folder)
        longest = config.resolve_length(model.max_model_len)
        dtype = model.dtype if model.dtype != "auto" else config.dtype if on_gpu else "float32"
        weights = sizing.FP8 if config.fp8 or model.quantization == sizing.FP8 else dtype
        kv_cache_dtype = model.kv_cache_dtype if model.kv_cache_dtype != "auto" else dtype
        predicted = sizing.predict(
            config,
            dtype=dtype,
            weights=weights,
            kv_cache_dtype=kv_cache_dtype,
            tensor_parallel_size=ranks,
            max_num_seqs=model.max_num_seqs,
            max_num_batched_tokens=model.max_num_batched_tokens,
            max_model_len=longest,
            blocks=None,
            on_gpu=on_gpu,
        )
    except Exception as error:  # The engine's messages name the error in the checkpoint or the settings.
        text, _, remedy = str(error).rpartition("; ")
        raise UnfitError(
            text or str(error), remedy if text else "fix the model's folder or settings"
        ) from error
    room = max(0, usable - predicted.fixed_bytes)
    most = room if on_gpu else min(room, CPU_MAX_KV_BYTES // ranks)
    return MemoryFit(
        model_type=config.model_type,
        parameters=sizing.parameters(config),
        on_gpu=on_gpu,
        dtype=dtype,
        weights=weights,
        kv_cache_dtype=kv_cache_dtype,
        longest=longest,
        blocks=model.kv_blocks if model.kv_blocks is not None else most // predicted.kv_bytes_per_block,
        usable_bytes=usable,
        weight_bytes=predicted.weight_bytes,
        fixed_bytes=predicted.fixed_bytes,
        block_bytes=predicted.kv_bytes_per_block,
    )


def why_not_beside(model: ModelSettings, chosen: Sequence[int] = ()) -> str:
    """Return why a replica with these settings cannot run in addition to the running replicas, or an empty
    string if it can.

    `chosen` holds the numbers of the GPUs that the replica would use; if empty, the first GPUs are used. On a
    GPU, the replica must have as much memory as if no other replica used the GPU. Otherwise its cache would
    stay smaller for its whole lifetime. This function calls NVML and reads from the kernel, so it must not
    run on the event loop.
    """
    import psutil

    gpus, ranks = find_gpus().gpus, model.tensor_parallel_size
    available = int(psutil.virtual_memory().available)
    try:
        wanted = fit(model, gpus, available)
    except UnfitError:
        # The replica's load fails immediately and reports the reason, while the running replicas continue.
        return ""
    if wanted.on_gpu:
        used = [gpus[number] for number in chosen] or gpus[:ranks]
        free = min(gpu.memory_bytes - gpu.used_bytes for gpu in used)
    else:
        free = wanted.usable_bytes
    if wanted.needed_bytes <= free and wanted.blocks:
        return ""
    where = "of the GPU's memory" if wanted.on_gpu else "of the host's memory"
    return f"each rank needs {of_bytes(wanted.needed_bytes)}, but only {of_bytes(free)} {where} is free"
