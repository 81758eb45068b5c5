"""Preemption: a running sequence loses its slot and its blocks, waits, and is recomputed later."""

from __future__ import annotations

from engine.scheduling.accounting import Totals
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.running import RunningSequences
from engine.scheduling.sequence import BACKGROUND, Sequence
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

    def preempt_worse(self, level: int, slots: int, blocks: int) -> None:
        """Preempt sequences of worse levels than `level` until `blocks` blocks have been freed, and
        background sequences until `slots` slots have been freed.

        If preempting all of them would not free enough blocks, only slots are considered.
        """
        victims = [sequence for sequence in self._running.scheduled() if sequence.level > level]
        if blocks > sum(len(victim.table) for victim in victims):
            blocks = 0
        while victims and (blocks > 0 or (slots > 0 and victims[-1].priority == BACKGROUND)):
            victim = victims.pop()
            slots -= 1 + len(victim.forks)
            available = self._pool.available
            self.preempt(victim)
            blocks -= self._pool.available - available
