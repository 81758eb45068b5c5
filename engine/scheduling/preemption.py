"""Preemption: takes the slot and the blocks of a running sequence, which then waits and is recomputed
later."""

from __future__ import annotations

from engine.scheduling.accounting import Totals
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.running import RunningSequences
from engine.scheduling.sequence import Sequence
from engine.scheduling.waiting import WaitingQueue


class Preemption:
    """Chooses and preempts victims: the worst level first, and the youngest sequence of it first."""

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

    def preempt_worse(self, slots: int, worse_for_slots: int, blocks: int, worse_for_blocks: int) -> None:
        """Preempt sequences of worse levels than `worse_for_slots` until `slots` slots have been freed, and
        of worse levels than `worse_for_blocks` until `blocks` blocks have been freed.

        If preempting all of them would not free enough blocks, only slots are considered.
        """
        victims = self._running.scheduled()
        if blocks > sum(len(victim.table) for victim in victims if victim.level > worse_for_blocks):
            blocks = 0
        while victims and (
            (slots > 0 and victims[-1].level > worse_for_slots)
            or (blocks > 0 and victims[-1].level > worse_for_blocks)
        ):
            victim = victims.pop()
            slots -= 1 + len(victim.forks)
            available = self._pool.available
            self.preempt(victim)
            blocks -= self._pool.available - available
