"""Predicts whether a replica fits into memory, without loading the model. The prediction uses
`engine.sizing`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from appliance.models.gpus import DetectedGpu, find_gpus
from appliance.quantities import of_bytes
from appliance.settings import ModelSettings
from engine import sizing
from engine.messages import BLOCK_TOKENS, KvDType, ModelDType, WeightsDType

_LENGTHS = (1024, 4096, 16_384, 65_536)
"""The number of concurrent sequences is shown for these sequence lengths, in tokens, and for the maximum
length."""


class UnfitError(Exception):
    """Raised if a model cannot run on this machine. `remedy` explains how to fix the problem."""

    def __init__(self, description: str, remedy: str) -> None:
        super().__init__(description)
        self.remedy = remedy


class MachineMemory(msgspec.Struct, frozen=True, kw_only=True):
    """This machine's memory, and how much of it is currently in use."""

    gpus: list[DetectedGpu]
    available_bytes: int
    """Host memory available to new processes, as limited by the machine and this process's cgroups."""
    total_bytes: int
    """The machine's total host memory."""

    def idle(self) -> MachineMemory:
        """Return this machine's memory as if no process were using any of it."""
        return MachineMemory(
            gpus=[gpu._replace(used_bytes=0) for gpu in self.gpus],
            available_bytes=self.total_bytes,
            total_bytes=self.total_bytes,
        )


