"""Blocks of weights out of their files, each in pieces by several threads.

For a piece a thread calls the kernel once, which copies while the interpreter serves others. Pieces are
large, so that the interpreter's share of the time is small, and few are on their way at once, so that what
the page cache gives stays in the processor's until the device has fetched it.

Every error names the file and, once it is open, the tensor.
"""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import torch

from engine.config import CheckpointError
from engine.model.checkpoint import Entry
from engine.model.slices import Slice
from engine.model.slots import Slot
from engine.model.weight_file import PAGE, WeightFile

READERS = 12
"""Threads: as many as PCIe's 55 GB/s take out of the page cache, and disks want reads at once."""
PIECE_BYTES = 4 << 20
"""A multiple of a page."""


def opened(path: Path) -> WeightFile:
    """Raises CheckpointError with the reason."""
    try:
        return WeightFile(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


class Block:
    """Rows that are had at once, and how."""

    __slots__ = ("file", "past_cache", "rows", "target")

    def __init__(self, rows: Slice, file: WeightFile, target: torch.Tensor | None = None) -> None:
        self.rows = rows
        self.file = file
        self.past_cache = file.past_cache(rows.offset, rows.nbytes, rows.shared)
        self.target = target
        """Where the bytes belong as they are `[bytes]`, on the device. None: nowhere."""

    @property
    def first_page(self) -> int:
        """Where the file's pages begin that a slot takes."""
        return self.rows.offset // PAGE * PAGE

    def numbers(self, slot: Slot) -> torch.Tensor:
        """`[bytes]`, of a slot that the block was read to."""
        skipped = self.rows.offset - self.first_page
        return slot.host[skipped : skipped + self.rows.nbytes]

    def pieces(self) -> list[tuple[int, int]]:
        """First bytes and ends in the file; all but the first begin at a page."""
        first, end = self.rows.offset, self.rows.offset + self.rows.nbytes
        inner = range(self.first_page + PIECE_BYTES, end, PIECE_BYTES)
        return list(zip([first, *inner], [*inner, end], strict=True))


class Reading:
    """Of a block into a slot."""

    __slots__ = ("_failure", "_left", "_lock", "_there", "block", "slot")

    def __init__(self, block: Block, slot: Slot, pieces: int) -> None:
        self.block = block
        self.slot = slot
        self._left = pieces
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._there = threading.Lock()  # held until all is; an Event would take longer
        self._there.acquire()

    def wait(self) -> None:
        """Until all pieces were read. Raises CheckpointError with file and tensor where one could not be."""
        with self._there:
            if self._failure is not None:
                raise self._failure

    def read(self, first: int, end: int) -> None:
        """One of the pieces."""
        failure = self._read(first, end)
        with self._lock:
            self._failure = self._failure or failure
            self._left -= 1
            if not self._left:
                self._there.release()

    def _read(self, first: int, end: int) -> BaseException | None:
        block = self.block
        into = self.slot.bytes[first // PAGE * PAGE - block.first_page :]
        try:
            block.file.read(first, end - first, into, block.past_cache)
        except EOFError:
            return _truncated(block)
        except OSError as error:
            return _unreadable(block, error)
        except BaseException as error:  # or who waits would wait for ever
            return error
        return None


class Readers:
    """Threads that read blocks, piece by piece in the order in which they are asked for."""

    def __init__(self, threads: int) -> None:
        self._pieces: SimpleQueue[tuple[Reading, int, int] | None] = SimpleQueue()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"weights {number}") for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, block: Block, slot: Slot) -> Reading:
        """Begins to. Nobody else may touch the slot until all is there."""
        pieces = block.pieces()
        reading = Reading(block, slot, len(pieces))
        for first, end in pieces:
            self._pieces.put((reading, first, end))
        return reading

    def close(self) -> None:
        """Until no thread touches a slot any more; what nobody has begun to read is not read."""
        self._stopped = True
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            reading, first, end = piece
            if not self._stopped:
                reading.read(first, end)


def check_unchanged(file: WeightFile, entry: Entry) -> None:
    """Raises CheckpointError if the file was written to since its header was read."""
    if file.status().st_mtime_ns != entry.modified_ns:
        raise CheckpointError(f"{entry.file}: was changed while it was read; start again when it is complete")


def _truncated(block: Block) -> CheckpointError:
    entry, found = block.rows.entry, block.file.status().st_size
    return CheckpointError(
        f"{entry.file}: is truncated: {block.rows.name} needs {entry.offset + entry.nbytes} bytes, the file "
        f"has {found}; download it again"
    )


def _unreadable(block: Block, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{block.rows.entry.file}: {block.rows.name} cannot be read ({error.strerror}); check the disk, or "
        "download it again"
    )
