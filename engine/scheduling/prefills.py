"""Chunks of prompts in a step (chunked prefill, as in Sarathi-Serve)."""

from __future__ import annotations

from engine.messages import BLOCK_TOKENS
from engine.plan import Chunk
from engine.scheduling.accounting import RequestAccounting
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.running import RunningSequences
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import ScheduledChunk, ScheduledStep


class PrefillScheduler:
    """Adds chunks to a step.

    A step with a chunk of an urgent submission leaves out the prompts that are not urgent, because the urgent
    one waits for the whole step. The step after that takes them, so they are never left out of two steps in a
    row.
    """

    def __init__(self, running: RunningSequences, tables: BlockTables, accounting: RequestAccounting) -> None:
        self._running = running
        self._tables = tables
        self._accounting = accounting
        self._has_urgent = False
        """Whether the step that is being planned computes an urgent prompt."""
        self._postponed_before = False
        """Whether the previous step left out prompts because of an urgent one."""

    def begin_step(self) -> None:
        self._has_urgent = False

    def end_step(self) -> None:
        self._postponed_before = self._has_urgent and not self._postponed_before

    def postpones(self, sequence: Sequence) -> bool:
        """Return whether the step leaves out this sequence's prompt because the step has an urgent one."""
        return self._has_urgent and not self._postponed_before and not sequence.submission.submit.urgent

    def schedule_chunk(self, step: ScheduledStep, sequence: Sequence, budget: int) -> int:
        """Add the next chunk of a prefill, of at most `budget` tokens. Returns the number of tokens."""
        plan, start, last = step.plan, sequence.position, sequence.prefill_end
        self._has_urgent = self._has_urgent or sequence.submission.submit.urgent
        end = min(start + budget, last)
        logprobs = next_token = None
        submit = sequence.submission.submit
        prompt = len(submit.prompt_token_ids)
        if sequence.wants_prompt_logprobs and start < prompt:
            # A chunk with prompt logprobs must not extend beyond the prompt.
            end = min(end, prompt)
            logprobs = submit.sampling.prompt_logprobs
            next_token = sequence.tokens[end] if end < prompt else None
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
        """Let a sequence whose prefill ends with this chunk, and its forks, sample from it. Returns their
        slots."""
        for fork in leader.forks:
            fork.leader = None
            self._tables.fork(leader, fork)
            self._tables.send(step.plan, fork)
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
