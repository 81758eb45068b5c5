"""Processes step results: creates outputs from sampled tokens and ends sequences."""

from __future__ import annotations

from collections import deque

from engine.messages import FinishReason, Output
from engine.plan import BAD_TOKEN, StepTokens
from engine.scheduling.accounting import RequestAccounting
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.prefills import set_next_check
from engine.scheduling.running import RunningSequences
from engine.scheduling.sequence import Sequence
from engine.scheduling.step import ScheduledChunk, ScheduledStep
from engine.scheduling.waiting import WaitingQueue

MAX_RELEASED = 16_384
"""Once this many blocks have been released, the remaining cancellations are postponed to the next step.
Releasing this many takes about 1 ms. Without the limit, cancelling 128 resumed samples of 131,000 tokens
would release 260,000 blocks at once, and no step could be launched in the meantime."""


class ResultCollector:
    """Assigns step results to the sequences and ends sequences."""

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSequences,
        tables: BlockTables,
        accounting: RequestAccounting,
    ) -> None:
        self._waiting = waiting
        self._running = running
        self._tables = tables
        self._accounting = accounting
        self._cancelled: deque[Sequence] = deque()
        """Sequences waiting to be cancelled."""
        self._released = 0
        """Number of blocks released by cancellations since the last step was planned."""

    def collect(self, step: ScheduledStep, tokens: StepTokens) -> None:
        """Assign a step's results to its sequences. Steps must be collected in the order in which they were
        scheduled."""
        for chunk in step.chunks:
            self._collect_chunk(chunk, tokens)
        emit, logprobs = self._accounting.emit, tokens.logprobs
        generated = 0
        for index, (sequence, token) in enumerate(zip(step.sampling, tokens.token_ids, strict=True)):
            sequence.in_flight -= 1
            if sequence.finish_reason:
                continue
            if token == BAD_TOKEN:
                self._fail_non_finite(sequence, len(sequence.tokens))
                continue
            generated += 1
            sequence_tokens = sequence.tokens
            sequence.finite = sequence_tokens.length
            sequence_tokens.append(token)
            finish_reason: FinishReason = ""
            if token in sequence.stops or sequence_tokens.length >= sequence.next_check:
                finish_reason = self._check(sequence, token)
            submission = sequence.submission
            output = Output(submission.submit.handle, sequence.sample, [token], finish_reason)
            if logprobs is not None:
                entry = logprobs[index]
                output.logprobs = None if entry is None else [entry]
            if not sequence.announced:
                _announce(sequence, output)
            emit(submission.origin, output)
            if finish_reason:
                self._release(sequence, finish_reason)
        self._accounting.totals.generated_tokens += generated

    def end(self, sequence: Sequence, finish_reason: FinishReason, error: str | None = None) -> None:
        """End a sequence without a new token. Its last output contains no tokens."""
        submission = sequence.submission
        output = Output(submission.submit.handle, sequence.sample, [], finish_reason, error=error)
        if not sequence.announced:
            _announce(sequence, output)
        self._accounting.emit(submission.origin, output)
        self._release(sequence, finish_reason)

    def begin_step(self) -> None:
        """Cancel the sequences whose cancellation was postponed by earlier calls to `cancel`."""
        self._released = 0
        self._cancel_some()

    def cancel(self, sequences: list[Sequence]) -> None:
        """Cancel sequences of one submission, skipping those that have already ended. If more than
        MAX_RELEASED blocks have been released since the last step was planned, the remaining sequences are
        cancelled in later steps."""
        # End the forks before their leader. Otherwise, the leader's prefill would be passed from fork to
        # fork.
        self._cancelled.extend(reversed(sequences))
        self._cancel_some()

    def _cancel_some(self) -> None:
        # Waiting sequences have no blocks, so they can be cancelled even if no steps are planned.
        while self._cancelled and (self._released <= MAX_RELEASED or not self._cancelled[0].table):
            sequence = self._cancelled.popleft()
            if not sequence.finish_reason:
                self._released += len(sequence.table)
                self.end(sequence, "cancelled")

    def _collect_chunk(self, chunk: ScheduledChunk, tokens: StepTokens) -> None:
        sequence = chunk.sequence
        sequence.in_flight -= 1
        if sequence.finish_reason:
            return
        if chunk.slot in tokens.non_finite:
            # End the forks before their leader. Otherwise, the leader's prefill would be passed from fork to
            # fork.
            for member in (*reversed(sequence.forks), sequence):
                self._fail_non_finite(member, chunk.end)
            return
        if sequence.slot >= 0:
            if not chunk.samples:
                sequence.finite = chunk.end
            self._tables.register(sequence, chunk.end)
        # A result is identified by its slot in the plan. It is valid even if the sequence has been preempted
        # since.
        scores = tokens.prompt_logprobs.get(chunk.slot)
        if scores is not None and sequence.prompt_logprobs is not None:
            # The first of the new log probabilities belongs to the token at position start + 1. The sequence
            # already has the log probabilities of recomputed tokens.
            sequence.prompt_logprobs.extend(scores[len(sequence.prompt_logprobs) - chunk.start - 1 :])
        if not sequence.samples and not sequence.wants_prompt_logprobs:
            self.end(sequence, "length")

    def _check(self, sequence: Sequence, token: int) -> FinishReason:
        """Check whether a new token ends the sequence, and update the blocks that the token may fill. Returns
        the finish reason, or "" if the sequence continues."""
        if sequence.slot >= 0:
            # The newest token's keys and values have not been computed yet.
            self._tables.register(sequence, len(sequence.tokens) - 1)
            set_next_check(sequence)
        # Check min_tokens here too: the sampler suppresses stop tokens, but other runners might not.
        if token in sequence.stops and (
            sequence.output_tokens > sequence.submission.submit.sampling.min_tokens
        ):
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.limit else ""

    def _fail_non_finite(self, sequence: Sequence, position: int) -> None:
        """End a sequence that computed NaN or infinity at `position`, and remove the blocks that may contain
        these values from the prefix cache."""
        self._tables.mark_non_finite(sequence)
        self.end(
            sequence,
            "error",
            f"the model computed NaN or infinity at position {position}, so no token can be sampled. "
            "Possible causes: a damaged checkpoint, a dtype whose range is too small, or logit_bias, "
            "allowed_token_ids and bad_words that together ban every token",
        )

    def _release(self, sequence: Sequence, finish_reason: FinishReason) -> None:
        """Set a sequence's finish reason and free its slot and blocks."""
        sequence.finish_reason = finish_reason
        if sequence.entry is not None:
            self._waiting.remove(sequence)
        if sequence.leader is not None:
            sequence.leader.forks.remove(sequence)
            sequence.leader = None
        if sequence.forks:
            self._promote_fork(sequence)
        if sequence.slot >= 0:
            self._running.release_slot(sequence)
            self._tables.release(sequence)
        self._accounting.end_sample(sequence)

    def _promote_fork(self, leader: Sequence) -> None:
        """If a leader ends early, pass its prefill to its first fork, which becomes the leader of the other
        forks."""
        successor, *rest = leader.forks
        successor.leader, successor.forks = None, rest
        for fork in rest:
            fork.leader = successor
        successor.table, leader.table = leader.table, []
        successor.position, successor.finite = leader.position, leader.finite
        successor.registered, successor.sent_blocks = leader.registered, 0
        self._running.prefilling[successor.slot] = successor
        leader.position, leader.forks = 0, []


def _announce(sequence: Sequence, output: Output) -> None:
    """Set the output fields that are sent only with a sample's first output."""
    sequence.announced = True
    output.cached_tokens = sequence.cached_tokens
    if sequence.prompt_logprobs is not None and not sequence.wants_prompt_logprobs:
        output.prompt_logprobs = sequence.prompt_logprobs
