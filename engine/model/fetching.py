"""Bytes of a block of weights: out of a mapping of its file, or read.

Every error names the file and, once it is open, the tensor. But who cuts a file off in the very moment in
which its mapping is copied ends the process (SIGBUS): the next start says what is missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from engine.config import CheckpointError
from engine.model.slices import Slice
from engine.model.slots import Slot
from engine.model.weight_file import Way, WeightFile

PAGERS = 8
"""Threads that have pages of a mapping there, and let go of them: as many as keep up with PCIe where pages
are small."""
_SPAN_BYTES = 128 << 20
"""Of a file, that such a thread takes at once, so that the interpreter's share of the time is small."""
_SPANS_AHEAD = PAGERS + 2
"""Spans that are had there while the blocks of one are used."""


def opened(path: Path) -> WeightFile:
    """Raises CheckpointError with the reason."""
    try:
        return WeightFile(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error


class Block:
    """Rows that are had at once, and how."""

    __slots__ = ("file", "rows", "way")

    def __init__(self, rows: Slice, file: WeightFile) -> None:
        self.rows = rows
        self.file = file
        self.way = file.way(rows.offset, rows.nbytes, rows.shared)

    @property
    def end(self) -> int:
        return self.rows.offset + self.rows.nbytes

    def is_before(self, other: Block) -> bool:
        """Side by side with another, and had in the same way."""
        return self.file is other.file and self.end == other.rows.offset and self.way is other.way


class Pages:
    """Of mapped blocks: there before they are touched, and let go of when all of a span are used."""

    def __init__(self, blocks: list[Block], threads: ThreadPoolExecutor) -> None:
        self._threads = threads
        self._spans = list(_spans(blocks))
        self._span_of = [number for number, span in enumerate(self._spans) for _ in span]
        self._there: list[Future[None]] = []

    def there(self, number: int) -> Future[None]:
        """What to wait for before a block's pages are touched. Blocks are asked for in their order."""
        mine = self._span_of[number]
        for span in self._spans[len(self._there) : mine + 1 + _SPANS_AHEAD]:
            self._there.append(self._threads.submit(_bring, span))
        return self._there[mine]

    def used(self, number: int) -> None:
        """A block's pages will not be touched again. Blocks are used in their order."""
        mine = self._span_of[number]
        is_last = number + 1 == len(self._span_of) or self._span_of[number + 1] != mine
        if is_last:
            self._threads.submit(_let_go, self._spans[mine])


def _spans(blocks: list[Block]) -> Iterator[list[Block]]:
    """Blocks that lie side by side in a file, and are had in the same way."""
    span: list[Block] = []
    for block in blocks:
        if span and not (span[-1].is_before(block) and block.end - span[0].rows.offset <= _SPAN_BYTES):
            yield span
            span = []
        span.append(block)
    yield span


def _bring(span: list[Block]) -> None:
    if span[0].way is not Way.MAPPED:
        return
    for block in (span[0], span[-1]):
        _check_there(block)  # or the file might have been shorter when it was mapped
    file, first = span[0].file, span[0].rows.offset
    try:
        file.bring(first, span[-1].end - first)
    except OSError:
        for block in span:  # which tensor?
            try:
                file.bring(block.rows.offset, block.rows.nbytes)
            except OSError as error:
                raise _unreadable(block, error) from error


def _let_go(span: list[Block]) -> None:
    if span[0].way is Way.MAPPED:
        first = span[0].rows.offset
        span[0].file.let_go(first, span[-1].end - first)


def fetch(block: Block, there: Future[None], slot: Slot) -> torch.Tensor:
    """The bytes of a block, where a GPU can fetch them: `slot`'s, or on a CPU maybe the mapping's own."""
    rows = block.rows
    if block.way is Way.MAPPED:
        there.result()
        _check_there(block)  # what a file no longer has must not be touched
        assert block.file.pages is not None
        return slot.filled(
            torch.frombuffer(block.file.pages, dtype=torch.uint8, count=rows.nbytes, offset=rows.offset)
        )
    past_cache = block.way is Way.PAST_CACHE
    try:
        at = block.file.read(rows.offset, rows.nbytes, slot.bytes, past_cache)
    except EOFError:
        raise _truncated(block) from None
    except OSError as error:
        raise _unreadable(block, error) from error
    return slot.host[at : at + rows.nbytes]


def _check_there(block: Block) -> None:
    if block.file.status().st_size < block.end:
        raise _truncated(block)
    check_unchanged(block)


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
