"""Tensors of safetensors files, block by block of rows, into memory of a device.

Blocks are read ahead of their use by several threads (`engine.model.fetching`), out of the page cache or past
it (`engine.model.weight_file`), into a ring of slots of the host. For a GPU these are page-locked: while some
are read into, others are copied to the device. Numbers that stay as they are go straight to where they
belong; others go to room on the device, from where the caller converts them. The ring holds at most 144 MiB
of a checkpoint, and a GPU that converts has as much room besides, unless a single row is larger than a block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing
from itertools import cycle
from pathlib import Path

import torch

from engine.model.fetching import PIECE_BYTES, READERS, Block, Readers, Reading, check_unchanged, opened
from engine.model.slices import Slice, cut
from engine.model.staging import Ring
from engine.model.weight_file import PAGE, WeightFile

BLOCK_BYTES = 16 << 20
"""For a GPU: large, so that the interpreter's share of the time is small."""
_CPU_BLOCK_BYTES = 4 << 20
"""So that its cache holds what conversions need besides."""
_PIECES_AHEAD = 24
"""Asked for before they are used, where blocks are large: more than there are readers, who would all wait for
one that is late."""
_COPYING = 3
"""Slots that are being copied to a GPU."""

Fill = Callable[[Slice, torch.Tensor], None]
"""Takes rows and their numbers, `[rows, ...]` in the file's dtype on the device, which are valid during the
call; on CUDA for work on the current stream."""
Place = Callable[[Slice], torch.Tensor | None]
"""Where the numbers of some rows belong as they are: contiguous, in the file's dtype, on the device. None:
nowhere; they are to be filled in. Asked of each slice, as a whole, before any is read."""


def nowhere(whole: Slice) -> None:
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
    most `block_bytes` (None: what suits the device), or one. What has no numbers is left out.

    Yields the rows of each block when it was read; all are in place as the generator ends. Raises what `fill`
    and `place` raise, and CheckpointError: with file and tensor where bytes cannot be read or are missing,
    and at the end with a file that was changed after its header was read.
    """
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if device.type == "cuda" else _CPU_BLOCK_BYTES
    slices = [whole for whole in slices if whole.nbytes]
    if not slices:
        return
    entries = {whole.entry.file: whole.entry for whole in slices}
    with ExitStack() as stack:
        files = {path: stack.enter_context(closing(opened(path))) for path in entries}
        # All at once: what this thread does while others read, it does slowly.
        blocks = list(_blocks(slices, block_bytes, files, place))
        largest = max(block.rows.nbytes for block in blocks)
        most_ahead = max(2, _PIECES_AHEAD * PIECE_BYTES // max(largest, PIECE_BYTES))
        ring = stack.enter_context(closing(Ring(most_ahead + _COPYING, largest + 2 * PAGE, device)))
        readers = stack.enter_context(closing(Readers(READERS)))
        ahead: deque[Reading] = deque()
        for block, slot in zip(blocks, cycle(ring.slots), strict=False):
            if len(ahead) == most_ahead:
                yield _hand_over(ahead.popleft(), fill)
            slot.wait()
            ahead.append(readers.read(block, slot))
        while ahead:
            yield _hand_over(ahead.popleft(), fill)
        for path, file in files.items():
            check_unchanged(file, entries[path])


def _blocks(
    slices: list[Slice], block_bytes: int, files: dict[Path, WeightFile], place: Place
) -> Iterator[Block]:
    for whole in slices:
        target = place(whole)
        into = None if target is None else target.view(-1).view(torch.uint8)
        for rows in cut(whole, block_bytes):
            first = rows.offset - whole.offset
            part = None if into is None else into[first : first + rows.nbytes]
            yield Block(rows, files[rows.entry.file], part)


def _hand_over(reading: Reading, fill: Fill) -> Slice:
    block, slot = reading.block, reading.slot
    reading.wait()
    numbers = block.numbers(slot)
    if block.target is not None:
        slot.copy(numbers, block.target)
    else:
        fill(block.rows, block.rows.view(slot.on_device(numbers)))
        slot.used()
    return block.rows
