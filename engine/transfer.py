"""Transfers data from the host to the device without waiting for the device."""

from __future__ import annotations

import numpy as np
import torch

_SMALL_BYTES = 16 << 10
"""Maximum size, in bytes, of a small transfer. A step needs several small transfers for the data of its
slots."""
_SMALL_COUNT = 32
_LARGE_COUNT = 6
"""Numbers of small and large transfers that may be in flight at once: those of a running step and of the next
step."""


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy `array` to the device without waiting for the device. The copy uses pinned memory, which torch
    retains until the device has read it. On a CPU, the returned tensor shares the memory of `array`."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def reserve_pinned(max_bytes: int) -> None:
    """Fill torch's cache of pinned memory with buffers of up to `max_bytes` each, enough for all transfers in
    flight. Requires a GPU. Pinning more memory later could make a launch wait until the device is idle (see
    "Implicit Synchronization" in the CUDA programming guide). torch caches pinned memory in power-of-two
    sizes.
    """
    for count, nbytes in reservations(max_bytes):
        # Allocate all buffers of a size before freeing any; otherwise, torch would return the same buffer
        # again.
        buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        buffers.clear()


def reservations(max_bytes: int) -> list[tuple[int, int]]:
    """Return the buffers that `reserve_pinned` allocates, as (count, bytes) pairs."""
    sizes = [1 << bits for bits in range((max_bytes - 1).bit_length() + 1)]
    return [(_SMALL_COUNT if nbytes <= _SMALL_BYTES else _LARGE_COUNT, nbytes) for nbytes in sizes]
