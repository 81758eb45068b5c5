"""Manages the part of a rank's memory that is released while the replica sleeps: the weights and the KV
cache. On a GPU, the KV cache can also grow.

When a replica on a GPU goes to sleep, its weights are copied to host memory. The GPU memory of weights and KV
cache is released and later remapped at the same addresses (`engine.device_arena`). On a CPU, only the KV
cache is released, because copying the weights would take as much memory as it frees.
"""

from __future__ import annotations

import logging
import math
import mmap
import threading
from bisect import bisect_right
from typing import Protocol

import torch

from engine import memory
from engine.cuda_driver import CudaDriver, DriverError
from engine.device_arena import DeviceArena, VirtualMemory
from engine.host_pages import lock_pages, map_pages, unlock_pages

log = logging.getLogger(__name__)

HOST_RESERVE_BYTES = 1 << 30
"""Host memory, in bytes, that must remain available after copying the weights to host memory."""
_GIB = 2**30


class SleepError(MemoryError):
    """Raised if the replica cannot sleep or wake. The message gives the reason and the remedy."""


class RankMemory(Protocol):
    """Allocates weights and KV cache, releases their memory, and restores it. To put a replica to sleep, call
    `save`, then `release`. To wake it, call `restore`. `save` and `restore` raise SleepError; a failed call
    changes nothing.
    """

    @property
    def held_bytes(self) -> int:
        """Device memory, in bytes, allocated outside torch's allocator."""

    @property
    def host_bytes(self) -> int:
        """Host memory used for copies of the weights, in bytes."""

    def empty_weights(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor for weights. Raises torch.OutOfMemoryError if the device has too
        little memory."""

    def zeroed_kv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a zero-filled tensor for the KV cache. If there is too little memory, raises
        torch.OutOfMemoryError, or OSError on a CPU."""

    @property
    def can_grow(self) -> bool:
        """Whether `growing_kv` and `grow_kv` are supported."""

    def growing_kv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor whose first dimension is the block id. Only the first block, and blocks provided by
        `grow_kv`, may be accessed. Raises torch.OutOfMemoryError if the device has too little memory."""

    def grow_kv(self, blocks: int) -> None:
        """Provide zero-filled memory for the first `blocks` blocks of every tensor from `growing_kv`. Raises
        torch.OutOfMemoryError if the device has too little memory."""

    def blocks_within(self, nbytes: int) -> int:
        """Return how many blocks the KV cache can have if `grow_kv` allocates at most `nbytes` bytes."""

    def check(self, ranks: int) -> None:
        """Raise SleepError if this rank cannot sleep. `ranks` is the number of ranks on this machine, each of
        which needs host memory."""

    def save(self) -> None:
        """Copy to host memory everything that `release` destroys and `restore` needs."""

    def forget(self) -> None:
        """Delete the copies made by `save`."""

    def release(self) -> int:
        """Release the memory and return its size in bytes. `save` must be called first."""

    def restore(self) -> None:
        """Restore the memory freed by `release`, with the original weights and a zero-filled KV cache. The
        host copies are kept until `forget`."""


class _FixedKv:
    """Base class of memory managers whose KV cache has a fixed size."""

    can_grow = False

    def growing_kv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        raise NotImplementedError

    def grow_kv(self, blocks: int) -> None:
        raise NotImplementedError

    def blocks_within(self, nbytes: int) -> int:
        raise NotImplementedError


class CpuMemory(_FixedKv):
    """Manages a rank's memory on a CPU."""

    held_bytes = 0
    host_bytes = 0

    def __init__(self, device: torch.device, ranks: int) -> None:
        self._device = device
        self._ranks = ranks
        self._pages: list[mmap.mmap] = []
        """The KV cache's pages."""

    def empty_weights(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def zeroed_kv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a zero-filled tensor. Its pages are allocated lazily: creating the tensor takes almost no
        time, and a page uses no memory until it is written."""
        pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._pages.append(pages)
        return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)

    def check(self, ranks: int) -> None:
        return

    def save(self) -> None:
        return

    def forget(self) -> None:
        return

    def release(self) -> int:
        for pages in self._pages:
            pages.madvise(mmap.MADV_DONTNEED)
        return self._kv_bytes

    def restore(self) -> None:
        # Released pages read as zeros and are reallocated when written, so nothing needs to be restored.
        # However, Linux kills a process when no free page is left, so check the available memory first.
        needed, available = self._kv_bytes * self._ranks, memory.available_host_bytes()
        if needed > available:
            raise SleepError(
                f"the KV cache needs {needed / _GIB:.1f} GiB of host memory, but only "
                f"{available / _GIB:.1f} GiB are available: free memory, or unload another model"
            )

    @property
    def _kv_bytes(self) -> int:
        return sum(len(pages) for pages in self._pages)


class TorchMemory(_FixedKv):
    """Manages a rank's memory on a GPU if the driver does not support virtual memory management. The rank
    cannot sleep."""

    held_bytes = 0
    host_bytes = 0

    def __init__(self, device: torch.device, problem: str) -> None:
        self._device = device
        self._problem = problem

    def empty_weights(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def zeroed_kv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype, device=self._device)

    def check(self, ranks: int) -> None:
        raise SleepError(f"the memory of {self._device} cannot be released: {self._problem}")

    def save(self) -> None:
        self.check(1)

    def forget(self) -> None:
        return

    def release(self) -> int:
        return 0

    def restore(self) -> None:
        return


class GpuMemory:
    """Manages a rank's memory on a GPU."""

    can_grow = True

    def __init__(self, driver: VirtualMemory, device: torch.device, total_bytes: int) -> None:
        """Manage the memory of a GPU that has `total_bytes` bytes in total."""
        self._device, self._driver = device, driver
        self._weights = DeviceArena(driver, total_bytes)
        self._kv: list[DeviceArena] = []
        """One arena per KV cache tensor, because only a tensor with its own arena can grow."""
        self._block_bytes: list[int] = []
        """Size in bytes of one block, for each KV cache tensor."""
        self._copies: list[torch.Tensor] = []
        """Page-locked copies of the weights, one for each piece of the arena."""
        self._freeing: threading.Thread | None = None

    @property
    def held_bytes(self) -> int:
        return self._weights.mapped_bytes + sum(arena.mapped_bytes for arena in self._kv)

    @property
    def host_bytes(self) -> int:
        return sum(copy.nbytes for copy in self._copies)

    def empty_weights(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return self._weights.empty(shape, dtype)

    def zeroed_kv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        whole = self.growing_kv(shape, dtype)
        self._kv[-1].grow(whole.nbytes)
        return whole.zero_()

    def growing_kv(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        block_bytes = math.prod(shape[1:]) * dtype.itemsize
        arena = DeviceArena(self._driver, shape[0] * block_bytes)
        self._kv.append(arena)
        self._block_bytes.append(block_bytes)
        first = arena.grow(block_bytes)
        assert first is not None
        first.zero_()
        return arena.growing(shape, dtype)

    def grow_kv(self, blocks: int) -> None:
        for arena, block_bytes in zip(self._kv, self._block_bytes, strict=True):
            new = arena.grow(blocks * block_bytes)
            if new is not None:
                new.zero_()

    def blocks_within(self, nbytes: int) -> int:
        held = sum(arena.size_bytes for arena in self._kv)
        most = max(0, nbytes + held) // sum(self._block_bytes)
        # Every tensor occupies whole pages, so fewer than `most` blocks may fit.
        return max(0, bisect_right(range(most + 1), nbytes, key=self._missing_bytes) - 1)

    def _missing_bytes(self, blocks: int) -> int:
        """Return how many bytes `grow_kv` would allocate."""
        sizes = zip(self._kv, self._block_bytes, strict=True)
        return sum(arena.missing_bytes(blocks * block_bytes) for arena, block_bytes in sizes)

    def check(self, ranks: int) -> None:
        self._wait_until_freed()
        needed = self._weights.size_bytes * ranks
        available = max(0, memory.available_host_bytes() - HOST_RESERVE_BYTES)
        if needed > available:
            raise SleepError(
                f"the weights need {needed / _GIB:.1f} GiB of host memory, but only "
                f"{available / _GIB:.1f} GiB are available: free memory, or unload the model instead"
            )

    def save(self) -> None:
        try:
            for piece in self._weights.pieces():
                copy = map_pages(piece.nbytes)
                copy.zero_()  # allocates the pages in parallel, which page-locking would not do
                lock_pages(copy)
                self._copies.append(copy)
                copy.copy_(piece, non_blocking=True)
            torch.cuda.synchronize(self._device)
        except (OSError, torch.AcceleratorError) as error:
            self.forget()
            reason = str(error).splitlines()[0]
            raise SleepError(f"the weights could not be copied to host memory: {reason}") from error

    def forget(self) -> None:
        """Delete the copies in the background, because unlocking their memory takes longer than waking the
        replica."""
        copies, self._copies = self._copies, []
        if copies:
            self._freeing = threading.Thread(target=self._free, args=(copies,), name="engine-free-host")
            self._freeing.start()

    def release(self) -> int:
        return sum(arena.release() for arena in (self._weights, *self._kv))

    def restore(self) -> None:
        copying = torch.cuda.Stream(self._device)
        try:
            for piece, copy in zip(self._weights.restore(), self._copies, strict=True):
                with torch.cuda.stream(copying):
                    piece.copy_(copy, non_blocking=True)
            for arena in self._kv:
                for piece in arena.restore():
                    piece.zero_()
        except torch.OutOfMemoryError as error:
            self.release()
            free, _ = torch.cuda.mem_get_info(self._device)
            needed = sum(arena.size_bytes for arena in (self._weights, *self._kv))
            raise SleepError(
                f"weights and KV cache need {needed / _GIB:.1f} GiB, but only {free / _GIB:.1f} GiB are free "
                f"on {self._device}: unload another model or put it to sleep"
            ) from error
        torch.cuda.synchronize(self._device)

    def _free(self, copies: list[torch.Tensor]) -> None:
        torch.cuda.set_device(self._device)
        torch.cuda.synchronize(self._device)  # wait until no copy is in progress
        while copies:
            unlock_pages(copies.pop())

    def _wait_until_freed(self) -> None:
        if self._freeing is not None:
            self._freeing.join()
            self._freeing = None


def open_memory(device: torch.device, ranks: int) -> RankMemory:
    """Return the object that manages a rank's memory on this device. `ranks` is the number of ranks in the
    replica."""
    if device.type == "cpu":
        return CpuMemory(device, ranks)
    _, total = torch.cuda.mem_get_info(device)
    try:
        return GpuMemory(CudaDriver(device), device, total)
    except (DriverError, torch.OutOfMemoryError) as error:
        log.warning("this replica cannot sleep: %s", error)
        return TorchMemory(device, str(error))
