"""Streams tensors of safetensors files into device memory, in blocks of rows.

Several threads read blocks ahead of their use (`engine.model.fetching`), through the page cache or directly
(`engine.model.weight_file`), into a ring of staging buffers. For a GPU the buffers are page-locked: some are
filled while others are copied to the device. Values that need no conversion are copied to their final place.
Other values are copied to device buffers, from which the caller converts them. The ring holds at most 144
MiB, and a GPU that converts needs as much again, unless a single row is larger than a block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import cycle
from pathlib import Path

import torch

from engine.model.fetching import (
    PIECE_BYTES,
    READERS,
    BlockRead,
    FileBlock,
    ReaderPool,
    check_unchanged,
    open_weights,
)
from engine.model.slices import TensorSlice, cut
from engine.model.staging import StagingRing
from engine.model.weight_file import PAGE, WeightFile

BLOCK_BYTES = 16 << 20
"""Block size for a GPU: large, so that Python's overhead per block is small."""
_CPU_BLOCK_BYTES = 4 << 20
"""Block size for a CPU: small enough for its cache to hold a block and the buffers of a conversion."""
_PIECES_AHEAD = 24
"""Number of pieces read ahead: more than there are reader threads, so that one late piece does not stop them
all."""
_COPYING = 3
"""Number of staging buffers that are being copied to a GPU."""

Fill = Callable[[TensorSlice, torch.Tensor], None]
"""Called with rows and their numbers, `[rows, ...]` in the file's dtype on the device. The tensor is valid
during the call; on CUDA, for work on the current stream."""
FindTarget = Callable[[TensorSlice], torch.Tensor | None]
"""Returns the tensor to which a slice is copied unchanged: contiguous, in the file's dtype, on the device;
None if `Fill` converts the slice. Called once for each whole slice, before any is read."""


def no_target(whole: TensorSlice) -> None:
    """The `FindTarget` for slices that are all passed to `Fill`."""


def stream(
    slices: Iterable[TensorSlice],
    device: torch.device,
    fill: Fill,
    find_target: FindTarget = no_target,
    *,
    block_bytes: int | None = None,
) -> Generator[TensorSlice]:
    """Read `slices` in blocks of whole rows, each of at most `block_bytes` or a single row; empty slices are
    skipped.

    The order of files and offsets is the fastest order of slices. With block_bytes None the size depends on
    the device. Yields the rows of each block when they have been read; all copies are complete when the
    generator ends. Raises the exceptions of `fill` and `find_target`, and CheckpointError with file and
    tensor if bytes are missing or cannot be read, or, at the end, with the file if it was modified after its
    header was read.
    """
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if device.type == "cuda" else _CPU_BLOCK_BYTES
    slices = [whole for whole in slices if whole.nbytes]
    if not slices:
        return
    entries = {whole.entry.file: whole.entry for whole in slices}
    with ExitStack() as stack:
        files = {path: stack.enter_context(closing(open_weights(path))) for path in entries}
        # All blocks are created before reading starts, because Python code is slow while the reader threads
        # run.
        blocks = list(_blocks(slices, block_bytes, files, find_target))
        largest = max(block.rows.nbytes for block in blocks)
        max_ahead = max(2, _PIECES_AHEAD * PIECE_BYTES // max(largest, PIECE_BYTES))
        ring = stack.enter_context(closing(StagingRing(max_ahead + _COPYING, largest + 2 * PAGE, device)))
        readers = stack.enter_context(closing(ReaderPool(READERS)))
        ahead: deque[BlockRead] = deque()
        for block, buffer in zip(blocks, cycle(ring.buffers), strict=False):
            if len(ahead) == max_ahead:
                yield _deliver(ahead.popleft(), fill)
            buffer.wait()
            ahead.append(readers.read(block, buffer))
        while ahead:
            yield _deliver(ahead.popleft(), fill)
        for path, file in files.items():
            check_unchanged(file, entries[path])


def _blocks(
    slices: list[TensorSlice], block_bytes: int, files: dict[Path, WeightFile], find_target: FindTarget
) -> Iterator[FileBlock]:
    for whole in slices:
        target = find_target(whole)
        target_bytes = None if target is None else target.view(-1).view(torch.uint8)
        for rows in cut(whole, block_bytes):
            first = rows.offset - whole.offset
            part = None if target_bytes is None else target_bytes[first : first + rows.nbytes]
            yield FileBlock(rows, files[rows.entry.file], part)


def _deliver(read: BlockRead, fill: Fill) -> TensorSlice:
    """Wait for a block, then copy it to its target or pass it to `fill`. Returns its rows."""
    block, buffer = read.block, read.buffer
    read.wait()
    numbers = block.numbers(buffer)
    if block.target is not None:
        buffer.copy(numbers, block.target)
    else:
        fill(block.rows, block.rows.view(buffer.on_device(numbers)))
        buffer.mark_used()
    return block.rows
