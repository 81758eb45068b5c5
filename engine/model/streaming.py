"""Tensors of safetensors files, block by block of rows, into memory of a device.

What lies in the page cache is copied out of a mapping of the file, one block at a time by all of torch's
threads together; what does not is read by threads of our own, many blocks at once, as disks want it. On a GPU
both go through a ring of page-locked slots: while some are filled, others are copied to the device. Numbers
that stay as they are go straight to where they belong; others go to room on the device, from where the caller
converts them. The ring holds at most 256 MiB of a checkpoint, 80 where all of it is in the page cache, and a
GPU that converts has as much room besides, unless a single row is larger than a block.
`engine.model.weight_file` says what is read how.
"""

from __future__ import annotations

import math
import mmap
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path

import torch

from engine.config import CheckpointError
from engine.model.checkpoint import Entry
from engine.model.weight_file import PAGE, Way, WeightFile

READERS = 12
"""Threads that read what is not in the page cache."""
BLOCK_BYTES = 16 << 20
"""For a GPU: large, so that the interpreter's share of the time is small."""
_CPU_BLOCK_BYTES = 4 << 20
"""So that its cache holds what conversions need besides."""
_COPYING = 3
"""Slots that are being copied to a GPU."""
_COPY_THREADS = 16
"""Of torch, that fill a slot, where it may have them: it takes so many to keep up with PCIe's 55 GB/s."""
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

    def view(self, numbers: torch.Tensor) -> torch.Tensor:
        """`numbers [bytes]` as `[rows, ...]` in the file's dtype."""
        return numbers.view(self.dtype).view(self.rows, *self.entry.shape[1:])


Fill = Callable[[Slice, torch.Tensor], None]
"""Takes a block and its numbers, `[rows, ...]` in the file's dtype on the device, which are valid during the
call; on CUDA for work on the current stream."""
Place = Callable[[Slice], torch.Tensor | None]
"""Where the numbers of a block belong as they are: contiguous, in the file's dtype, on the device. None:
nowhere; they are to be filled in."""


def nowhere(block: Slice) -> None:
    """The `Place` of what is all to be filled in."""


def stream(
    slices: Iterable[Slice],
    device: torch.device,
    fill: Fill,
    place: Place = nowhere,
    *,
    block_bytes: int | None = None,
) -> Generator[Slice]:
    """Reads `slices` (in the order of files and offsets, best), cut into blocks of whole rows of at
    most `block_bytes` (None: what suits the device), or one.

    Yields each block when it was read; all are in place as the generator ends. Raises what `fill` and `place`
    raise, and CheckpointError with file and tensor where bytes cannot be read, are missing, or belong to a
    file that was changed after its header was read.
    """
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if device.type == "cuda" else _CPU_BLOCK_BYTES
    blocks = list(_blocks(slices, block_bytes))
    if not blocks:
        return
    with ExitStack() as stack:
        paths = {block.entry.file for block in blocks}
        files = {path: stack.enter_context(closing(_opened(path))) for path in paths}
        ways = [files[each.entry.file].way(each.offset, each.nbytes, each.shared) for each in blocks]
        # Of those that are asked for, one waits until another is done.
        most_ahead = (1 if set(ways) == {Way.MAPPED} else READERS) + 1
        largest = max(block.nbytes for block in blocks)
        ring = stack.enter_context(closing(_Ring(most_ahead + _COPYING, largest + 2 * PAGE, device)))
        stack.enter_context(_copy_threads(device))
        copier, readers = ThreadPoolExecutor(1, "weights"), ThreadPoolExecutor(READERS, "weights")
        for threads in (copier, readers):
            stack.callback(threads.shutdown, cancel_futures=True)
        ahead: deque[tuple[Slice, WeightFile, _Slot, Future[torch.Tensor]]] = deque()
        for block, way, slot in zip(blocks, ways, cycle(ring.slots), strict=False):
            if len(ahead) == most_ahead:
                yield _hand_over(*ahead.popleft(), fill, place)
            slot.wait()
            file, threads = files[block.entry.file], copier if way is Way.MAPPED else readers
            ahead.append((block, file, slot, threads.submit(_fetch, block, file, way, slot)))
        while ahead:
            yield _hand_over(*ahead.popleft(), fill, place)


