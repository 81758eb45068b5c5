"""Schedules the prefill chunks of a step (chunked prefill, as in Sarathi-Serve)."""

from __future__ import annotations

from engine.levels import LEVELS
from engine.messages import BLOCK_TOKENS, view_tokens
from engine.plan import Chunk
from engine.scheduling.accounting import RequestAccounting
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.running import RunningSequences
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import ScheduledChunk, ScheduledStep


class PrefillScheduler:
    """Adds prefill chunks to a step's plan.

    A step that contains a chunk skips the prompts of lower-priority levels. They would lengthen the step, and
    the chunk's submission has to wait for the whole step. To prevent starvation, a step skips no prompts in
    favour of a level L if both of the following hold:

    - The previous step skipped prompts in favour of L or of a higher-priority level.
    - L has already had its turn: a step in the current unbroken run of skipping steps skipped prompts in
      favour of L.
    """

    def __init__(self, running: RunningSequences, tables: BlockTables, accounting: RequestAccounting) -> None:
        self._running = running
        self._tables = tables
        self._accounting = accounting
        self._best = LEVELS
        """Highest-priority level among the chunks of the step being planned, or LEVELS if the step has no
        chunk yet."""
        self._left_out = False
        """Whether the step being planned has skipped a prompt."""
        self._left_out_for = LEVELS
        """If the previous step skipped a prompt, the highest-priority level among that step's chunks.
        Otherwise LEVELS."""
        self._left_out_for_since = 0
        """The levels in whose favour prompts have been skipped since the last step that skipped no prompt.
        Bit `l` represents level `l`."""

    def begin_step(self) -> None:
        self._best, self._left_out = LEVELS, False

    def end_step(self) -> None:
        if self._left_out:
            self._left_out_for = self._best
            self._left_out_for_since |= 1 << self._best
        else:
            self._left_out_for, self._left_out_for_since = LEVELS, 0

    def leaves_out(self, sequence: Sequence) -> bool:
        """Return whether the step skips this sequence's prompt because it already contains a chunk of a
        prompt with a higher priority."""
        again = self._left_out_for <= self._best and self._left_out_for_since >> self._best & 1
        if sequence.level <= self._best or again:
            return False
        self._left_out = True
        return True

    def schedule_chunk(self, step: ScheduledStep, sequence: Sequence, budget: int) -> int:
        """Add the next chunk of a prefill, with at most `budget` tokens. Returns the number of tokens
        added."""
        plan, start, last = step.plan, sequence.position, sequence.prefill_end
        self._best = min(self._best, sequence.level)
        end = min(start + budget, last)
        logprobs = next_token = None
        submit = sequence.submission.submit
        prompt = submit.prompt_tokens
        if sequence.wants_prompt_logprobs and start < prompt:
            # A chunk with prompt log probabilities must not extend beyond the prompt.
            end = min(end, prompt)
            logprobs = submit.sampling.prompt_logprobs
            next_token = view_tokens(submit.prompt)[end] if end < prompt else None
        sample_slots = []
        if end == last:
            del self._running.prefilling[sequence.slot]
            if sequence.samples:
                sample_slots = self._begin_decoding(step, sequence, end)
        self._tables.send(plan, sequence)
        plan.chunks.append(
            Chunk(sequence.slot, start, sequence.tokens[start:end], sample_slots, logprobs, next_token)
        )
        step.chunks.append(ScheduledChunk(sequence, sequence.slot, start, end, samples=bool(sample_slots)))
        sequence.position = end
        sequence.in_flight += 1
        self._accounting.credit(sequence.submission, end)
        self._accounting.totals.computed_tokens += end - start
        return end - start

    def _begin_decoding(self, step: ScheduledStep, leader: Sequence, end: int) -> list[int]:
        """Start decoding a sequence and its forks. Called when their prefill ends with this chunk. Returns
        the slots that sample from the chunk."""
        for fork in leader.forks:
            fork.leader = None
        if leader.forks:
            self._tables.fork(step.plan, leader, leader.forks, end)
        group = [leader, *leader.forks]
        leader.forks = []
        for sequence in group:
            # The last block is shared and not writable yet. `BlockTables.make_writable` copies it before the
            # first decode.
            writable = end if len(group) > 1 else sequence.block_count * BLOCK_TOKENS
            sequence.position = end
            sequence.next_allocation = min(writable, sequence.limit - 1)
            sequence.in_flight += 1
            set_next_check(sequence)
            self._running.decoding[sequence.slot] = sequence
        step.sampling.extend(group)
        return [sequence.slot for sequence in group]


def set_next_check(sequence: Sequence) -> None:
    """Set `next_check` to the next length at which a block fills up or the sequence reaches its limit."""
    full = (len(sequence.tokens) - 1) // BLOCK_TOKENS
    sequence.next_check = min((full + 1) * BLOCK_TOKENS + 1, sequence.limit)
