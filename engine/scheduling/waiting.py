"""The queue of sequences that wait for admission."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from engine.scheduling.sequence import REAL_TIME, QueueEntry, Sequence


class WaitingQueue:
    """Waiting sequences in their order of service (`Sequence.order`).

    A preempted sequence comes before newer sequences of its class, except urgent ones, because it arrived
    earlier. The queue is a binary heap. The entry of a removed sequence stays in the heap until it reaches
    the top, or until removed entries are the majority and the heap is rebuilt.
    """

    def __init__(self) -> None:
        self._heap: list[QueueEntry] = []
        self._length = 0
        self._pushed = 0
        self.real_time = 0
        """Number of waiting real-time sequences."""

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Sequence]:
        """Iterate over the waiting sequences in no particular order."""
        return (entry[-1] for entry in self._heap if entry[-1].entry is entry)

    def push(self, sequence: Sequence) -> None:
        # The serial number breaks ties, so that sequences themselves are never compared: a stale entry of the
        # same sequence may have an equal key.
        self._pushed += 1
        sequence.entry = (sequence.order, self._pushed, sequence)
        heapq.heappush(self._heap, sequence.entry)
        self._length += 1
        self.real_time += sequence.order[0] == REAL_TIME

    def peek(self) -> Sequence | None:
        """Return the first waiting sequence; None if the queue is empty."""
        heap = self._heap
        while heap:
            entry = heap[0]
            if entry[-1].entry is entry:
                return entry[-1]
            heapq.heappop(heap)
        return None

    def remove(self, sequence: Sequence) -> None:
        """Remove a waiting sequence from any place in the queue."""
        sequence.entry = None
        self._length -= 1
        self.real_time -= sequence.order[0] == REAL_TIME
        if len(self._heap) > 2 * self._length + 64:
            self._heap = [entry for entry in self._heap if entry[-1].entry is entry]
            heapq.heapify(self._heap)