def _blocks(slices: Iterable[Slice], block_bytes: int) -> Iterator[Slice]:
    for whole in slices:
        most = max(1, block_bytes // whole.row_bytes) if whole.nbytes else 1
        for first in range(0, whole.rows if whole.nbytes else 0, most):
            yield replace(whole, first_row=whole.first_row + first, rows=min(most, whole.rows - first))


def _hand_over(
    block: Slice, file: WeightFile, slot: _Slot, fetched: Future[torch.Tensor], fill: Fill, place: Place
) -> Slice:
    numbers = fetched.result()
    target = place(block)
    if target is not None:
        slot.copy(numbers, target.view(-1).view(torch.uint8))
    else:
        fill(block, block.view(slot.on_device(numbers)))
        slot.used()
    # A CPU has read a mapping only now.
    _check_unchanged(block, file)
    return block


@contextmanager
def _copy_threads(device: torch.device) -> Iterator[None]:
    """No more threads of torch than copying for a GPU needs, of those that this process was given."""
    before = torch.get_num_threads()
    if device.type == "cuda":
        torch.set_num_threads(min(_COPY_THREADS, before))
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.set_num_threads(before)


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────


class _Slot:
    """Bytes of the host on their way to a device; on a CPU only what is read needs one."""

    def __init__(self, host: torch.Tensor, copies: torch.cuda.Stream | None) -> None:
        self.bytes = host.numpy().data
        self.host = host
        self._copies = copies
        self._room: torch.Tensor | None = None
        if copies is not None:
            self._copied, self._used = torch.cuda.Event(), torch.cuda.Event()

    def wait(self) -> None:
        """Until the bytes may be overwritten."""
        if self._copies is not None:
            self._copied.synchronize()

    def filled(self, numbers: torch.Tensor) -> torch.Tensor:
        """`numbers [bytes]` where a GPU can fetch them."""
        if self._copies is None:
            return numbers
        return self.host[: len(numbers)].copy_(numbers)

    def copy(self, numbers: torch.Tensor, into: torch.Tensor) -> None:
        """To where they belong on the device, by the end of the ring."""
        if self._copies is None:
            into.copy_(numbers)
            return
        with torch.cuda.stream(self._copies):
            into.copy_(numbers, non_blocking=True)
            self._copied.record()

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
        if self._copies is not None:
            self._used.record(torch.cuda.current_stream(self._copies.device))


class _Ring:
    """The slots, in one stretch of large pages: these are locked in a fifth of the time that torch's
    `pin_memory` takes, and can be given back."""

    def __init__(self, slots: int, slot_bytes: int, device: torch.device) -> None:
        slot_bytes = -(-slot_bytes // PAGE) * PAGE
        pages = mmap.mmap(-1, slots * slot_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # kernels can be built without
            pages.madvise(mmap.MADV_HUGEPAGE)
        with torch.inference_mode(False):  # or no thread but the caller's might fill it
            self._host = torch.frombuffer(pages, dtype=torch.uint8)
        self._device = device
        copies = None
        if device.type == "cuda":
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), len(self._host), 0)
            )
            copies = torch.cuda.Stream(device)
            # What is filled may still be in use by work that was asked for before.
            copies.wait_stream(torch.cuda.current_stream(device))
        self.slots = [_Slot(part, copies) for part in self._host.split(slot_bytes)]

    def close(self) -> None:
        """Waits until all is copied and used."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def _opened(path: Path) -> WeightFile:
    try:
        return WeightFile(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _fetch(block: Slice, file: WeightFile, way: Way, slot: _Slot) -> torch.Tensor:
    """The bytes of a block, where a GPU can fetch them."""
    if way is Way.MAPPED:
        return slot.filled(_mapped(block, file))
    at = _read(block, file, way, slot.bytes)
    return slot.host[at : at + block.nbytes]


def _mapped(block: Slice, file: WeightFile) -> torch.Tensor:
    # To touch what a file no longer has would end the process.
    if file.status().st_size < block.offset + block.nbytes:
        raise _truncated(block, file)
    _check_unchanged(block, file)  # or it might have been shorter when it was mapped
    try:
        file.bring(block.offset, block.nbytes)
    except OSError as error:
        raise _unreadable(block, error) from error
    assert file.pages is not None
    return torch.frombuffer(file.pages, dtype=torch.uint8, count=block.nbytes, offset=block.offset)


def _read(block: Slice, file: WeightFile, way: Way, into: memoryview) -> int:
    """Where in `into` the block begins."""
    try:
        return file.read(block.offset, block.nbytes, into, past_cache=way is Way.PAST_CACHE)
    except EOFError:
        raise _truncated(block, file) from None
    except OSError as error:
        raise _unreadable(block, error) from error


def _check_unchanged(block: Slice, file: WeightFile) -> None:
    if file.status().st_mtime_ns != block.entry.modified_ns:
        raise CheckpointError(
            f"{block.entry.file}: was changed while {block.name} was read; start again when it is complete"
        )


def _truncated(block: Slice, file: WeightFile) -> CheckpointError:
    entry = block.entry
    return CheckpointError(
        f"{entry.file}: is truncated: {block.name} needs {entry.offset + entry.nbytes} bytes, the file has "
        f"{file.status().st_size}; download it again"
    )


def _unreadable(block: Slice, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{block.entry.file}: {block.name} cannot be read ({error.strerror}); check the disk, or download it "
        "again"
    )
