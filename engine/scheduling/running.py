"""The running sequences of a replica, and the slots of the device tables that they hold."""

from __future__ import annotations

from operator import attrgetter

from engine.messages import LEVELS
from engine.scheduling.sequence import Sequence

service_order = attrgetter("order")
"""Sort key: the sequence to serve first comes first, the one to preempt first comes last."""


class RunningSequences:
    """Sequence slots and their owners.

    A running sequence decodes (`decoding`), is in prefill (`prefilling`), or is in neither: a fork that waits
    for its leader's prefill, or a sequence whose last token has been launched.
    """

    def __init__(self, slots: int) -> None:
        self.owners: list[Sequence | None] = [None] * slots
        """The sequence in each slot."""
        self.free_slots = list(range(slots - 1, -1, -1))
        self.decoding: dict[int, Sequence] = {}
        """By slot: sequences that get one token in each step."""
        self.prefilling: dict[int, Sequence] = {}
        """By slot: sequences whose prefill is not complete."""
        self._by_level = [0] * LEVELS

    def __len__(self) -> int:
        return len(self.owners) - len(self.free_slots)

    @property
    def worst_level(self) -> int:
        """The last level of service that has a running sequence; -1 if none runs."""
        return max((level for level, count in enumerate(self._by_level) if count), default=-1)

    def assign_slot(self, sequence: Sequence) -> None:
        """Give a sequence a free slot; its entries in the device's block table are not valid yet."""
        slot = sequence.slot = self.free_slots.pop()
        self.owners[slot] = sequence
        self._by_level[sequence.level] += 1
        sequence.sent_blocks = 0

    def release_slot(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self.decoding.pop(slot, None)
        self.prefilling.pop(slot, None)
        self.owners[slot] = None
        self._by_level[sequence.level] -= 1
        self.free_slots.append(slot)
        sequence.slot = -1

    def scheduled(self) -> list[Sequence]:
        """Return the sequences that decode or are in prefill, in their order of service."""
        return sorted([*self.decoding.values(), *self.prefilling.values()], key=service_order)
