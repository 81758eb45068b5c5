"""Room of the host for weights on their way to a device: page-locked where that is a GPU."""

from __future__ import annotations

import mmap
from contextlib import suppress

import torch

from engine.model.weight_file import PAGE


class Slot:
    """Bytes of the host on their way to a device."""

    def __init__(self, host: torch.Tensor, copies: torch.cuda.Stream | None) -> None:
        self.bytes = host.numpy().data
        self.host = host
        self._copies = copies
        self._locked = False
        self._room: torch.Tensor | None = None
        if copies is not None:
            self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()

    def wait(self) -> None:
        """Until the bytes may be overwritten."""
        if self._copies is not None:
            self._copied.synchronize()

    def copy(self, numbers: torch.Tensor, into: torch.Tensor) -> None:
        """To where they belong on the device, by the end of the ring."""
        if self._copies is None:
            into.copy_(numbers)
            return
        if not self._locked:
            self._lock()
        with torch.cuda.stream(self._copies):
            into.copy_(numbers, non_blocking=True)
        self._copied.record(self._copies)

    def _lock(self) -> None:
        """In memory, so that a GPU can fetch the bytes: now that several threads have touched them."""
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.host.data_ptr(), len(self.host), 0))
        self._locked = True

    def on_device(self, numbers: torch.Tensor) -> torch.Tensor:
        """`numbers` in room of the device, for work on the current stream, after which `used` is to be
        called."""
        if self._copies is None:
            # Where a tensor begins in a file is the file's own choice, and not every dtype can begin there.
            return numbers.clone() if numbers.data_ptr() % torch.float32.itemsize else numbers
        if self._room is None:
            self._room = torch.empty_like(self.host, device=self._copies.device)
            self._copies.wait_stream(torch.cuda.current_stream(self._copies.device))
        self._copies.wait_event(self._used)
        room = self._room[: len(numbers)]
        self.copy(numbers, room)
        torch.cuda.current_stream(self._copies.device).wait_event(self._copied)
        return room

    def used(self) -> None:
        """What was `on_device` may be overwritten once the current stream has come here."""
        if self._copies is not None:
            self._used.record(torch.cuda.current_stream(self._copies.device))

    def close(self) -> None:
        """What was page-locked is not any more."""
        if self._locked:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self.host.data_ptr()))
            self._locked = False


class Ring:
    """The slots, in one stretch of large pages: these are locked in a fifth of the time that torch's
    `pin_memory` takes, and can be given back."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        slot_bytes = -(-slot_bytes // PAGE) * PAGE
        pages = mmap.mmap(-1, slots * slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # kernels can be built without
            pages.madvise(mmap.MADV_HUGEPAGE)
        host = torch.frombuffer(pages, dtype=torch.uint8)
        self._device = device
        copies = None
        if device.type == "cuda":
            copies = torch.cuda.Stream(device)
            # What is filled may still be in use by work that was asked for before.
            copies.wait_stream(torch.cuda.current_stream(device))
        self.slots = [Slot(part, copies) for part in host.split(slot_bytes)]

    def close(self) -> None:
        """Waits until all is copied and used."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for slot in self.slots:
            slot.close()
