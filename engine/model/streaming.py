"""Tensors of safetensors files, block by block of rows, into memory of a device.

Several threads each take the next block and read it through two page-locked slots: one is read into while the
other is copied to a GPU. Numbers that stay as they are go straight to where they belong; others go to room on
the device, from where the caller converts them, while blocks of other threads are read and copied. Of a
checkpoint, the host holds at most `READERS × SLOTS × SLOT_BYTES` (128 MiB) at a time, and a GPU that converts
`READERS × BLOCK_BYTES` (256 MiB), unless a single row is larger than a block. `engine.model.weight_file` says
what is read through the page cache, and what past it.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from threading import Lock

import torch

from engine.config import CheckpointError
from engine.model.checkpoint import Entry
from engine.model.weight_file import PAGE, WeightFile, room

READERS = 16
"""Threads. One copies 5 to 8 GB/s out of the page cache, PCIe takes 55; disks want many requests at once."""
SLOTS = 2
"""Of each reader."""
SLOT_BYTES = 4 << 20
"""Small, so that what was read is still in the processor's cache as it is copied on, and the next read finds
it there; large enough that readers spend their time in the kernel, not waiting for the interpreter."""
BLOCK_BYTES = 16 << 20
"""What a GPU converts at once: a dozen launches. A CPU, whose cache matters here as well: `SLOT_BYTES`."""
_STREAMS = 4
"""On which the readers' copies and conversions are queued: some are converted while others are copied."""
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


Fill = Callable[[Slice, torch.Tensor], None]
"""Takes a block and its numbers, `[rows, ...]` in the file's dtype on the device, which are valid during the
call; on CUDA for work on the current stream. A CPU does one at a time, CUDA one a stream."""
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
    readers: int = READERS,
    slot_bytes: int = SLOT_BYTES,
    block_bytes: int | None = None,
) -> Generator[Slice]:
    """Reads `slices` (in the order of files and offsets, best), cut into blocks of whole rows of at
    most `block_bytes` (None: what suits the device), or one.

    Yields the blocks in that order, each when it is read; all are in place as the generator ends. `fill` and
    `place` are called on the threads that read, in the caller's inference mode. Raises what they raise, and
    CheckpointError with file and tensor where bytes cannot be read, are missing, or belong to a file that was
    changed after its header was read.
    """
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if device.type == "cuda" else SLOT_BYTES
    blocks = list(_blocks(slices, block_bytes))
    if not blocks:
        return
    largest = max(block.nbytes for block in blocks)
    with ExitStack() as stack:
        paths = {block.entry.file for block in blocks}
        files = {path: stack.enter_context(closing(_opened(path))) for path in paths}
        count = min(readers, len(blocks))
        lanes = stack.enter_context(closing(_Lanes(count, min(slot_bytes, largest), largest, device)))
        threads = ThreadPoolExecutor(count, "weights")
        stack.callback(threads.shutdown, cancel_futures=True)
        inference = torch.is_inference_mode_enabled()  # each thread's own

        def load(block: Slice) -> Slice:
            with lanes.one() as lane, torch.inference_mode(inference):
                target = place(block)
                into = lane.room(block.nbytes) if target is None else target.view(-1).view(torch.uint8)
                _read(block, files[block.entry.file], lane, into)
                if target is None:
                    with lane.converting:
                        fill(block, into.view(block.dtype).view(block.rows, *block.entry.shape[1:]))
            return block

        yield from threads.map(load, blocks)


