"""Admits waiting sequences: assigns slots and KV blocks to them and starts their prefills."""

from __future__ import annotations

from engine.levels import FIRST_VICTIMS, FITS_STEP, LEVELS, level_of
from engine.messages import BLOCK_TOKENS
from engine.plan import StepPlan
from engine.scheduling.accounting import Totals
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.preemption import Preemption
from engine.scheduling.prefills import PrefillScheduler
from engine.scheduling.running import RunningSequences
from engine.scheduling.sequence import Sequence, blocks_for, setup_numbers, setup_of
from engine.scheduling.step import ScheduledStep
from engine.scheduling.waiting import WaitingQueue

MAX_SETUP_NUMBERS = 1 << 20
"""Maximum total size of the setups in one step, counted in token ids. A larger setup gets a step to itself.
Setups are sent to the other ranks as part of the plan, and the device waits for the plan. At 5 bytes per id,
the limit is 5 MiB."""

MAX_TABLE_ENTRIES = 4096
"""Maximum number of block table entries in one step. Once a step exceeds this number, it admits no more
sequences. When a long prompt is in the prefix cache, its resumed samples have few tokens to compute, but each
needs one entry for every block of the prompt. Without this limit, 128 samples of 131,000 tokens would add
260,000 entries to one step, which would take 0.4 s."""


