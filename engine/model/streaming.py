"""Tensors of safetensors files, block by block of rows, into memory of a device.

What lies in the page cache is copied out of a mapping of the file, one block at a time by all of torch's
threads together; threads of our own have its pages there beforehand, and let go of them afterwards. What does
not lie there such threads read, many blocks at once, as disks want it. On a GPU both go through a ring of
page-locked slots: while some are filled, others are copied to the device. Numbers that stay as they are go
straight to where they belong; others go to room on the device, from where the caller converts them. The ring
holds at most 256 MiB of a checkpoint, 80 where all of it is in the page cache, and a GPU that converts has as
much room besides, unless a single row is larger than a block. `engine.model.weight_file` says what is read
how.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from itertools import cycle

import torch

from engine.model.fetching import PAGERS, Block, Pages, check_unchanged, fetch, opened
from engine.model.slices import Slice, cut
from engine.model.slots import Ring, Slot
from engine.model.weight_file import PAGE, Way

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

Fill = Callable[[Slice, torch.Tensor], None]
"""Takes rows and their numbers, `[rows, ...]` in the file's dtype on the device, which are valid during the
call; on CUDA for work on the current stream."""
Place = Callable[[Slice], torch.Tensor | None]
"""Where the numbers of some rows belong as they are: contiguous, in the file's dtype, on the device. None:
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
    most `block_bytes` (None: what suits the device), or one. What has no numbers is left out.

    Yields the rows of each block when it was read; all are in place as the generator ends. Raises what `fill`
    and `place` raise, and CheckpointError with file and tensor where bytes cannot be read, are missing, or
    belong to a file that was changed after its header was read.
    """
    if block_bytes is None:
        block_bytes = BLOCK_BYTES if device.type == "cuda" else _CPU_BLOCK_BYTES
    slices = list(cut(slices, block_bytes))
    if not slices:
        return
    with ExitStack() as stack:
        paths = {rows.entry.file for rows in slices}
        files = {path: stack.enter_context(closing(opened(path))) for path in paths}
        blocks = [Block(rows, files[rows.entry.file]) for rows in slices]
        # Of those that are asked for, one waits until another is done.
        most_ahead = (1 if all(block.way is Way.MAPPED for block in blocks) else READERS) + 1
        largest = max(rows.nbytes for rows in slices)
        ring = stack.enter_context(closing(Ring(most_ahead + _COPYING, largest + 2 * PAGE, device)))
        stack.enter_context(_copy_threads(device))
        pagers, copier, readers = (
            ThreadPoolExecutor(most, f"weights {name}")
            for name, most in (("pages", PAGERS), ("copy", 1), ("read", READERS))
        )
        for threads in (pagers, copier, readers):
            stack.callback(threads.shutdown, cancel_futures=True)
        pages = Pages(blocks, pagers)
        ahead: deque[tuple[int, Slot, Future[torch.Tensor]]] = deque()

        def hand_over_one() -> Slice:
            number, slot, fetched = ahead.popleft()
            _hand_over(blocks[number], slot, fetched.result(), fill, place)
            pages.used(number)
            return blocks[number].rows

        for number, (block, slot) in enumerate(zip(blocks, cycle(ring.slots), strict=False)):
            if len(ahead) == most_ahead:
                yield hand_over_one()
            slot.wait()
            threads = copier if block.way is Way.MAPPED else readers
            ahead.append((number, slot, threads.submit(fetch, block, pages.there(number), slot)))
        while ahead:
            yield hand_over_one()


def _hand_over(block: Block, slot: Slot, numbers: torch.Tensor, fill: Fill, place: Place) -> None:
    target = place(block.rows)
    if target is not None:
        slot.copy(numbers, target.view(-1).view(torch.uint8))
    else:
        fill(block.rows, block.rows.view(slot.on_device(numbers)))
        slot.used()
    # A CPU has read a mapping only now.
    check_unchanged(block)


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
