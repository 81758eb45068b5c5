"""Preempts running sequences. A preempted sequence loses its slot and its blocks, returns to the waiting
queue, and is recomputed later."""

from __future__ import annotations

from engine.scheduling.accounting import Totals
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.running import RunningSequences, service_order
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting import WaitingQueue


class Preemption:
    """Selects and preempts running sequences: the lowest-priority level first, and the youngest sequence
    first within a level."""

    def __init__(
        self,
        running: RunningSequences,
        waiting: WaitingQueue,
        tables: BlockTables,
        pool: BlockPool,
        totals: Totals,
    ) -> None:
        self._running = running
        self._waiting = waiting
        self._tables = tables
        self._pool = pool
        self._totals = totals

    def preempt(self, sequence: Sequence) -> None:
        """Move a running sequence and its forks back to the waiting queue."""
        sequence.submission.preemptions += 1
        self._totals.preemptions += 1
        if sequence.leader is not None:
            sequence.leader.forks.remove(sequence)
        for member in (sequence, *sequence.forks):
            self._running.release_slot(member)
            self._tables.release(member)
            member.leader = None
            self._waiting.push(member)
        sequence.forks = []

    def free_slots(self, slots: int, first_victim: int) -> None:
        """Preempt sequences of level `first_victim` and all lower-priority levels until `slots` slots have
        been freed. Forks are preempted without their leader, whose prefill continues."""
        running = self._running
        victims = running.scheduled()
        victims = [
            member
            for sequence in victims
            if sequence.level >= first_victim
            for member in (sequence, *sequence.forks)
        ]
        victims.sort(key=service_order)
        for victim in reversed(victims[max(0, len(victims) - slots) :]):
            self.preempt(victim)

    def free_blocks(self, blocks: int, first_victim: int) -> None:
        """Preempt sequences of level `first_victim` and all lower-priority levels until `blocks` blocks have
        been freed. If preempting all of them would not free enough blocks, none is preempted."""
        victims = [one for one in self._running.scheduled() if one.level >= first_victim]
        shared = {victim.shared for victim in victims if victim.shared is not None}
        if blocks > sum(len(one.table) for one in victims) + sum(len(one.blocks) for one in shared):
            return
        while victims and blocks > 0:
            available = self._pool.available
            self.preempt(victims.pop())
            blocks -= self._pool.available - available
