"""Tensors of safetensors files, block by block of rows, on a device.

Several threads read the files in order into a ring of page-locked buffers. From there each buffer is copied
to its twin on a GPU, on a stream of its own, while the next ones are being read and the ones before are being
used. Host and GPU hold at most `SLOTS × SLOT_BYTES` (256 MiB) of a checkpoint at a time, unless a single row
is larger than a slot. Files are read through the page cache, where other ranks and the next start find them.
"""

from __future__ import annotations

import io
import math
import mmap
import os
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import CheckpointError
from engine.model.checkpoint import Entry

READERS = 12
"""Threads. One copies about 8 GB/s out of the page cache, PCIe takes 55; disks want many requests at once."""
SLOT_BYTES = 16 << 20
SLOTS = READERS + 4
_AHEAD = SLOTS - 2
"""Slots that are being read, or were read and wait for their turn. The others are being copied: if there were
none, each copy would be waited for as soon as it is started."""
_ALIGNMENT = 256
"""Bytes; of each block in its slot: any dtype can be viewed there, and kernels read it at full width."""
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
}


@dataclass(frozen=True, slots=True)
class Slice:
    """Rows `[first_row, first_row + rows)` of a tensor in a file; a tensor without dimensions is one row.

    Whole rows only: reading a few KB of each row costs more than reading all.
    """

    name: str
    entry: Entry
    first_row: int
    rows: int

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.entry.dtype]

    @property
    def row_bytes(self) -> int:
        return math.prod(self.entry.shape[1:]) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_bytes

    @property
    def offset(self) -> int:
        """Of the first byte in the file."""
        return self.entry.offset + self.first_row * self.row_bytes


def stream(
    slices: Iterable[Slice], device: torch.device, slot_bytes: int = SLOT_BYTES
) -> Generator[tuple[Slice, torch.Tensor]]:
    """Reads `slices` (in the order of files and offsets, best), cut into blocks of rows.

    Yields each block and its numbers, `[rows, ...]` in the file's dtype on `device`. They are valid until the
    next block is asked for, on CUDA for work on the current stream. Raises CheckpointError with file and
    tensor where bytes cannot be read, are missing, or belong to a file that was changed after its header was
    read.
    """
    wanted = [each for each in slices if each.nbytes]
    if not wanted:
        return
    slot_bytes = max(slot_bytes, *(each.row_bytes for each in wanted))
    fillings = list(_fillings(wanted, slot_bytes))
    reading: deque[tuple[_Slot, list[_Block], Future[None]]] = deque()
    with ExitStack() as stack:
        files = {file: stack.enter_context(_opened(file)) for file in {each.entry.file for each in wanted}}
        ring = stack.enter_context(_Ring(min(SLOTS, len(fillings)), slot_bytes, device))
        readers = ThreadPoolExecutor(READERS, "weights")
        stack.callback(readers.shutdown, cancel_futures=True)
        for number, blocks in enumerate(fillings):
            if len(reading) == _AHEAD:
                yield from _hand_over(*reading.popleft())
            slot = ring.slots[number % SLOTS]
            slot.wait()
            reading.append((slot, blocks, readers.submit(_read, blocks, files, slot.bytes)))
        while reading:
            yield from _hand_over(*reading.popleft())


# ── what goes where ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Block:
    part: Slice
    at: int
    """Its first byte in the slot."""

    @property
    def end(self) -> int:
        return self.at + self.part.nbytes


