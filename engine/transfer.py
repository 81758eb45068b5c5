"""Transfers from the host to the device that do not wait for the device."""

from __future__ import annotations

import numpy as np
import torch

_SMALL_BYTES = 16 << 10
"""Transfers of up to this size count as small: a step makes several of them for its slots."""
_SMALL_COUNT = 32
_LARGE_COUNT = 6
"""Maximum numbers of small and of larger transfers in flight: those of one running and one launched step."""


def upload(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copy `array` to the device through pinned memory, which torch keeps until the device has read it. On a
    CPU, return a tensor on the same memory."""
    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def reserve_pinned(max_bytes: int) -> None:
    """Fill torch's cache of pinned memory with buffers for all transfers that may be in flight at once, of up
    to `max_bytes` each.

    Pinning more memory later may make a launch wait until the device is idle (implicit synchronisation in
    CUDA's programming guide). torch caches pinned memory in sizes that are powers of two. Needs a GPU.
    """
    for count, nbytes in reservations(max_bytes):
        # All buffers of a size are allocated before any is freed, or torch would hand out the same one again.
        buffers = [torch.empty(nbytes, dtype=torch.uint8, pin_memory=True) for _ in range(count)]
        buffers.clear()


def reservations(max_bytes: int) -> list[tuple[int, int]]:
    """Return the (count, bytes) of the buffers that `reserve_pinned` allocates."""
    sizes = [1 << bits for bits in range((max_bytes - 1).bit_length() + 1)]
    return [(_SMALL_COUNT if nbytes <= _SMALL_BYTES else _LARGE_COUNT, nbytes) for nbytes in sizes]
