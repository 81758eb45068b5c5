"""The running sequences of a replica, and their slots in the device tables."""

from __future__ import annotations

from operator import attrgetter

from engine.levels import LEVELS, TIERS, kept_free
from engine.scheduling.sequence import Sequence

service_order = attrgetter("order")
"""Sort key of running sequences. In this order, the first sequence is served first, and the last sequence is
preempted first."""


class RunningSequences:
    """The sequence slots of a replica, and the sequences that occupy them.

    A running sequence is usually decoding (`decoding`) or in prefill (`prefilling`). Two kinds of running
    sequences are in neither state: forks waiting for their leader's prefill, and sequences whose last
    sampling step has been launched.
    """

    def __init__(self, slots: int) -> None:
        self.owners: list[Sequence | None] = [None] * slots
        """The sequence in each slot, or None."""
        self.free_slots = list(range(slots - 1, -1, -1))
        self.decoding: dict[int, Sequence] = {}
        """Sequences that get one token per step, keyed by slot."""
        self.prefilling: dict[int, Sequence] = {}
        """Sequences with an incomplete prefill, keyed by slot."""
        self.by_level = [0] * LEVELS
        """Number of running sequences at each level."""
        self.reserved_slots = 0
        """Number of slots reserved for urgent sequences."""

    def __len__(self) -> int:
        return len(self.owners) - len(self.free_slots)

    @property
    def worst_level(self) -> int:
        """The lowest-priority level with a running sequence, or -1 if none is running."""
        return max((level for level, count in enumerate(self.by_level) if count), default=-1)

    def free_for(self, level: int) -> int:
        """Return the number of free slots available to sequences of this level. The result is negative if
        reserved slots are in use."""
        return len(self.free_slots) - kept_free(TIERS[level], self.reserved_slots)

    def assign_slot(self, sequence: Sequence) -> None:
        """Assign a free slot to a sequence. The slot's entries in the device's block table are not valid
        yet."""
        slot = sequence.slot = self.free_slots.pop()
        self.owners[slot] = sequence
        self.by_level[sequence.level] += 1
        sequence.sent_blocks = 0

    def release_slot(self, sequence: Sequence) -> None:
        slot = sequence.slot
        self.decoding.pop(slot, None)
        self.prefilling.pop(slot, None)
        self.owners[slot] = None
        self.by_level[sequence.level] -= 1
        self.free_slots.append(slot)
        sequence.slot = -1

    def scheduled(self) -> list[Sequence]:
        """Return the decoding and prefilling sequences, in service order."""
        return sorted([*self.decoding.values(), *self.prefilling.values()], key=service_order)
