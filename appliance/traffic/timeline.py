"""Keeps waiting requests in time order and computes totals over the requests before a given time. All times
are in seconds on one clock.

`Timeline` holds one tenant's requests in plain lists. Each operation is at most linear in the queue length,
and the loops run in C. Most new requests are due after nearly all waiting requests, so the totals before a
new request are computed by subtracting a few items from the totals of all requests.

`Promises` holds a model's requests with a promised start. It must sum over the requests after a given time,
so it divides them into blocks and stores a summary of each. The cost of an operation grows roughly with the
square root of the number of requests. `scripts/bench_admission` measures both classes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import sub
from typing import Any, Generic, TypeVar

Item = TypeVar("Item")

_MAX_BLOCK = 64
"""Maximum number of entries in a block. Larger blocks are split in half."""
_AFTER_ALL = float("inf")
"""A value greater than any item's serial number."""

_Promise = tuple[Any, ...]
"""An entry: (time, serial, work in seconds, item). Serial numbers are unique, so items are never compared."""


class Timeline(Generic[Item]):
    """Items in time order, each with its prompt and output token counts."""

    __slots__ = ("_items", "_keys", "_outputs", "_prompts", "_total_output", "_total_prompt")

    def __init__(self) -> None:
        self._keys: list[tuple[float, int]] = []
        self._prompts: list[float] = []
        self._outputs: list[float] = []
        self._items: list[Item] = []
        self._total_prompt = 0.0
        self._total_output = 0.0

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Item]:
        """Iterate in order. The timeline must not change during the iteration."""
        return iter(self._items)

    def add(self, time: float, serial: int, prompt: float, output: float, item: Item) -> None:
        """Add an item. `serial` breaks ties between equal times and must be unique."""
        at = bisect_left(self._keys, (time, serial))
        self._keys.insert(at, (time, serial))
        self._prompts.insert(at, prompt)
        self._outputs.insert(at, output)
        self._items.insert(at, item)
        self._total_prompt += prompt
        self._total_output += output

    def remove(self, time: float, serial: int) -> None:
        """Remove an item. Raises KeyError if it is not in the timeline."""
        at = bisect_left(self._keys, (time, serial))
        if at == len(self._keys) or self._keys[at] != (time, serial):
            raise KeyError(serial)
        self._total_prompt -= self._prompts[at]
        self._total_output -= self._outputs[at]
        del self._keys[at], self._prompts[at], self._outputs[at], self._items[at]
        if not self._keys:  # Reset the totals, to remove accumulated rounding errors.
            self._total_prompt = self._total_output = 0.0

    def first(self) -> Item | None:
        """Return the item with the earliest time, or None if the timeline is empty."""
        return self._items[0] if self._items else None

    def before(self, time: float) -> tuple[float, float]:
        """Return the total prompt and output tokens of the items up to and including `time`."""
        end = bisect_right(self._keys, (time, _AFTER_ALL))
        if 2 * end < len(self._keys):
            return sum(self._prompts[:end]), sum(self._outputs[:end])
        prompt = self._total_prompt - sum(self._prompts[end:])
        return prompt, max(0.0, self._total_output - sum(self._outputs[end:]))


class Promises(Generic[Item]):
    """Items that must each begin by a given time. The class also checks whether all of them can. Items are
    served one at a time, earliest first, and each takes a given number of seconds of work. An item begins in
    time if all preceding work is completed by its own time. This check is the processor demand test of
    earliest-deadline-first scheduling (Baruah et al. 1990).
    """

    def __init__(self) -> None:
        self._blocks: list[list[_Promise]] = [[]]
        """The blocks in order. A block is empty only if it is the only block."""
        self._lasts: list[tuple[float, int]] = [(0.0, 0)]
        """Each block's greatest key (time and serial)."""
        self._works = [0.0]
        """Total work, in seconds, of the items in each block."""
        self._slacks = [float("inf")]
        """Each block's minimum slack. An item's slack is its time minus the preceding work in the block."""

    def __iter__(self) -> Iterator[Item]:
        """Iterate in order. The promises must not change during the iteration."""
        for block in self._blocks:
            for promise in block:
                yield promise[3]

    def add(self, time: float, serial: int, work_s: float, item: Item) -> None:
        """Add an item that must begin by `time` and takes `work_s` seconds. `serial` must be unique."""
        at = self._block_of((time, serial))
        block = self._blocks[at]
        insort(block, (time, serial, work_s, item))
        if len(block) > _MAX_BLOCK:
            middle = len(block) // 2
            self._blocks[at : at + 1] = [block[:middle], block[middle:]]
            self._lasts.insert(at, self._lasts[at])
            self._works.insert(at, 0.0)
            self._slacks.insert(at, 0.0)
            self._summarize(at + 1)
        self._summarize(at)

    def remove(self, time: float, serial: int) -> None:
        """Remove an item. Raises KeyError if it is not among the promises."""
        at = self._block_of((time, serial))
        block = self._blocks[at]
        index = bisect_left(block, (time, serial))
        if index == len(block) or block[index][1] != serial:
            raise KeyError(serial)
        del block[index]
        if block or len(self._blocks) == 1:
            self._summarize(at)
        else:
            del self._blocks[at], self._lasts[at], self._works[at], self._slacks[at]

    def latest_begin(self) -> float:
        """Return the latest time at which service may begin so that every item begins in time; infinite if
        empty."""
        return self._latest(0, 0.0)

    def latest_begin_with(self, time: float, work_s: float) -> float:
        """Return what `latest_begin` would return with an additional item that must begin by `time` and takes
        `work_s` seconds. Only the new item and later items are considered, because the new item does not
        delay earlier ones."""
        at = self._block_of((time, _AFTER_ALL))
        block = self._blocks[at]
        index = bisect_left(block, (time, _AFTER_ALL))
        before = sum(self._works[:at]) + sum([promise[2] for promise in block[:index]])
        work, slack = _demand(block[index:], before)
        return min(min(slack, self._latest(at + 1, work)) - work_s, time - before)

    def _block_of(self, key: tuple[float, float]) -> int:
        """Return the index of the block that contains the key or, if none does, of the block into which it
        would be inserted."""
        return min(bisect_left(self._lasts, key), len(self._blocks) - 1)

    def _latest(self, start: int, before: float) -> float:
        """Return the latest time at which service may begin so that every item in block `start` or a later
        one begins in time. `before` seconds of work precede these blocks."""
        works = accumulate(self._works[start:], initial=before)
        return min(map(sub, self._slacks[start:], works), default=float("inf"))

    def _summarize(self, at: int) -> None:
        block = self._blocks[at]
        self._works[at], self._slacks[at] = _demand(block, 0.0)
        if block:
            self._lasts[at] = block[-1][:2]


def _demand(promises: Iterable[_Promise], work: float) -> tuple[float, float]:
    """Return the total work and the minimum slack of the promises, in seconds. The total includes `work`
    seconds of preceding work. A promise's slack is its time minus all work that precedes it."""
    slack = float("inf")
    for time, _, work_s, _ in promises:
        if time - work < slack:
            slack = time - work
        work += work_s
    return work, slack
