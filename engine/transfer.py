"""From the host to the device, without waiting."""

from __future__ import annotations

import numpy as np
import torch

_SMALL = 16 << 10
"""Bytes: what a step sends of its rows."""
_SMALL_ONES = 32
_LARGE_ONES = 6
"""Such transfers of two steps: one that runs and one that is launched."""


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return `array` on the device. On a CPU the tensor shares the array's memory. To a GPU it is sent from
    pinned memory, which torch keeps until it is read."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def reserve(most: int) -> None:
    """Have torch keep page-locked memory for transfers of up to `most` bytes, in each of the sizes in which
    it keeps any (powers of two), for as many as are under way at once: to get more, a launch may have to wait
    until the device has nothing to do (CUDA's guide calls it implicit synchronisation). For GPUs."""
    for count, nbytes in kept(most):
        # All of a size at once, or the second would be the first again.
        together = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        together.clear()


def kept(most: int) -> list[tuple[int, int]]:
    """How many transfers of how many bytes `reserve` has memory for."""
    sizes = [1 << bits for bits in range((most - 1).bit_length() + 1)]
    return [(_SMALL_ONES if nbytes <= _SMALL else _LARGE_ONES, nbytes) for nbytes in sizes]
