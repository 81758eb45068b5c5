"""Preempts running sequences. A preempted sequence loses its slot and blocks, waits, and is recomputed
later."""

from __future__ import annotations

from engine.levels import TIERS
from engine.scheduling.accounting import Totals
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.running import RunningSequences
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting import WaitingQueue


class Preemption:
    """Selects and preempts running sequences. The lowest-priority level is preempted first, and within a
    level the youngest sequence."""

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
        for member in (sequence, *sequence.forks):
            self._running.release_slot(member)
            self._tables.release(member)
            member.leader = None
            self._waiting.push(member)
        sequence.forks = []

    def reclaim(self, slots: int, level: int) -> None:
        """Preempt sequences of lower-priority levels than `level` that are not urgent, until `slots` slots
        have been freed."""
        if slots <= 0:
            return
        victims = [one for one in self._running.scheduled() if one.level > level and TIERS[one.level]]
        while victims and slots > 0:
            victim = victims.pop()
            slots -= 1 + len(victim.forks)
            self.preempt(victim)

    def preempt_worse(self, slots: int, first_for_slots: int, blocks: int, first_for_blocks: int) -> None:
        """Preempt low-priority sequences to free slots and blocks.

        Sequences from level `first_for_slots` on are preempted until `slots` slots have been freed. Sequences
        from level `first_for_blocks` on are preempted until `blocks` blocks have been freed, but only if
        preempting all of them would free enough blocks.
        """
        if slots <= 0 and blocks <= 0:
            return
        victims = self._running.scheduled()
        worse = [victim for victim in victims if victim.level >= first_for_blocks]
        shared = {victim.shared for victim in worse if victim.shared is not None}
        if blocks > sum(len(holder.table) for holder in worse) + sum(len(one.blocks) for one in shared):
            blocks = 0
        while victims and (
            (slots > 0 and victims[-1].level >= first_for_slots)
            or (blocks > 0 and victims[-1].level >= first_for_blocks)
        ):
            victim = victims.pop()
            slots -= 1 + len(victim.forks)
            available = self._pool.available
            self.preempt(victim)
            blocks -= self._pool.available - available
