"""Staging buffers in host memory, through which weights are transferred to a device. For a GPU, their memory
is page-locked."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from engine.model.weight_file import PAGE


class StagingBuffer:
    """Host memory for one block of weights. For a GPU, there is also a device buffer of the same size for
    conversions."""

    def __init__(self, host: torch.Tensor, copy_stream: torch.cuda.Stream | None) -> None:
        self.bytes = host.numpy().data
        self.host = host
        self._copy_stream = copy_stream
        self._locked = False
        self._device_buffer: torch.Tensor | None = None
        if copy_stream is not None:
            self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()

    def wait(self) -> None:
        """Wait until the host memory may be overwritten."""
        if self._copy_stream is not None:
            self._copied.synchronize()

    def copy(self, numbers: torch.Tensor, target: torch.Tensor) -> None:
        """Copy `numbers`, which is a part of `host`, to `target` on the device. The copy is guaranteed to be
        complete only when the ring has been closed."""
        if self._copy_stream is None:
            target.copy_(numbers)
            return
        if not self._locked:
            self._lock()
        with torch.cuda.stream(self._copy_stream):
            target.copy_(numbers, non_blocking=True)
        self._copied.record(self._copy_stream)

    def _lock(self) -> None:
        """Page-lock the host memory for GPU access. This is faster after reader threads have faulted in its
        pages, so it is called late."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), len(self.host), 0))
        self._locked = True

    def on_device(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return a device copy of `numbers` for use on the current stream. Call `mark_used` after the work
        that uses it has been launched."""
        if self._copy_stream is None:
            # A tensor may begin at any offset in the file, but some dtypes require aligned memory.
            return numbers.clone() if numbers.data_ptr() % torch.float32.itemsize else numbers
        if self._device_buffer is None:
            self._device_buffer = torch.empty_like(self.host, device=self._copy_stream.device)
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._copy_stream.device))
        self._copy_stream.wait_event(self._used)
        buffer = self._device_buffer[: len(numbers)]
        self.copy(numbers, buffer)
        torch.cuda.current_stream(self._copy_stream.device).wait_event(self._copied)
        return buffer

    def mark_used(self) -> None:
        """Record that the device copy may be overwritten once all work launched so far on the current stream
        has finished."""
        if self._copy_stream is not None:
            self._used.record(torch.cuda.current_stream(self._copy_stream.device))

    def close(self) -> None:
        """Unlock the host memory."""
        if self._locked:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr()))
            self._locked = False


class StagingRing:
    """Staging buffers in one mapping of huge pages. Page-locking these pages takes a fifth of the time of
    torch's `pin_memory`, and they can be unlocked again."""

    def __init__(self, count: int, buffer_bytes: int, device: torch.device) -> None:
        buffer_bytes = -(-buffer_bytes // PAGE) * PAGE
        pages = mmap.mmap(-1, count * buffer_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # the kernel may not support huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
        host = torch.frombuffer(pages, dtype=torch.uint8)
        self._device = device
        copy_stream = None
        if device.type == "cuda":
            copy_stream = torch.cuda.Stream(device)
            # Wait for earlier work, which may still use the memory that the parameters now occupy.
            copy_stream.wait_stream(torch.cuda.current_stream(device))
        self.buffers = [StagingBuffer(part, copy_stream) for part in host.split(buffer_bytes)]

    def close(self) -> None:
        """Wait for all copies and conversions, and unlock the memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for buffer in self.buffers:
            buffer.close()
