"""Checks whether a rank's weights fit on its device, before and during allocation."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine import memory
from engine.config import ModelConfig, Shard
from engine.memory import WeightsTooLarge
from engine.messages import ModelDType, WeightsDType
from engine.rank_memory import RankMemory
from engine.sizing import FP8, FP8_BLOCKS, weight_bytes

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class WeightFit:
    """Compares the size of a rank's weights with the memory of its device."""

    config: ModelConfig
    shard: Shard
    dtype: ModelDType
    """Dtype of the model."""
    fp8: bool
    """Whether the layers' matrices are quantised."""
    device: torch.device
    ranks: int = 1
    """Number of ranks. On a CPU, they share host memory."""
    fp8_blocks: bool = False
    """Whether quantised matrices have one scale per block."""
    memory: RankMemory | None = None
    """Allocates the weights. If None, torch allocates them."""

    def check(self) -> None:
        """Raise WeightsTooLarge if the weights cannot fit. Call before any rank allocates weights. The limit
        is a GPU's total memory or, on a CPU, this rank's share of the available host memory. On a CPU, the
        check is necessary because Linux overcommits memory and kills a process when no free page is left.
        """
        if self.device.type == "cuda":
            _, total = torch.cuda.mem_get_info(self.device)
            name = torch.cuda.get_device_name(self.device)
            self._refuse_above(total, f"{name} has {total / _GIB:.1f} GiB")
        elif self.device.type == "cpu":
            available = memory.available_host_bytes()
            has = f"only {available / _GIB:.1f} GiB of host memory are available"
            shared = f" for {self.ranks} ranks" if self.ranks > 1 else ""
            self._refuse_above(available // self.ranks, has + shared)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raise WeightsTooLarge if a GPU runs out of memory in the body of the `with` statement, where
        weights are allocated and filled."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            most = free + torch.cuda.memory_reserved(self.device)
            if self.memory is not None:
                most += self.memory.held_bytes
            name = torch.cuda.get_device_name(self.device)
            raise WeightsTooLarge(
                f"{self._taken()}, and loading them needs more than the {most / _GIB:.1f} GiB that are free "
                f"on {name} ({total / _GIB:.1f} GiB in total): {self._remedy(most)}"
            ) from error

    def _refuse_above(self, most: int, has: str) -> None:
        if self._bytes(self.dtype, self._weights) > most:
            raise WeightsTooLarge(f"{self._taken()}, but {has}: {self._remedy(most)}")

    def _taken(self) -> str:
        taken = self._bytes(self.dtype, self._weights) / _GIB
        return f"the weights take {taken:.1f} GiB per rank ({self._weights})"

    def _remedy(self, most: int) -> str:
        """Return the possible remedies. A setting is suggested only if the weights would then fit into `most`
        bytes."""
        gpu = self.device.type == "cuda"
        remedies = ["use more GPUs (tensor_parallel_size)" if gpu else "free memory"]
        settings: list[tuple[str, ModelDType, WeightsDType]]
        settings = [] if self.fp8 else [(f'quantization = "{FP8}"', self.dtype, FP8)]
        if self.dtype == "float32":
            settings.append(('dtype = "bfloat16"', "bfloat16", self._weights if self.fp8 else "bfloat16"))
        for setting, dtype, weights in settings:
            if (needed := self._bytes(dtype, weights)) <= most:
                remedies.append(f"set {setting} ({needed / _GIB:.1f} GiB)")
        return ", or ".join(remedies)

    @property
    def _weights(self) -> WeightsDType:
        if not self.fp8:
            return self.dtype
        return FP8_BLOCKS if self.fp8_blocks else FP8

    def _bytes(self, dtype: ModelDType, weights: WeightsDType) -> int:
        return weight_bytes(self.config, self.shard, dtype, weights)