class MemoryFit(msgspec.Struct, frozen=True, kw_only=True):
    """A replica's predicted memory use. Sizes are in bytes per rank."""

    model_type: str
    parameters: int
    gpus: list[DetectedGpu]
    """The GPUs for which the prediction was made; empty if the model runs on the CPU."""
    ranks: int
    dtype: ModelDType
    weights: WeightsDType
    kv_cache_dtype: KvDType
    max_model_len: int
    """Maximum sequence length, in tokens, allowed by the settings or the checkpoint."""
    max_num_seqs: int
    kv_blocks: int
    """Number of KV blocks: the configured number or, without one, as many as fit into memory."""
    total_bytes: int
    """Device memory per rank. On a CPU, this is the available memory divided by the number of ranks."""
    used_bytes: int
    """GPU memory used by other processes. Always 0 on a CPU."""
    usable_bytes: int
    """The memory allowed by `gpu_memory_utilization`, minus `used_bytes`."""
    weight_bytes: int
    workspace_bytes: int
    block_bytes: int

    @property
    def kv_bytes(self) -> int:
        return self.kv_blocks * self.block_bytes

    @property
    def needed_bytes(self) -> int:
        return self.weight_bytes + self.workspace_bytes + self.kv_bytes

    @property
    def kv_tokens(self) -> int:
        """KV cache capacity in tokens."""
        return self.kv_blocks * BLOCK_TOKENS

    def sequences(self, tokens: int) -> int:
        """Return the number of sequences of this length that can run concurrently."""
        return min(self.max_num_seqs, self.kv_blocks // -(-tokens // BLOCK_TOKENS))

    def lengths(self) -> list[int]:
        """Return the sequence lengths, in ascending order, for which to show the number of concurrent
        sequences."""
        longest = min(self.max_model_len, self.kv_tokens)
        return [*(length for length in _LENGTHS if length < longest), longest] if longest else []


def read_memory() -> MachineMemory:
    """Return this machine's memory. This function may block, so it must not run on the event loop."""
    import psutil

    return MachineMemory(
        gpus=find_gpus().gpus,
        available_bytes=sizing.available_host_bytes(),
        total_bytes=int(psutil.virtual_memory().total),
    )


def fit(model: ModelSettings, memory: MachineMemory, chosen: Sequence[int] = ()) -> MemoryFit:
    """Predict a replica's memory use. `chosen` lists the GPUs that the replica would use, by default those
    with the most free memory. Raises UnfitError if no replica can run with this checkpoint and these
    settings.
    """
    ranks = model.tensor_parallel_size
    on_gpu = model.device == "cuda" or (model.device == "auto" and bool(memory.gpus))
    if on_gpu and len(memory.gpus) < ranks:
        needed = "one GPU" if ranks == 1 else f"{ranks} GPUs"
        raise UnfitError(
            f"tensor_parallel_size = {ranks} needs {needed}, but the machine has {len(memory.gpus)}",
            f"lower tensor_parallel_size to {len(memory.gpus)}" if memory.gpus else 'set device = "cpu"',
        )
    gpus = _gpus(memory.gpus, ranks, chosen) if on_gpu else []
    fullest = min(gpus, key=_free, default=None)
    limit_gb, available = model.memory_limit_gb, memory.available_bytes
    host_bytes = available if limit_gb is None else min(available, int(limit_gb * 1e9))
    total = host_bytes // ranks if fullest is None else fullest.memory_bytes
    used = 0 if fullest is None else fullest.used_bytes
    usable = max(0, int(total * model.gpu_memory_utilization) - used)
    try:
        config = sizing.read_config(model.folder)
        if model.expert_parallel:
            config = config.with_whole_experts()
        longest = config.resolve_length(model.max_model_len)
        dtype = model.dtype if model.dtype != "auto" else config.dtype if on_gpu else "float32"
        weights = sizing.weights_dtype(
            config, model.quantization, dtype, on_gpu=on_gpu, tensor_parallel_size=ranks
        )
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
    except sizing.ModelError as error:
        raise UnfitError(error.cause, error.remedy) from error
    except Exception as error:  # for example, a size in config.json overflows
        raise UnfitError(str(error), "fix the model's folder or settings") from error
    space = max(0, usable - predicted.fixed_bytes)
    most = space if on_gpu else min(space, sizing.CPU_MAX_KV_BYTES // ranks)
    return MemoryFit(
        model_type=config.model_type,
        parameters=sizing.parameters(config),
        gpus=gpus,
        ranks=ranks,
        dtype=dtype,
        weights=weights,
        kv_cache_dtype=kv_cache_dtype,
        max_model_len=longest,
        max_num_seqs=model.max_num_seqs,
        kv_blocks=model.kv_blocks if model.kv_blocks is not None else most // predicted.kv_bytes_per_block,
        total_bytes=total,
        used_bytes=used,
        usable_bytes=usable,
        weight_bytes=predicted.weight_bytes,
        workspace_bytes=predicted.fixed_bytes - predicted.weight_bytes,
        block_bytes=predicted.kv_bytes_per_block,
    )


class MemoryShortage(NamedTuple):
    """How much more memory a model needs to run alongside the running replicas."""

    bytes: int = 0
    """Missing memory in bytes, summed over all ranks; 0 if the model fits."""
    reason: str = ""
    """Why the model does not fit into memory, including the sizes; empty if it fits."""


def shortage_beside(
    model: ModelSettings,
    chosen: Sequence[int] = (),
    count: int = 1,
    *,
    others: Sequence[ModelSettings] = (),
    limit_bytes: int | None = None,
) -> MemoryShortage:
    """Return how much memory is missing to run `count` more replicas with these settings alongside the
    running replicas. On GPUs, only one replica is checked, because each additional one gets different GPUs.

    - `chosen`: the GPUs that the replica would use, by default the first GPUs.
    - `others`: the settings of each running replica.
    - `limit_bytes`: the maximum total memory of all replicas on the CPU, if there is a limit.

    On a GPU, the replica must get as much memory as if it had the GPU to itself. Otherwise, its KV cache
    would be smaller for its entire lifetime. This function may block, so it must not run on the event loop.
    """
    memory = read_memory()
    chosen = chosen or range(min(len(memory.gpus), model.tensor_parallel_size))
    alone = MachineMemory(
        gpus=memory.idle().gpus, available_bytes=memory.available_bytes, total_bytes=memory.total_bytes
    )
    try:
        wanted = fit(model, alone, chosen)
    except UnfitError:
        # Report no shortage: the load will fail immediately with the reason, and the running replicas
        # continue.
        return MemoryShortage()
    on_gpu = bool(wanted.gpus)
    free = min(_free(memory.gpus[gpu.number]) for gpu in wanted.gpus) if on_gpu else wanted.usable_bytes
    needed = wanted.needed_bytes if on_gpu else wanted.needed_bytes * count
    if needed > free or not wanted.kv_blocks:
        where = "of the GPU's memory" if on_gpu else "of the host's memory"
        ranks = "each rank needs" if needed == wanted.needed_bytes else f"{count} ranks need"
        return MemoryShortage(
            max(1, needed - free) * wanted.ranks,
            f"{ranks} {of_bytes(needed)}, but only {of_bytes(free)} {where} is free",
        )
    if on_gpu or limit_bytes is None:
        return MemoryShortage()
    needed, used = count * host_bytes(model, memory), sum(host_bytes(one, memory) for one in others)
    if needed + used <= limit_bytes:
        return MemoryShortage()
    return MemoryShortage(
        needed + used - limit_bytes,
        f"it needs {of_bytes(needed)}, and the models in memory use {of_bytes(used)} of the "
        f"{of_bytes(limit_bytes)} that on_demand.memory_gb allows",
    )


def shortage_to_wake(needs: Iterable[tuple[Sequence[int], int]]) -> MemoryShortage:
    """Return how much GPU memory is missing to wake sleeping replicas. `needs` lists each replica's GPUs and
    the memory it has released, summed over its ranks. This function may block, so it must not run on the
    event loop."""
    needed: Counter[int] = Counter()
    for numbers, freed_bytes in needs:
        for number in numbers:
            needed[number] += freed_bytes // len(numbers)
    free = {gpu.number: _free(gpu) for gpu in find_gpus().gpus}
    missing = {number: needed[number] - free[number] for number in needed.keys() & free.keys()}
    short = {number: missing_bytes for number, missing_bytes in missing.items() if missing_bytes > 0}
    if not short:
        return MemoryShortage()
    worst = max(short, key=lambda number: short[number])
    return MemoryShortage(
        sum(short.values()),
        f"waking it needs {of_bytes(needed[worst])} on GPU {worst}, but only {of_bytes(free[worst])} are "
        "free",
    )


def host_bytes(model: ModelSettings, memory: MachineMemory) -> int:
    """Return the predicted host memory per replica, or 0 if the model runs on a GPU or cannot run. If
    `kv_blocks` is not set, the result includes the largest KV cache that this machine allows."""
    try:
        found = fit(model, memory.idle())
    except UnfitError:
        return 0
    return 0 if found.gpus else found.needed_bytes * found.ranks


def _gpus(gpus: list[DetectedGpu], ranks: int, chosen: Sequence[int]) -> list[DetectedGpu]:
    if chosen:
        return [gpus[number] for number in chosen]
    return sorted(sorted(gpus, key=_free, reverse=True)[:ranks])


def _free(gpu: DetectedGpu) -> int:
    return gpu.memory_bytes - gpu.used_bytes
