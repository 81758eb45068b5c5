"""Staging buffers in host memory for transferring weights to a device. For a GPU, the buffers are
page-locked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from engine.host_pages import lock_pages, map_pages, unlock_pages
from engine.model.weight_file import PAGE


class StagingBuffer:
    """Host memory for one or more blocks of weights. For a GPU, there is also a device buffer of the same
    size for conversions."""

    def __init__(self, host: torch.Tensor, copy_stream: torch.cuda.Stream | None) -> None:
        self.bytes = host.numpy().data
        self.host = host
        self._copy_stream = copy_stream
        self._locked = False
        self._device_buffer: torch.Tensor | None = None
        if copy_stream is not None:
            self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()

    def wait(self) -> None:
        """Wait until the host memory can safely be overwritten."""
        if self._copy_stream is not None:
            self._copied.synchronize()

    def copy(self, copies: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Copy parts of `host` to tensors on the device. The copies are guaranteed to be complete only
        after the ring has been closed."""
        if self._copy_stream is None:
            for numbers, target in copies:
                target.copy_(numbers)
            return
        if not self._locked:
            # The reader threads have already allocated the pages by writing to them, so page-locking is fast.
            lock_pages(self.host)
            self._locked = True
        with torch.cuda.stream(self._copy_stream):
            for numbers, target in copies:
                target.copy_(numbers, non_blocking=True)
        self._copied.record(self._copy_stream)

    def on_device(self, parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return device copies of parts of `host` for use on the current stream. The parts must be in
        different pages. Call `mark_used` after launching the work that uses the copies."""
        if self._copy_stream is None:
            # A tensor may begin at any offset in the file, but some dtypes require aligned memory.
            return [part.clone() if part.data_ptr() % torch.float32.itemsize else part for part in parts]
        if self._device_buffer is None:
            self._device_buffer = torch.empty_like(self.host, device=self._copy_stream.device)
            self._copy_stream.wait_stream(torch.cuda.current_stream(self._copy_stream.device))
        self._copy_stream.wait_event(self._used)
        copies, start = [], 0
        for part in parts:
            copies.append(self._device_buffer[start : start + len(part)])
            start += -(-len(part) // PAGE) * PAGE  # keeps the copy aligned and within the buffer
        self.copy(zip(parts, copies, strict=True))
        torch.cuda.current_stream(self._copy_stream.device).wait_event(self._copied)
        return copies

    def mark_used(self) -> None:
        """Record that the device copies may be overwritten once all work already launched on the current
        stream is done."""
        if self._copy_stream is not None:
            self._used.record(torch.cuda.current_stream(self._copy_stream.device))

    def close(self) -> None:
        """Unlock the host memory."""
        if self._locked:
            unlock_pages(self.host)
            self._locked = False


class StagingRing:
    """Several staging buffers, allocated as a single mapping of huge pages."""

    def __init__(self, count: int, buffer_bytes: int, device: torch.device) -> None:
        buffer_bytes = -(-buffer_bytes // PAGE) * PAGE
        host = map_pages(count * buffer_bytes)
        self._device = device
        copy_stream = None
        if device.type == "cuda":
            copy_stream = torch.cuda.Stream(device)
            # Earlier work on the device may still be using the memory that the parameters now occupy.
            copy_stream.wait_stream(torch.cuda.current_stream(device))
        self.buffers = [StagingBuffer(part, copy_stream) for part in host.split(buffer_bytes)]

    def close(self) -> None:
        """Wait for all copies and conversions, then unlock the memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for buffer in self.buffers:
            buffer.close()
