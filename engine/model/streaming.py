"""Tensors of safetensors files, block by block of rows, on a device.

Several threads read the files in order into a ring of page-locked buffers. From there each buffer is copied
to its twin on a GPU, on a stream of its own, while the next ones are being read and the ones before are being
used. Host and GPU hold at most `SLOTS × SLOT_BYTES` (256 MiB) of a checkpoint at a time, unless a single row
is larger than a slot. `engine.model.weight_file` says what is read through the page cache, and what past it.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import CheckpointError
from engine.model.checkpoint import Entry
from engine.model.weight_file import PAGE, WeightFile, room

READERS = 12
"""Threads. One copies about 8 GB/s out of the page cache, PCIe takes 55; disks want many requests at once."""
SLOT_BYTES = 16 << 20
SLOTS = READERS + 4
_AHEAD = SLOTS - 2
"""Slots that are being read, or were read and wait for their turn. The others are being copied: if there were
none, each copy would be waited for as soon as it is started."""
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
    shared: bool = False
    """Whether other ranks read these rows as well."""

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
    reading: deque[tuple[_Slot, list[_Block], Future[list[int]]]] = deque()
    with ExitStack() as stack:
        paths = {each.entry.file for each in wanted}
        files = {path: stack.enter_context(closing(_opened(path))) for path in paths}
        ring = stack.enter_context(_Ring(min(SLOTS, len(fillings)), slot_bytes + 2 * PAGE, device))
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
    """The first byte of its room in the slot; a page's, so that kernels read it at full width there."""

    @property
    def end(self) -> int:
        """Of its room."""
        return self.at + room(self.part.offset, self.part.nbytes)


def _fillings(slices: Iterable[Slice], slot_bytes: int) -> Iterator[list[_Block]]:
    """For one slot after the other: as many rows as fit."""
    blocks: list[_Block] = []
    for whole in slices:
        done = 0
        while done < whole.rows:
            at = blocks[-1].end if blocks else 0
            rows = min(whole.rows - done, max(0, slot_bytes - at) // whole.row_bytes)
            if not rows:
                yield blocks
                blocks = []
                continue
            blocks.append(_Block(replace(whole, first_row=whole.first_row + done, rows=rows), at))
            done += rows
    yield blocks


def _hand_over(
    slot: _Slot, blocks: list[_Block], read: Future[list[int]]
) -> Iterator[tuple[Slice, torch.Tensor]]:
    for block, numbers in zip(blocks, slot.copy_to_device(blocks, read.result()), strict=True):
        yield block.part, numbers.view(block.part.dtype).view(block.part.rows, *block.part.entry.shape[1:])
    slot.used()


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────


class _Slot:
    """A buffer of the ring, and its twin on a GPU."""

    def __init__(self, host: torch.Tensor, copies: torch.cuda.Stream | None) -> None:
        self.bytes = host.numpy().data
        self._host = host
        self._copies = copies
        if copies is not None:
            self._device = torch.empty_like(host, device=copies.device)
            # Waiting must not take the processor from the readers.
            self._copied, self._used = torch.cuda.Event(blocking=True), torch.cuda.Event()

    def wait(self) -> None:
        """Until the host's bytes may be overwritten."""
        if self._copies is not None:
            self._copied.synchronize()

    def copy_to_device(self, blocks: list[_Block], starts: list[int]) -> list[torch.Tensor]:
        """The bytes of `blocks`, which begin at `starts`, for work on the current stream, after which `used`
        is to be called."""
        parts = [self._host[at : at + block.part.nbytes] for block, at in zip(blocks, starts, strict=True)]
        if self._copies is None:
            return [_aligned(part) for part in parts]
        staged = [self._device[block.at : block.at + block.part.nbytes] for block in blocks]
        self._copies.wait_event(self._used)
        with torch.cuda.stream(self._copies):
            for place, part in zip(staged, parts, strict=True):
                place.copy_(part, non_blocking=True)
            self._copied.record()
        torch.cuda.current_stream(self._copies.device).wait_event(self._copied)
        return staged

    def used(self) -> None:
        if self._copies is not None:
            self._used.record(torch.cuda.current_stream(self._copies.device))


def _aligned(part: torch.Tensor) -> torch.Tensor:
    """Bytes where any dtype can be viewed. Where a tensor begins in a file is the file's own choice."""
    return part.clone() if part.data_ptr() % torch.float32.itemsize else part


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


def _opened(path: Path) -> WeightFile:
    try:
        return WeightFile(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _read(blocks: list[_Block], files: dict[Path, WeightFile], into: memoryview) -> list[int]:
    """Where in `into` each block begins."""
    starts = []
    for block in blocks:
        part, entry = block.part, block.part.entry
        file = files[entry.file]
        try:
            starts.append(
                block.at + file.read(part.offset, part.nbytes, into[block.at : block.end], part.shared)
            )
            modified_ns = file.status().st_mtime_ns
        except EOFError:
            raise CheckpointError(
                f"{entry.file}: is truncated: {part.name} needs {entry.offset + entry.nbytes} bytes, the "
                f"file has {file.status().st_size}; download it again"
            ) from None
        except OSError as error:
            raise CheckpointError(
                f"{entry.file}: {part.name} cannot be read ({error.strerror}); check the disk, or download "
                "it again"
            ) from error
        if modified_ns != entry.modified_ns:
            raise CheckpointError(
                f"{entry.file}: was changed while {part.name} was read; start again when it is complete"
            )
    return starts
