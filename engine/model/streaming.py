"""Streams tensors from safetensors files into device memory, in blocks of rows. Small blocks are read and
copied in batches, because a mixture-of-experts checkpoint has tens of thousands of tensors.

Several threads read blocks ahead of their use (`engine.model.fetching`) into a ring of staging buffers. They
read through the page cache or directly from the disk (`engine.model.weight_file`). For a GPU, the buffers are
page-locked, and some are filled while others are copied to the device. Values that need no conversion are
copied directly to the parameters. Other values are copied to device buffers, where the caller converts them.

Unless a single row is larger than a block, the ring uses at most 144 MiB of host memory, and conversions use
the same amount of GPU memory.
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
    BatchRead,
    FileBlock,
    ReaderPool,
    check_unchanged,
    open_weights,
)
from engine.model.slices import TensorSlice, cut
from engine.model.staging import StagingRing
from engine.model.weight_file import PAGE, WeightFile

BLOCK_BYTES = 16 << 20
"""Size in bytes of a block or batch on a GPU, large enough to keep Python's overhead per byte low."""
_CPU_BLOCK_BYTES = 4 << 20
"""Size in bytes of a block or batch on a CPU, small enough for a block and its conversion buffers to fit into
the CPU cache."""
_PIECES_AHEAD = 24
"""Number of pieces to read ahead. It exceeds the number of reader threads, so that one slow read does not
stall the others."""
_BESIDE = 2 * PAGE
"""Combined size in bytes of a block's first and last page, which the block may fill only partly."""
_COPYING = 3
"""Maximum number of staging buffers in use by copies to a GPU at the same time."""

Fill = Callable[[TensorSlice, torch.Tensor], None]
"""Function called with rows and their values: `[rows, ...]` in the file's dtype on the device. The tensor is
valid only during the call or, on CUDA, for work launched on the current stream during the call."""
FindTarget = Callable[[TensorSlice], torch.Tensor | None]
"""Function that returns the tensor into which a slice is copied unchanged, or None to pass the slice to
`Fill`. The tensor must be contiguous, on the device, and of the file's dtype. The function is called once per
slice, before any slice is read."""


def no_target(whole: TensorSlice) -> None:
    """Return None for every slice, so that `Fill` receives it (see `FindTarget`)."""


def stream(
    slices: Iterable[TensorSlice],
    device: torch.device,
    fill: Fill,
    find_target: FindTarget = no_target,
    *,
    block_bytes: int | None = None,
) -> Generator[TensorSlice]:
    """Read `slices` in blocks of complete rows and yield the rows of each block after its batch has been
    read. All copies are complete when the generator ends.

    A block has at most `block_bytes` bytes (the default depends on the device), unless a single row is
    larger. Empty slices are skipped. Reading is fastest if slices are ordered by file and offset.

    Exceptions from `fill` and `find_target` propagate. Raises CheckpointError, naming the file and the
    tensor, if bytes are missing or cannot be read. A file that was modified after its header was read causes
    the same error at the end.
    """
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if device.type == "cuda" else _CPU_BLOCK_BYTES
    slices = [whole for whole in slices if whole.nbytes]
    if not slices:
        return
    entries = {whole.entry.file: whole.entry for whole in slices}
    with ExitStack() as stack:
        files = {path: stack.enter_context(closing(open_weights(path))) for path in entries}
        # Create all blocks up front, because Python code runs slowly while the reader threads are active.
        batches = list(_batches(slices, block_bytes, files, find_target))
        largest = max(batch[-1].end for batch in batches)
        max_ahead = max(2, _PIECES_AHEAD * PIECE_BYTES // max(largest - _BESIDE, PIECE_BYTES))
        ring = stack.enter_context(closing(StagingRing(max_ahead + _COPYING, largest, device)))
        readers = stack.enter_context(closing(ReaderPool(READERS)))
        ahead: deque[BatchRead] = deque()
        for batch, buffer in zip(batches, cycle(ring.buffers), strict=False):
            if len(ahead) == max_ahead:
                yield from _deliver(ahead.popleft(), fill)
            buffer.wait()
            ahead.append(readers.read(batch, buffer))
        while ahead:
            yield from _deliver(ahead.popleft(), fill)
        for path, file in files.items():
            check_unchanged(file, entries[path])


def _batches(
    slices: list[TensorSlice], block_bytes: int, files: dict[Path, WeightFile], find_target: FindTarget
) -> Iterator[list[FileBlock]]:
    """Yield the blocks of all slices in order, in batches. The blocks of a batch share a staging buffer."""
    batch: list[FileBlock] = []
    for whole in slices:
        target = find_target(whole)
        target_bytes = None if target is None else target.view(-1).view(torch.uint8)
        for rows in cut(whole, block_bytes):
            first = rows.offset - whole.offset
            part = None if target_bytes is None else target_bytes[first : first + rows.nbytes]
            block = FileBlock(rows, files[rows.entry.file], part, batch[-1].end if batch else 0)
            if batch and block.end > block_bytes + _BESIDE:
                yield batch
                batch, block.start = [], 0
            batch.append(block)
    yield batch


def _deliver(read: BatchRead, fill: Fill) -> list[TensorSlice]:
    """Wait until a batch has been read, then copy each block to its target or pass it to `fill`. Returns the
    blocks' rows."""
    buffer = read.buffer
    read.wait()
    buffer.copy([(block.numbers(buffer), block.target) for block in read.blocks if block.target is not None])
    others = [block for block in read.blocks if block.target is None]
    if others:
        on_device = buffer.on_device([block.numbers(buffer) for block in others])
        for block, numbers in zip(others, on_device, strict=True):
            fill(block.rows, block.rows.view(numbers))
        buffer.mark_used()
    return [block.rows for block in read.blocks]
