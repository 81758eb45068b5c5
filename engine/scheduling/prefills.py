"""Chunks of prompts in a step (chunked prefill, as in Sarathi-Serve)."""

from __future__ import annotations

from engine.messages import BLOCK_TOKENS, LEVELS
from engine.plan import Chunk
from engine.scheduling.accounting import RequestAccounting
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.running import RunningSequences
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import ScheduledChunk, ScheduledStep


class PrefillScheduler:
    """Adds chunks to a step.

    A step that contains a chunk leaves out the prompts of worse levels, because the chunk's submission waits
    for the whole step. To prevent starvation, they are not left out if the previous step already left out
    prompts for the same level or a better one. So prompts are left out of at most as many consecutive steps
    as there are better levels.
    """

    def __init__(self, running: RunningSequences, tables: BlockTables, accounting: RequestAccounting) -> None:
        self._running = running
        self._tables = tables
        self._accounting = accounting
        self._best = LEVELS
        """The best level of the chunks of the step that is being planned; LEVELS if it has none."""
        self._left_out = False
        """Whether the step that is being planned left out a prompt."""
        self._left_out_for = LEVELS
        """The best level of the previous step if that step left out a prompt; otherwise LEVELS."""

    def begin_step(self) -> None:
        self._best, self._left_out = LEVELS, False

    def end_step(self) -> None:
        self._left_out_for = self._best if self._left_out else LEVELS

    def leaves_out(self, sequence: Sequence) -> bool:
        """Return whether the step leaves out this sequence's prompt because the step has a prompt of a better
        level."""
        if sequence.level <= self._best or self._left_out_for <= self._best:
            return False
        self._left_out = True
        return True

    def schedule_chunk(self, step: ScheduledStep, sequence: Sequence, budget: int) -> int:
        """Add the next chunk of a prefill, of at most `budget` tokens. Returns the number of tokens."""
        plan, start, last = step.plan, sequence.position, sequence.prefill_end
        self._best = min(self._best, sequence.level)
        end = min(start + budget, last)
        logprobs = next_token = None
        submit = sequence.submission.submit
        prompt = len(submit.prompt_token_ids)
        if sequence.wants_prompt_logprobs and start < prompt:
            # A chunk with prompt logprobs must not extend beyond the prompt.
            end = min(end, prompt)
            logprobs = submit.sampling.prompt_logprobs
            next_token = submit.prompt_token_ids[end] if end < prompt else None
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
        """Let the sequence, whose prefill ends with this chunk, and its forks sample from the chunk. Returns
        their slots."""
        for fork in leader.forks:
            fork.leader = None
        if leader.forks:
            self._tables.fork(step.plan, leader, leader.forks, end)
        group = [leader, *leader.forks]
        leader.forks = []
        for sequence in group:
            # A shared last block is not writable yet; `BlockTables.make_writable` copies it before the first
            # decode.
            writable = end if len(group) > 1 else len(sequence.table) * BLOCK_TOKENS
            sequence.position = end
            sequence.next_allocation = min(writable, sequence.limit - 1)
            sequence.in_flight += 1
            set_next_check(sequence)
            self._running.decoding[sequence.slot] = sequence
        step.sampling.extend(group)
        return [sequence.slot for sequence in group]


def set_next_check(sequence: Sequence) -> None:
    """Set the length at which the next token fills a block or reaches the sequence's limit."""
    full = (len(sequence.tokens) - 1) // BLOCK_TOKENS
    sequence.next_check = min((full + 1) * BLOCK_TOKENS + 1, sequence.limit)
