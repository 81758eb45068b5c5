"""Device memory that can be released and restored at the same addresses.

CUDA graphs contain the addresses of the weights and the KV cache. When a replica sleeps, the physical memory
behind these addresses is released, but the addresses stay reserved, so the graphs are valid again once new
memory has been mapped there. Reserving addresses also lets the KV cache grow after the graphs have been
captured.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from typing import Protocol

import torch

ALIGNMENT = 512
"""Alignment of every tensor, in bytes, as in torch's allocator. No kernel needs an alignment of more than 128
bytes."""
PIECE_BYTES = 1 << 30
"""Memory is copied and restored in pieces of at most this many bytes. Large pieces transfer faster, but
several are needed so that one can be copied while the next is mapped."""


class VirtualMemory(Protocol):
    """Reserves address ranges on a device and maps physical memory in them. Implemented by
    `engine.cuda_driver.CudaDriver`, which describes the methods."""

    granularity: int

    def reserve(self, nbytes: int) -> int: ...
    def free_addresses(self, address: int, nbytes: int) -> None: ...
    def map(self, address: int, nbytes: int) -> int: ...
    def unmap(self, address: int, nbytes: int, handle: int) -> None: ...
    def synchronize(self) -> None: ...
    def tensor(self, address: int, nbytes: int, owner: object) -> torch.Tensor: ...


class DeviceArena:
    """Tensors in one address range. Individual tensors are never freed; the memory and the addresses are
    returned to the driver once the arena and all of its tensors have been deleted.

    `limit_bytes` is the size of the range. The arena uses no physical memory until `empty` or `grow` is
    called.
    """

    def __init__(self, driver: VirtualMemory, limit_bytes: int) -> None:
        self._driver = driver
        self._limit = -(-limit_bytes // driver.granularity) * driver.granularity
        self._base = driver.reserve(self._limit)
        self._allocated = 0
        self._size = 0
        """Number of bytes, from the start of the address range, that are backed by physical memory unless the
        arena is released."""
        self._mapped: list[tuple[int, int, int]] = []
        """Address, size and handle of each mapped piece."""
        # The finaliser must not refer to the arena, or the arena would never be deleted.
        end = weakref.finalize(self, _free, driver, self._base, self._limit, self._mapped)
        end.atexit = False

    @property
    def mapped_bytes(self) -> int:
        """Size, in bytes, of the physical memory that is currently mapped."""
        return sum(nbytes for _, nbytes, _ in self._mapped)

    @property
    def size_bytes(self) -> int:
        """Size, in bytes, of the arena's physical memory when it is not released."""
        return self._size

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor. Must not be called while the memory is released. Raises
        torch.OutOfMemoryError if the memory or the address range is too small."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            raise ValueError(f"cannot allocate a tensor of shape {shape}: it has no elements")
        start = -(-self._allocated // ALIGNMENT) * ALIGNMENT
        end = start + nbytes
        if end > self._limit:
            raise torch.OutOfMemoryError(
                f"{end} bytes exceed the arena's address range of {self._limit} bytes"
            )
        self.grow(end)
        self._allocated = end
        return self._driver.tensor(self._base + start, nbytes, self).view(dtype).view(shape)

    def growing(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor that begins at the start of the arena, which must contain no other tensor. Only the
        part that `grow` has backed with physical memory may be accessed. Call `grow` first, because torch
        determines an address's device from the memory mapped there."""
        return (
            self._driver.tensor(self._base, math.prod(shape) * dtype.itemsize, self).view(dtype).view(shape)
        )

    def grow(self, nbytes: int) -> torch.Tensor | None:
        """Back the first `nbytes` bytes of the arena with physical memory. Returns the new memory ([bytes]
        uint8, uninitialised), or None if all of these bytes were already backed. Raises
        torch.OutOfMemoryError if the device has too little free memory."""
        missing = self.missing_bytes(nbytes)
        if not missing:
            return None
        address = self._base + self._size
        self._map(address, missing)
        self._size += missing
        return self._driver.tensor(address, missing, self)

    def missing_bytes(self, nbytes: int) -> int:
        """Return how many bytes of physical memory `grow` would allocate."""
        granularity = self._driver.granularity
        return max(0, -(-nbytes // granularity) * granularity - self._size)

    def pieces(self) -> Iterator[torch.Tensor]:
        """Yield the arena's memory in order, as tensors of at most PIECE_BYTES: [bytes] uint8."""
        for address, nbytes in self._ranges():
            yield self._driver.tensor(address, nbytes, self)

    def release(self) -> int:
        """Release the physical memory and return its size in bytes. The contents are lost. The device must
        not access the arena until `restore` has been called."""
        freed = self.mapped_bytes
        _unmap(self._driver, self._mapped)
        return freed

    def restore(self) -> Iterator[torch.Tensor]:
        """Map new, uninitialised memory at the arena's addresses. Yields each piece (see `pieces`) as soon as
        it is mapped, so that the caller can fill it while the next one is mapped. Raises
        torch.OutOfMemoryError if the device has too little free memory; the caller must then call `release`.
        """
        for address, nbytes in self._ranges():
            self._map(address, nbytes)
            yield self._driver.tensor(address, nbytes, self)

    def _ranges(self) -> Iterator[tuple[int, int]]:
        """Yield each piece's address and size."""
        for start in range(0, self._size, PIECE_BYTES):
            yield self._base + start, min(PIECE_BYTES, self._size - start)

    def _map(self, address: int, nbytes: int) -> None:
        self._mapped.append((address, nbytes, self._driver.map(address, nbytes)))


def _unmap(driver: VirtualMemory, mapped: list[tuple[int, int, int]]) -> None:
    driver.synchronize()
    while mapped:
        driver.unmap(*mapped.pop())


def _free(driver: VirtualMemory, base: int, limit: int, mapped: list[tuple[int, int, int]]) -> None:
    _unmap(driver, mapped)
    driver.free_addresses(base, limit)