def _blocks(slices: Iterable[Slice], block_bytes: int) -> Iterator[Slice]:
    for whole in slices:
        most = max(1, block_bytes // whole.row_bytes) if whole.nbytes else 1
        for first in range(0, whole.rows if whole.nbytes else 0, most):
            yield replace(whole, first_row=whole.first_row + first, rows=min(most, whole.rows - first))


# ── buffers ──────────────────────────────────────────────────────────────────────────────────────


class _Slot:
    """Bytes that are read, and then copied to a device."""

    def __init__(self, host: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
        self.bytes = host.numpy().data
        self._host = host
        self._stream = stream
        # Waiting must not take the processor from those who read.
        self._copied = None if stream is None else torch.cuda.Event(blocking=True)

    def wait(self) -> None:
        """Until the bytes may be overwritten."""
        if self._copied is not None:
            self._copied.synchronize()

    def copy(self, first: int, into: torch.Tensor) -> None:
        """The bytes from `first` on, as many as `into` takes; on CUDA on the current stream."""
        into.copy_(self._host[first : first + len(into)], non_blocking=True)
        if self._copied is not None:
            self._copied.record(self._stream)


class _Lane:
    """What one thread reads through: its slots, and room on the device for a block that is converted.

    Made without touching or locking memory: that is for the thread, as it needs it.
    """

    def __init__(
        self,
        host: torch.Tensor,
        block_bytes: int,
        device: torch.device,
        stream: torch.cuda.Stream | None,
        converting: Lock,
    ) -> None:
        self.slots = [_Slot(part, stream) for part in host.split(len(host) // SLOTS)]
        self.stream = stream
        self.converting = converting
        self._host = host
        self._locked = False
        self._block_bytes = block_bytes
        self._device = device
        self._room: torch.Tensor | None = None

    def room(self, nbytes: int) -> torch.Tensor:
        if self._room is None:
            self._room = torch.empty(self._block_bytes, dtype=torch.uint8, device=self._device)
        return self._room[:nbytes]

    def lock(self) -> None:
        """Before a copy. Pages that were read into by then are there, and locked in no time."""
        if self.stream is not None and not self._locked:
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(self._host.data_ptr(), len(self._host), 0)
            )
            self._locked = True

    def unlock(self) -> None:
        if self._locked:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostUnregister(self._host.data_ptr()))
            self._locked = False


class _Lanes:
    """All of them, in one stretch of large pages: these are locked in a fifth of the time that torch's
    `pin_memory` takes, and can be given back."""

    def __init__(self, count: int, slot_bytes: int, block_bytes: int, device: torch.device) -> None:
        lane_bytes = SLOTS * (room(0, slot_bytes) + PAGE)
        pages = mmap.mmap(-1, count * lane_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # kernels can be built without
            pages.madvise(mmap.MADV_HUGEPAGE)
        host = torch.frombuffer(pages, dtype=torch.uint8)
        self._streams: list[torch.cuda.Stream] = []
        if device.type == "cuda":
            self._streams = [torch.cuda.Stream(device) for _ in range(_STREAMS)]
            for each in self._streams:  # what is filled may still be in use by work that was asked for before
                each.wait_stream(torch.cuda.current_stream(device))
        # The memory that conversions need besides is needed once for each stream, on a CPU once in all.
        queues: list[tuple[torch.cuda.Stream | None, Lock]] = [(each, Lock()) for each in self._streams]
        queues = queues or [(None, Lock())]
        parts = host.split(lane_bytes)
        self._all = [
            _Lane(part, block_bytes, device, *queue)
            for part, queue in zip(parts, cycle(queues), strict=False)
        ]
        self._free: SimpleQueue[_Lane] = SimpleQueue()
        for lane in self._all:
            self._free.put(lane)

    @contextmanager
    def one(self) -> Iterator[_Lane]:
        """A lane of the thread's own, its stream the current one. There are as many as threads."""
        lane = self._free.get_nowait()
        current: AbstractContextManager[object] = nullcontext()
        if lane.stream is not None:
            current = torch.cuda.stream(lane.stream)
        try:
            with current:
                yield lane
        finally:
            self._free.put(lane)

    def close(self) -> None:
        """Waits until all is copied and converted."""
        for each in self._streams:
            each.synchronize()
        for lane in self._all:
            lane.unlock()


# ── files ────────────────────────────────────────────────────────────────────────────────────────


def _opened(path: Path) -> WeightFile:
    try:
        return WeightFile(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


def _read(block: Slice, file: WeightFile, lane: _Lane, into: torch.Tensor) -> None:
    """Into memory of the device, `into [bytes]`."""
    entry = block.entry
    try:
        _copy(block, file, lane, into)
        modified_ns = file.status().st_mtime_ns
    except EOFError:
        raise CheckpointError(
            f"{entry.file}: is truncated: {block.name} needs {entry.offset + entry.nbytes} bytes, the "
            f"file has {file.status().st_size}; download it again"
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{entry.file}: {block.name} cannot be read ({error.strerror}); check the disk, or download "
            "it again"
        ) from error
    if modified_ns != entry.modified_ns:
        raise CheckpointError(
            f"{entry.file}: was changed while {block.name} was read; start again when it is complete"
        )


def _copy(block: Slice, file: WeightFile, lane: _Lane, into: torch.Tensor) -> None:
    past_cache = file.is_past_cache(block.offset, block.nbytes, block.shared)
    done = 0
    for slot in cycle(lane.slots):
        first = block.offset + done
        nbytes = block.nbytes - done
        if room(first, nbytes) > len(slot.bytes):
            # Up to a page's end, where the next read past the cache can begin. The page that a slot has over
            # saves a block that begins within one from ending with a read of a few bytes.
            nbytes = len(slot.bytes) - PAGE - first % PAGE
        slot.wait()
        at = file.read(first, nbytes, slot.bytes, past_cache)
        lane.lock()
        slot.copy(at, into[done : done + nbytes])
        done += nbytes
        if done == block.nbytes:
            return
