"""Blocks of weights out of their files, each in pieces by several threads.

For a piece a thread calls the kernel once, which copies while the interpreter serves others. Pieces are
large, so that the interpreter's share of the time is small, and few are on their way at once, so that what
the page cache gives stays in the processor's until the device has fetched it.

Errors of reading name the file and the tensor; that a file cannot be opened, or was changed, names the file.
"""

from __future__ import annotations

import threading
from pathlib import Path
from queue import SimpleQueue

import torch

from engine.config import CheckpointError
from engine.model.checkpoint import Entry
from engine.model.slices import Slice
from engine.model.staging import Slot
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
            # Not kept: its traceback leads here, and both would keep the slot until garbage is collected.
            failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def read(self, first: int, end: int) -> None:
        """One of the pieces. Whatever is raised, who waits is told."""
        try:
            self._read(first, end)
        except BaseException as error:
            self._failure = error
        with self._lock:
            self._left -= 1
            if not self._left:
                self._there.release()

    def _read(self, first: int, end: int) -> None:
        block = self.block
        into = self.slot.bytes[first // PAGE * PAGE - block.first_page :]
        try:
            block.file.read(first, end - first, into, block.past_cache)
        except EOFError:
            raise _truncated(block) from None
        except OSError as error:
            raise _unreadable(block, error) from error


class Readers:
    """Threads that read blocks, piece by piece in the order in which they are asked for."""

    def __init__(self, threads: int) -> None:
        self._pieces: SimpleQueue[tuple[Reading, int, int] | None] = SimpleQueue()
        self._stopped = False
        self._threads: list[threading.Thread] = []
        try:
            for number in range(threads):
                # A process may end though somebody still holds a stream that was never closed.
                thread = threading.Thread(target=self._work, name=f"weights {number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # no more threads, for one
            self.close()
            raise

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
    """Raises CheckpointError if the file was written to since its header was read, or nobody can tell."""
    try:
        modified_ns = file.status().st_mtime_ns
    except OSError as error:
        raise CheckpointError(f"{entry.file}: cannot be read ({error.strerror})") from error
    if modified_ns != entry.modified_ns:
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
