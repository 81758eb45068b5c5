"""Blocks of weights out of their files, each in pieces by several threads.

For a piece a thread calls the kernel once, which copies while the interpreter serves others. Pieces are
large, so that the interpreter's share of the time is small, and few are on their way at once, so that what
the page cache gives stays in the processor's until the device has fetched it.

Every error names the file and, once it is open, the tensor.
"""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path
from queue import SimpleQueue

import torch

from engine.config import CheckpointError
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

    __slots__ = ("file", "past_cache", "rows")

    def __init__(self, rows: Slice, file: WeightFile) -> None:
        self.rows = rows
        self.file = file
        self.past_cache = file.past_cache(rows.offset, rows.nbytes, rows.shared)

    @property
    def first_page(self) -> int:
        """Where the file's pages begin that a slot takes."""
        return self.rows.offset // PAGE * PAGE

    def numbers(self, slot: Slot) -> torch.Tensor:
        """`[bytes]`, of a slot that all pieces were read to."""
        skipped = self.rows.offset - self.first_page
        return slot.host[skipped : skipped + self.rows.nbytes]


class Readers:
    """Threads that read blocks, piece by piece in the order in which they are asked for."""

    def __init__(self, threads: int) -> None:
        self._pieces: SimpleQueue[_Piece | None] = SimpleQueue()
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._work, name=f"weights {number}") for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(self, block: Block, slot: Slot) -> list[Future[None]]:
        """Into `slot`. To wait for: each piece is there, or raises CheckpointError."""
        pieces = [_Piece(block, slot, *part) for part in _cut(block)]
        for piece in pieces:
            self._pieces.put(piece)
        return [piece.there for piece in pieces]

    def close(self) -> None:
        """Until no thread touches a slot any more; what nobody has begun to read is not read."""
        self._stopped = True
        for _ in self._threads:
            self._pieces.put(None)
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (piece := self._pieces.get()) is not None:
            if not self._stopped:
                piece.read()


def _cut(block: Block) -> list[tuple[int, int]]:
    """First bytes and ends in the file, of pieces that all begin at a page but for the first."""
    end = block.rows.offset + block.rows.nbytes
    inner = range(block.first_page + PIECE_BYTES, end, PIECE_BYTES)
    return list(zip([block.rows.offset, *inner], [*inner, end], strict=True))


class _Piece:
    """Of a block, bytes that one thread reads at once."""

    __slots__ = ("_block", "_end", "_first", "_slot", "there")

    def __init__(self, block: Block, slot: Slot, first: int, end: int) -> None:
        self._block = block
        self._slot = slot
        self._first = first
        self._end = end
        self.there: Future[None] = Future()

    def read(self) -> None:
        block, first, nbytes = self._block, self._first, self._end - self._first
        into = self._slot.bytes[first // PAGE * PAGE - block.first_page :]
        try:
            block.file.read(first, nbytes, into, block.past_cache)
        except EOFError:
            self.there.set_exception(_truncated(block))
        except OSError as error:
            self.there.set_exception(_unreadable(block, error))
        except BaseException as error:  # or who waits would wait for ever
            self.there.set_exception(error)
        else:
            self.there.set_result(None)


def check_unchanged(block: Block) -> None:
    """Raises CheckpointError if the file was written to since its header was read."""
    entry = block.rows.entry
    if block.file.status().st_mtime_ns != entry.modified_ns:
        raise CheckpointError(
            f"{entry.file}: was changed while {block.rows.name} was read; start again when it is complete"
        )


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
