"""The queue of sequences waiting for admission."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.levels import LEVELS
from engine.scheduling.sequence import QueueEntry, Sequence


class WaitingQueue:
    """Holds the waiting sequences, ordered by level, and in service order within a level (`Sequence.order`).

    A preempted sequence precedes newer sequences of its level, because it arrived earlier. Each level has a
    binary heap. A removed sequence's entry stays in the heap until it reaches the top, or until most entries
    are stale and the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._heaps: list[list[QueueEntry]] = [[] for _ in range(LEVELS)]
        self._lengths = [0] * LEVELS
        self._pushed = 0

    def __len__(self) -> int:
        return sum(self._lengths)

    def length(self, level: int) -> int:
        """Return the number of sequences waiting at a level."""
        return self._lengths[level]

    def __iter__(self) -> Iterator[Sequence]:
        """Yield the waiting sequences in no particular order."""
        return (entry[-1] for heap in self._heaps for entry in heap if entry[-1].entry is entry)

    def push(self, sequence: Sequence) -> None:
        # The serial number breaks ties, because sequences are not comparable. A stale entry of the same
        # sequence may have an equal key.
        self._pushed += 1
        sequence.entry = (sequence.order, self._pushed, sequence)
        heapq.heappush(self._heaps[sequence.level], sequence.entry)
        self._lengths[sequence.level] += 1

    def peek(self) -> Sequence | None:
        """Return the first waiting sequence, or None if the queue is empty."""
        return next((first for level in range(LEVELS) if (first := self.first(level)) is not None), None)

    def first(self, level: int) -> Sequence | None:
        """Return the first waiting sequence of a level, or None if there is none."""
        heap = self._heaps[level]
        while heap:
            entry = heap[0]
            if entry[-1].entry is entry:
                return entry[-1]
            heapq.heappop(heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence from anywhere in the queue."""
        sequence.entry = None
        self._lengths[sequence.level] -= 1
        heap = self._heaps[sequence.level]
        if len(heap) > 2 * self._lengths[sequence.level] + 64:
            heap[:] = [entry for entry in heap if entry[-1].entry is entry]
            heapq.heapify(heap)
