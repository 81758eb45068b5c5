"""Surveys the KV blocks, so that operators can see each block's state, owner and age.

A survey reads the block tables of all open submissions, which takes milliseconds for a large pool. It is
therefore divided into short slices, which the step loop runs when it would otherwise wait for the device. A
block may change owners between slices.
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Generator, Iterator

from engine.rank_messages import BLOCK_CELLS, NO_OWNER, BlockOwner, BlockUse
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, Submission

_SLICE = 2048
"""Maximum number of blocks read in one slice of a survey."""
_TABLE_COST = 8
"""Fixed cost of reading a block table, expressed as the number of blocks that could be read in the same
time."""


class BlockSurvey:
    """Surveys one scheduler's KV blocks. Only one survey runs at a time."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._running: Generator[None, None, BlockUse] | None = None

    @property
    def active(self) -> bool:
        """Whether a survey is in progress."""
        return self._running is not None

    def request(self) -> None:
        """Start a survey if none is in progress."""
        if self._running is None:
            self._running = _survey(self._scheduler)

    def advance(self) -> BlockUse | None:
        """Run the next slice of the survey in progress. Returns the survey's result if this was the last
        slice, otherwise None."""
        if self._running is None:
            return None
        try:
            next(self._running)
        except StopIteration as end:
            self._running = None
            result: BlockUse = end.value
            return result
        return None


def _survey(scheduler: Scheduler) -> Generator[None, None, BlockUse]:
    pool = scheduler.pool
    pool.now = time.monotonic()
    stride = -(-pool.total // BLOCK_CELLS)
    cells = -(-pool.total // stride)
    owners = array("H", [NO_OWNER]) * cells
    requests: dict[str, BlockOwner] = {}
    submissions = scheduler.accounting.all_open()
    names = list(dict.fromkeys(one.submit.request_id for one in submissions))[:NO_OWNER]
    index = {name: number for number, name in enumerate(names)}
    budget = _SLICE
    # Read the submissions newest first, so that a shared block is attributed to its oldest owner.
    for submission in reversed(submissions):
        name = submission.submit.request_id
        owner, count = index.get(name, NO_OWNER), 0
        for table in _tables(submission):
            count += len(table)
            for first in range(0, len(table), _SLICE):
                part = table[first : first + _SLICE]
                if stride == 1:
                    for block in part:
                        owners[block] = owner
                else:
                    for block in part:
                        if block % stride == 0:
                            owners[block // stride] = owner
                budget -= len(part) + _TABLE_COST
                if budget <= 0:
                    yield
                    budget = _SLICE
        known = requests.get(name, BlockOwner(name, 0, 0))
        requests[name] = BlockOwner(name, known.blocks + count, known.preemptions + submission.preemptions)
    states, ages = bytearray(cells), bytearray(cells)
    for first in range(0, cells, _SLICE):
        yield
        end = min(cells, first + _SLICE)
        blocks = range(first * stride, pool.total, stride)[: end - first]
        states[first:end], ages[first:end] = pool.states(blocks)
        for cell in range(first, end):
            if states[cell] < 2:
                owners[cell] = NO_OWNER
    if sys.byteorder == "big":
        owners.byteswap()
    return BlockUse(stride, bytes(states), bytes(ages), owners.tobytes(), [requests[name] for name in names])


def _tables(submission: Submission) -> Iterator[list[int]]:
    """Yield a submission's block tables. Blocks shared by several of its samples are yielded only once."""
    seen: set[int] = set()
    sequences: list[Sequence] = submission.sequences
    for sequence in sequences:
        shared = sequence.shared
        if shared is not None and id(shared) not in seen:
            seen.add(id(shared))
            yield shared.blocks
        if sequence.table:
            yield sequence.table
