"""The order in which the waiting requests of one model get their turn."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, TypeVar

from store.policies import CLASSES

Item = TypeVar("Item")


class RequestQueue(Generic[Item]):
    """Waiting requests: the highest class first, inside a class in order of arrival.

    Fair share between tenants has its place here: it replaces the order inside a class, and nothing else
    knows that order. All operations take constant time.
    """

    def __init__(self) -> None:
        self._classes: list[OrderedDict[str, Item]] = [OrderedDict() for _ in range(CLASSES)]

    def __len__(self) -> int:
        return sum(map(len, self._classes))

    def __iter__(self) -> Iterator[Item]:
        """In the order of their turn. The queue must not change meanwhile."""
        for waiting in self._classes:
            yield from waiting.values()

    def push(self, request_id: str, item: Item, request_class: int, *, first: bool = False) -> None:
        """`first` is for a request that had its turn already and lost its replica: its client is waiting in
        the middle of an answer."""
        waiting = self._classes[request_class]
        waiting[request_id] = item
        if first:
            waiting.move_to_end(request_id, last=False)

    def remove(self, request_id: str, request_class: int) -> None:
        """Raises KeyError for a request that does not wait."""
        del self._classes[request_class][request_id]
