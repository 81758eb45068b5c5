"""Reads blocks of weights from files into staging buffers. Small blocks share a buffer. Each block is divided
into pieces, which several threads read.

A thread reads a piece with one system call, which releases the interpreter's lock. Pieces are large to keep
Python's overhead low. Only a few pieces are read at a time, so that data copied from the page cache is still
in the CPU cache when the device reads it. Error messages name the file; if a read failed, they also name the
tensor.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue

import torch

from engine.config import CheckpointError, unreadable
from engine.model.checkpoint import TensorEntry
from engine.model.slices import TensorSlice
from engine.model.staging import StagingBuffer
from engine.model.weight_file import PAGE, WeightFile, buffer_bytes

READERS = 12
"""Number of reader threads: enough to saturate PCIe (55 GB/s) when reading from the page cache, and to keep
disks busy."""
PIECE_BYTES = 4 << 20
"""Size of a piece in bytes. Must be a multiple of the page size."""


def open_weights(path: Path) -> WeightFile:
    """Open a weight file. Raises CheckpointError if that fails."""
    try:
        return WeightFile(path)
    except OSError as error:
        raise unreadable(path, error) from error


class FileBlock:
    """Consecutive rows of a tensor that are read together."""

    __slots__ = ("file", "past_cache", "rows", "start", "target")

    def __init__(
        self, rows: TensorSlice, file: WeightFile, target: torch.Tensor | None = None, start: int = 0
    ) -> None:
        self.rows = rows
        self.file = file
        self.past_cache = file.past_cache(rows.offset, rows.nbytes, rows.shared)
        self.target = target
        """Device memory for an unchanged copy of the block: `[bytes]`. None if the block must be
        converted."""
        self.start = start
        """Byte offset of `first_page` in the staging buffer, a multiple of the page size."""

    @property
    def first_page(self) -> int:
        """File offset of the first page that the block overlaps."""
        return self.rows.offset // PAGE * PAGE

    @property
    def end(self) -> int:
        """Offset in the staging buffer at which the block's last page ends."""
        return self.start + buffer_bytes(self.rows.offset, self.rows.nbytes)

    def numbers(self, buffer: StagingBuffer) -> torch.Tensor:
        """Return the block's bytes in its staging buffer: `[bytes]`."""
        first = self.start + self.rows.offset - self.first_page
        return buffer.host[first : first + self.rows.nbytes]

    def pieces(self) -> list[tuple[int, int]]:
        """Return the (first, end) file offsets of the block's pieces. All but the first begin at a page
        boundary."""
        first, end = self.rows.offset, self.rows.offset + self.rows.nbytes
        inner = range(self.first_page + PIECE_BYTES, end, PIECE_BYTES)
        return list(zip([first, *inner], [*inner, end], strict=True))


class BatchRead:
    """A read of several blocks into a staging buffer, in progress or complete."""

    __slots__ = ("_complete", "_failure", "_left", "_lock", "blocks", "buffer")

    def __init__(self, blocks: Sequence[FileBlock], buffer: StagingBuffer, pieces: int) -> None:
        self.blocks = blocks
        self.buffer = buffer
        self._left = pieces
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        # The lock is held until the last piece has been read. A lock is faster than an Event.
        self._complete = threading.Lock()
        self._complete.acquire()

    def wait(self) -> None:
        """Wait until all pieces have been read. Raises CheckpointError, naming the file and the tensor, if a
        read failed."""
        with self._complete:
            # Drop the reference to the exception. Its traceback and the BatchRead would form a reference
            # cycle that keeps the staging buffer alive until the next garbage collection.
            failure, self._failure = self._failure, None
        try:
            if failure is not None:
                raise failure
        finally:
            del failure

    def read(self, block: FileBlock, first: int, end: int) -> None:
        """Read one piece of a block. If reading fails, `wait` raises the error."""
        try:
            self._read(block, first, end)
        except BaseException as error:
            self._failure = error
        with self._lock:
            self._left -= 1
            if not self._left:
                self._complete.release()

    def _read(self, block: FileBlock, first: int, end: int) -> None:
        into = self.buffer.bytes[block.start + first // PAGE * PAGE - block.first_page : block.end]
        try:
            block.file.read(first, end - first, into, block.past_cache)
        except EOFError:
            raise _truncated(block) from None
        except OSError as error:
            raise _unreadable(block, error) from error


class ReaderPool:
    """Threads that read blocks piece by piece, in the order of calls to `read`."""

    def __init__(self, threads: int) -> None:
        self._pieces: SimpleQueue[tuple[BatchRead, FileBlock, int, int] | None] = SimpleQueue()
        self._stopped = False
        self._threads: list[threading.Thread] = []
        try:
            for number in range(threads):
                # Daemon threads do not prevent the process from exiting while a stream is open.
                thread = threading.Thread(target=self._work, name=f"weights {number}", daemon=True)
                thread.start()
                self._threads.append(thread)
        except BaseException:  # e.g. the thread limit has been reached
            self.close()
            raise

    def read(self, blocks: Sequence[FileBlock], buffer: StagingBuffer) -> BatchRead:
        """Start reading blocks into different pages of a staging buffer, which must not be used until the
        read completes."""
        pieces = [(block, first, end) for block in blocks for first, end in block.pieces()]
        read = BatchRead(blocks, buffer, len(pieces))
        for piece in pieces:
            self._pieces.put((read, *piece))
        return read

    def close(self) -> None:
        """Stop the threads and wait for them to end. Pieces that have not been started are skipped."""
        self._stopped = True
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            read, block, first, end = piece
            if not self._stopped:
                read.read(block, first, end)


def check_unchanged(file: WeightFile, entry: TensorEntry) -> None:
    """Raise CheckpointError if the file was modified after its header was read, or if its modification time
    is unavailable."""
    try:
        modified_ns = file.status().st_mtime_ns
    except OSError as error:
        raise unreadable(entry.file, error) from error
    if modified_ns != entry.modified_ns:
        raise CheckpointError(
            f"{entry.file} was modified while it was being read", "try again when the file is complete"
        )


def _truncated(block: FileBlock) -> CheckpointError:
    entry, found = block.rows.entry, block.file.status().st_size
    return CheckpointError(
        f"{entry.file} is truncated: {block.rows.name} needs {entry.offset + entry.nbytes} bytes, but the "
        f"file has {found}",
        "download it again",
    )


def _unreadable(block: FileBlock, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"{block.rows.entry.file}: {block.rows.name} cannot be read ({error.strerror})",
        "check the disk, or download the file again",
    )