def _fillings(slices: Iterable[Slice], slot_bytes: int) -> Iterator[list[_Block]]:
    """For one slot after the other: as many rows as fit."""
    blocks: list[_Block] = []
    for whole in slices:
        done = 0
        while done < whole.rows:
            at = -(-blocks[-1].end // _ALIGNMENT) * _ALIGNMENT if blocks else 0
            rows = min(whole.rows - done, max(0, slot_bytes - at) // whole.row_bytes)
            if not rows:
                yield blocks
                blocks = []
                continue
            blocks.append(_Block(replace(whole, first_row=whole.first_row + done, rows=rows), at))
            done += rows
    yield blocks


def _hand_over(slot: _Slot, blocks: list[_Block], read: Future[None]) -> Iterator[tuple[Slice, torch.Tensor]]:
    read.result()
    staged = slot.copy_to_device(blocks[-1].end)
    for block in blocks:
        numbers = staged[block.at : block.end].view(block.part.dtype)
        yield block.part, numbers.view(block.part.rows, *block.part.entry.shape[1:])
    slot.used()


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────


class _Slot:
    """A buffer of the ring, and its twin on a GPU."""

    def __init__(self, host: torch.Tensor, copies: torch.cuda.Stream | None) -> None:
        self.bytes = host.numpy().data
        self._host = self._device = host
        self._copies = copies
        if copies is not None:
            self._device = torch.empty_like(host, device=copies.device)
            # Waiting must not take the processor from the readers.
            self._copied, self._used = torch.cuda.Event(blocking=True), torch.cuda.Event()

    def wait(self) -> None:
        """Until the host's bytes may be overwritten."""
        if self._copies is not None:
            self._copied.synchronize()

    def copy_to_device(self, nbytes: int) -> torch.Tensor:
        """The first `nbytes`, for work on the current stream, after which `used` is to be called."""
        if self._copies is not None:
            self._copies.wait_event(self._used)
            with torch.cuda.stream(self._copies):
                self._device[:nbytes].copy_(self._host[:nbytes], non_blocking=True)
                self._copied.record()
            torch.cuda.current_stream(self._copies.device).wait_event(self._copied)
        return self._device[:nbytes]

    def used(self) -> None:
        if self._copies is not None:
            self._used.record(torch.cuda.current_stream(self._copies.device))


class _Ring:
    """The slots, in one stretch of large pages: these are locked in a fifth of the time that torch's
    `pin_memory` takes, and can be given back."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        slot_bytes = -(-slot_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        pages = mmap.mmap(-1, slots * slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # kernels can be built without
            pages.madvise(mmap.MADV_HUGEPAGE)
        self._host = torch.frombuffer(pages, dtype=torch.uint8)
        self._device = device
        copies = None
        if device.type == "cuda":
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), len(self._host), 0)
            )
            copies = torch.cuda.Stream(device)
            copies.wait_stream(torch.cuda.current_stream(device))
        self.slots = [_Slot(part, copies) for part in self._host.split(slot_bytes)]

    def __enter__(self) -> _Ring:
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def _opened(file: Path) -> io.FileIO:
    try:
        return file.open("rb", buffering=0)
    except OSError as error:
        raise CheckpointError(f"{file}: cannot be read ({error.strerror})") from error


def _read(blocks: list[_Block], files: dict[Path, io.FileIO], into: memoryview) -> None:
    for block in blocks:
        name, entry = block.part.name, block.part.entry
        file = files[entry.file].fileno()
        try:
            end = _read_range(file, block.part.offset, into[block.at : block.end])
            status = os.fstat(file)
        except OSError as error:
            raise CheckpointError(
                f"{entry.file}: {name} cannot be read ({error.strerror}); check the disk, or download it "
                "again"
            ) from error
        if end < block.part.offset + block.part.nbytes:
            raise CheckpointError(
                f"{entry.file}: is truncated: {name} needs {entry.offset + entry.nbytes} bytes, the file has "
                f"{status.st_size}; download it again"
            )
        if status.st_mtime_ns != entry.modified_ns:
            raise CheckpointError(
                f"{entry.file}: was changed while {name} was read; start again when it is complete"
            )


def _read_range(file: int, first: int, into: memoryview) -> int:
    """Fills `into` from byte `first` on; returns where that ended, early at the file's end."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], first + done)
        if not count:
            break
        done += count
    return first + done
