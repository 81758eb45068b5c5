"""Schedules the decodes of a step. Each decoding sequence gets one token, and a new block if its last one is
full."""

from __future__ import annotations

from engine.plan import StepPlan
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.preemption import Preemption
from engine.scheduling.running import RunningSequences, service_order
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import ScheduledStep


class DecodeScheduler:
    """Adds the decodes to a step's plan."""

    def __init__(self, running: RunningSequences, tables: BlockTables, preemption: Preemption) -> None:
        self._running = running
        self._tables = tables
        self._preemption = preemption

    def schedule(self, step: ScheduledStep) -> bool:
        """Add a decode for every decoding sequence, and return whether any sequence was preempted to free
        blocks."""
        preempted = False
        decoding = self._running.decoding
        due = [sequence for sequence in decoding.values() if sequence.position == sequence.next_allocation]
        if due:
            preempted = self._allocate(step.plan, due)
        for sequence in decoding.values():
            sequence.position += 1
            sequence.in_flight += 1
        step.plan.decodes.extend(decoding)
        step.sampling.extend(decoding.values())
        return preempted

    def _allocate(self, plan: StepPlan, due: list[Sequence]) -> bool:
        """Make the next position of each sequence in `due` writable, or stop decoding the sequence if the
        step that samples its last token has already been launched."""
        needy = []
        for sequence in due:
            if sequence.position >= sequence.limit - 1:
                del self._running.decoding[sequence.slot]
            else:
                needy.append(sequence)
        if not needy:
            return False
        needy.sort(key=service_order)
        # Blocks are assigned in service order and sequences are preempted in reverse order, so a preempted
        # sequence has received no block in this plan.
        victims: list[Sequence] | None = None
        for sequence in needy:
            while sequence.slot >= 0 and not self._tables.make_writable(plan, sequence):
                if victims is None:
                    victims = self._running.scheduled()
                self._preemption.preempt(victims.pop())
        return victims is not None
