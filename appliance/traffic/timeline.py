"""Waiting requests in order of a time, with sums over those before it.

Sorted blocks of a bounded size, each with a summary: what is asked of n requests costs about the square root
of n, in C where it is more than a few. Times are seconds of one clock.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import accumulate
from operator import sub
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

_MOST = 64
"""Entries in a block; a full one is split into two halves."""

_Entry = tuple[Any, ...]
"""(time, serial, …): the serial is unique, so what follows is never compared."""


class _SortedBlocks:
    """Sorted entries in blocks. Subclasses keep a summary of each block."""

    def __init__(self) -> None:
        self._blocks: list[list[_Entry]] = []
        self._lasts: list[tuple[float, int]] = []
        """The greatest key of each block, or a greater one that has left it."""
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def _put(self, entry: _Entry) -> None:
        self._length += 1
        key = (entry[0], entry[1])
        at = bisect_left(self._lasts, key)
        if at == len(self._blocks):
            if at:
                at -= 1
                self._lasts[at] = key
            else:
                self._blocks.append([])
                self._lasts.append(key)
                self._insert_summary(0)
        block = self._blocks[at]
        insort(block, entry)
        if len(block) > _MOST:
            middle = len(block) // 2
            self._blocks[at : at + 1] = [block[:middle], block[middle:]]
            self._lasts.insert(at, block[middle - 1][:2])
            self._insert_summary(at)
            self._summarize(at + 1)
        self._summarize(at)

    def _drop(self, time: float, serial: int) -> _Entry:
        at = bisect_left(self._lasts, (time, serial))
        block = self._blocks[at] if at < len(self._blocks) else []
        index = bisect_left(block, (time, serial))
        if index == len(block) or block[index][1] != serial:
            raise KeyError(serial)
        entry = block.pop(index)
        self._length -= 1
        if block:
            self._summarize(at)
        else:
            del self._blocks[at], self._lasts[at]
            self._delete_summary(at)
        return entry

    def _summarize(self, at: int) -> None:
        raise NotImplementedError

    def _insert_summary(self, at: int) -> None:
        raise NotImplementedError

    def _delete_summary(self, at: int) -> None:
        raise NotImplementedError


class Timeline(_SortedBlocks, Generic[Item]):
    """Items in order of a time, each with a size of two numbers (prompt and output tokens)."""

    def __init__(self) -> None:
        super().__init__()
        self._prompts: list[float] = []
        self._outputs: list[float] = []

    def add(self, time: float, serial: int, prompt: float, output: float, item: Item) -> None:
        """`serial` orders equal times and is never used twice."""
        self._put((time, serial, prompt, output, item))

    def remove(self, time: float, serial: int) -> None:
        """Raises KeyError for what is not there."""
        self._drop(time, serial)

    def first(self) -> Item | None:
        """The item of the earliest time."""
        item: Item | None = self._blocks[0][0][4] if self._blocks else None
        return item

    def __iter__(self) -> Iterator[Item]:
        """In order. The timeline must not change meanwhile."""
        for block in self._blocks:
            for entry in block:
                yield entry[4]

    def before(self, time: float) -> tuple[float, float]:
        """Sums of prompt and of output over the items up to this time, those of the same time included."""
        key = (time, 1 << 62)
        at = bisect_left(self._lasts, key)
        prompt, output = sum(self._prompts[:at]), sum(self._outputs[:at])
        if at < len(self._blocks):
            for entry in self._blocks[at]:
                if entry[0] > time:
                    break
                prompt += entry[2]
                output += entry[3]
        return prompt, output

    def _summarize(self, at: int) -> None:
        block = self._blocks[at]
        self._prompts[at] = sum([entry[2] for entry in block])
        self._outputs[at] = sum([entry[3] for entry in block])

    def _insert_summary(self, at: int) -> None:
        self._prompts.insert(at, 0.0)
        self._outputs.insert(at, 0.0)

    def _delete_summary(self, at: int) -> None:
        del self._prompts[at], self._outputs[at]


class Promises(_SortedBlocks, Generic[Item]):
    """Items that must begin by a time each, and whether all of them can.

    Served one after another, earliest first, each taking its work in seconds: an item begins in time if the
    work of those before it is done by then (the processor demand test of EDF scheduling, Baruah et al. 1990).
    """

    def __init__(self) -> None:
        super().__init__()
        self._works: list[float] = []
        self._slacks: list[float] = []
        """Of each block: the least of (time − work before it in the block)."""

    def add(self, time: float, serial: int, work_s: float, item: Item) -> None:
        """`item` must begin by `time` and takes `work_s`. `serial` is never used twice."""
        self._put((time, serial, work_s, item))

    def remove(self, time: float, serial: int) -> None:
        """Raises KeyError for what is not there."""
        self._drop(time, serial)

    def __iter__(self) -> Iterator[Item]:
        """Those that must begin first, first. They must not change meanwhile."""
        for block in self._blocks:
            for entry in block:
                yield entry[3]

    def latest_begin(self) -> float:
        """When serving them must begin at the latest, so that every one begins in time; infinite without."""
        return self._latest(0, 0.0)

    def latest_begin_with(self, time: float, work_s: float) -> float:
        """As `latest_begin`, of those that would be affected by one more, which must begin by `time` and
        takes `work_s`: itself and those after it."""
        at = bisect_left(self._lasts, (time, 1 << 62))
        before = sum(self._works[:at])
        if at == len(self._blocks):
            return time - before
        block = self._blocks[at]
        index = bisect_left(block, (time, 1 << 62))
        before += sum([entry[2] for entry in block[:index]])
        work, slack = _demand(block[index:], before)
        return min(min(slack, self._latest(at + 1, work)) - work_s, time - before)

    def _latest(self, start: int, before: float) -> float:
        if start == len(self._blocks):
            return float("inf")
        works = accumulate(self._works[start:], initial=before)
        return min(map(sub, self._slacks[start:], works))

    def _summarize(self, at: int) -> None:
        self._works[at], self._slacks[at] = _demand(self._blocks[at], 0.0)

    def _insert_summary(self, at: int) -> None:
        self._works.insert(at, 0.0)
        self._slacks.insert(at, float("inf"))

    def _delete_summary(self, at: int) -> None:
        del self._works[at], self._slacks[at]


def _demand(entries: list[_Entry], work: float) -> tuple[float, float]:
    """The work of promises that follow `work`, which is counted in; and the least of (time − work before)."""
    slack = float("inf")
    for time, _, work_s, _ in entries:
        if time - work < slack:
            slack = time - work
        work += work_s
    return work, slack
