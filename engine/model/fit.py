"""Whether a rank's weights fit its device: asked before they are made, in numbers where they do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine import memory
from engine.config import ModelConfig, Shard
from engine.memory import WeightsTooLarge
from engine.sizing import FP8, weight_bytes

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Fit:
    """What a rank's weights take, and what its device has."""

    config: ModelConfig
    shard: Shard
    dtype: str
    """The model's, of `engine.config.DTYPE_BYTES`."""
    fp8: bool
    """Whether the layers' matrices are quantised."""
    device: torch.device
    ranks: int = 1
    """On a CPU they share the host."""

    def check(self) -> None:
        """Before weights are made, and before any rank fills some. Raises WeightsTooLarge where they alone
        take more than all memory of a GPU, or than a rank's share of what is available of the host's: its
        kernel promises pages that it does not have, and kills who uses them."""
        if self.device.type == "cuda":
            _, total = torch.cuda.mem_get_info(self.device)
            name = torch.cuda.get_device_name(self.device)
            self._refuse_above(total, f"{name} has {total / _GIB:.1f} GiB")
        elif self.device.type == "cpu":
            available = memory.available_host_bytes()
            has = f"{available / _GIB:.1f} GiB of the host's memory are available"
            shared = f" for {self.ranks} ranks" if self.ranks > 1 else ""
            self._refuse_above(available // self.ranks, has + shared)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Around the making and filling of weights. Raises WeightsTooLarge where a GPU's memory runs out."""
        try:
            yield
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info(self.device)
            most = free + torch.cuda.memory_reserved(self.device)
            name = torch.cuda.get_device_name(self.device)
            raise WeightsTooLarge(
                f"{self._taken()}, and making them more than the {most / _GIB:.1f} GiB that are free of the "
                f"{total / _GIB:.1f} GiB of {name}: {self._remedy(most)}"
            ) from error

    def _refuse_above(self, most: int, has: str) -> None:
        if self._bytes(self.dtype, self._weights) > most:
            raise WeightsTooLarge(f"{self._taken()}, but {has}: {self._remedy(most)}")

    def _taken(self) -> str:
        taken = self._bytes(self.dtype, self._weights) / _GIB
        return f"the weights take {taken:.1f} GiB a rank ({self._weights})"

    def _remedy(self, most: int) -> str:
        """What there is to do; of settings, those with which the weights alone fit."""
        gpu = self.device.type == "cuda"
        remedies = ["use more GPUs (tensor_parallel_size)" if gpu else "free memory"]
        settings = [] if self.fp8 else [(f'quantization = "{FP8}"', self.dtype, FP8)]
        if self.dtype == "float32":
            settings.append(('dtype = "bfloat16"', "bfloat16", FP8 if self.fp8 else "bfloat16"))
        for setting, dtype, weights in settings:
            if (needed := self._bytes(dtype, weights)) <= most:
                remedies.append(f"set {setting} ({needed / _GIB:.1f} GiB)")
        return ", or ".join(remedies)

    @property
    def _weights(self) -> str:
        return FP8 if self.fp8 else self.dtype

    def _bytes(self, dtype: str, weights: str) -> int:
        return weight_bytes(self.config, self.shard, dtype, weights)