class Admission:
    """Starts waiting sequences.

    All blocks for a sequence's prefill are allocated on admission, so only decodes can run out of blocks. As
    many of a submission's samples as fit are started together. One sample, the leader, computes the prompt.
    The other samples, its forks, only occupy slots until the prefill ends, and then share the leader's
    blocks. Samples that do not fit remain in the waiting queue as separate sequences. By the time they are
    admitted, their prompt is in the prefix cache.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSequences,
        tables: BlockTables,
        pool: BlockPool,
        prefills: PrefillScheduler,
        preemption: Preemption,
        totals: Totals,
        watermark: int,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._tables = tables
        self._pool = pool
        self._prefills = prefills
        self._preemption = preemption
        self._totals = totals
        self._watermark = watermark
        self._setup_numbers = 0
        """Total size of the setups in the step being planned, counted in token ids."""
        self._started: list[Sequence] = []
        """Sequences admitted for the first time in the step being planned."""
        self._blocked: tuple[Sequence, int] | None = None
        """The last sequence that did not fit, and the value that `BlockPool.gains` must reach before that
        sequence is tried again."""

    def begin_step(self) -> None:
        self._setup_numbers = 0

    def admit(self, step: ScheduledStep, budget: int, better_than: int = LEVELS) -> int:
        """Start waiting sequences in order until one does not fit. Returns the number of scheduled tokens.

        Considers only levels with a higher priority (lower number) than `better_than`. If all free slots are
        reserved for higher priorities, a waiting sequence delays only other sequences of its own level.
        """
        given = budget
        for level in range(better_than):
            while (
                budget
                and (first := self._waiting.first(level)) is not None
                and self._running.free_for(level) > 0
            ):
                if not self._try_to_start(step, first):
                    return given - budget
                budget -= self._prefills.schedule_chunk(step, first, budget)
        return given - budget

    def _try_to_start(self, step: ScheduledStep, sequence: Sequence) -> bool:
        """Start a sequence, and as many of its forks as fit, if the step and the block pool have enough
        capacity. Returns True if the sequence was started."""
        # A preempted sequence can be recomputed only once the tokens from its steps in flight are known.
        if sequence.in_flight or not self._may_fit(sequence):
            return False
        if self._prefills.leaves_out(sequence) or not self._fits_plan(step.plan, sequence):
            return False
        hits = self._take_blocks(sequence)
        if hits is None:
            return False
        for member in (sequence, *sequence.forks):
            self._start(member, hits * BLOCK_TOKENS)
        step.plan.setups.append(setup_of(sequence))
        self._setup_numbers += setup_numbers(sequence)
        self._running.prefilling[sequence.slot] = sequence
        return True

    def preempt_for_better(self) -> None:
        """Preempt running sequences if the first waiting sequence lacks a slot or blocks."""
        head = self._waiting.peek()
        if head is not None and not head.in_flight:
            self._preempt_for_slots(head.level)
            if self._running.free_for(head.level) > 0:
                self._preempt_for_blocks(head)

    def _preempt_for_slots(self, level: int) -> None:
        """Free slots for the waiting sequences of this level and of any other level that may preempt the same
        running sequences (`engine.levels`)."""
        victim = FIRST_VICTIMS[level]
        if self._running.worst_level < victim:
            return
        waiting = sum(
            self._waiting.length(other) for other in range(level, victim) if FIRST_VICTIMS[other] == victim
        )
        lacking = waiting - self._running.free_for(level)
        if lacking > 0:
            self._preemption.free_slots(lacking, victim)

    def _preempt_for_blocks(self, sequence: Sequence) -> None:
        """Free blocks for a waiting sequence by preempting sequences of lower-priority classes. Sequences of
        the same class but a lower-priority level are preempted too, unless the waiting sequence is urgent and
        its request's prompts do not fit into one step."""
        long = 0 < sequence.submission.submit.urgency < FITS_STEP
        worse_than = level_of(sequence.priority, 0) if long else sequence.level
        if self._running.worst_level > worse_than:
            _, needed, available = self._demand(sequence)
            if needed > available:
                self._preemption.free_blocks(needed - available, worse_than + 1)

    def note_batch_size(self, plan: StepPlan) -> None:
        """Record the step's batch size (its number of sequences) in each sequence that starts in this
        step."""
        if not self._started:
            return
        size = len(plan.decodes) + sum(max(1, len(chunk.sample_slots)) for chunk in plan.chunks)
        for sequence in self._started:
            sequence.batch_size = size
            if not sequence.submission.batch_size:
                sequence.submission.batch_size = size
        self._started.clear()

    def _may_fit(self, sequence: Sequence) -> bool:
        """Return False if the sequence did not fit earlier and too few blocks have been freed or cached
        since."""
        if self._blocked is None or not len(self._running):
            return True
        blocked, gains = self._blocked
        return blocked is not sequence or self._pool.gains >= gains

    def _fits_plan(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Return whether the step's plan has enough space for the sequence's setup and block table entries.
        The step's first sequence always fits."""
        planned = self._setup_numbers
        if planned and planned + setup_numbers(sequence) > MAX_SETUP_NUMBERS:
            return False
        entries = len(plan.blocks) + blocks_for(sequence.prefill_end)
        return not plan.setups or entries <= MAX_TABLE_ENTRIES

    def _demand(self, sequence: Sequence) -> tuple[list[int], int, int]:
        """Return a prefill's cached blocks, the number of additional blocks it needs, and the number of
        available blocks, excluding those reserved for running sequences (the watermark)."""
        hits, needed, available = self._tables.find(sequence)
        # With no sequence running, no blocks are reserved, so every validated sequence fits into the pool.
        return hits, needed, available - (self._watermark if len(self._running) else 0)

    def _take_blocks(self, sequence: Sequence) -> int | None:
        """Allocate cached or new blocks for a prefill and attach as many forks as fit.

        Returns the number of cached blocks. Returns None, and allocates nothing, if the sequence does not
        fit.
        """
        hits, needed, available = self._demand(sequence)
        if needed > available:
            self._blocked = (sequence, self._pool.gains + needed - available)
            return None
        self._blocked = None
        # Each fork will soon need one block: for its next token, or for a copy of the last block if that
        # block is only partly filled.
        sequence.forks = self._choose_forks(sequence, available - needed)
        for fork in sequence.forks:
            fork.leader = sequence
        self._tables.take(sequence, hits, needed)
        return len(hits)

    def _choose_forks(self, sequence: Sequence, limit: int) -> list[Sequence]:
        """Return samples of the leader's submission that are waiting and have never been started. Returns at
        most `limit` samples, and no more than there are free slots."""
        limit = min(limit, self._running.free_for(sequence.level) - 1)
        forks: list[Sequence] = []
        if sequence.started or limit <= 0:
            return forks
        for other in sequence.submission.sequences:
            if other is not sequence and other.entry is not None and not other.started:
                forks.append(other)
                if len(forks) == limit:
                    break
        return forks

    def _start(self, sequence: Sequence, cached: int) -> None:
        """Move a sequence from the waiting queue to a slot."""
        self._waiting.remove(sequence)
        self._running.assign_slot(sequence)
        submission = sequence.submission
        prompt = submission.submit.prompt_tokens
        if not sequence.started:
            sequence.started = True
            sequence.cached_tokens = min(cached, prompt)
            self._started.append(sequence)
        if not submission.started:
            submission.started = True
            submission.cached_tokens = sequence.cached_tokens
            self._totals.prompt_tokens += prompt
            self._totals.cached_tokens += sequence.cached_tokens
