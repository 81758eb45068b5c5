"""Defines the scheduler. It decides which sequences run in each step, within a token budget, and returns the
step's plan as a `StepPlan`.

A submission's *level* combines its priority class (`priority`) and its urgency within the class. A step is
planned in this order:

0. *Preemption for higher priorities.* If the first waiting sequence lacks blocks, running sequences of
   lower-priority levels are preempted, but only if that frees enough blocks. The youngest sequence of the
   lowest-priority level is preempted first. If the waiting sequence lacks a slot, sequences of lower-priority
   classes are preempted. An urgent waiting sequence also preempts sequences of its own class that are not
   urgent (`engine.levels`).
1. *Decodes.* Every decoding sequence gets one token. If a decode lacks a block, the youngest running
   sequence of the lowest-priority level is preempted: its blocks are freed, and it is recomputed later. The
   oldest sequence of the highest-priority level is never preempted, so the engine always makes progress.
2. *Running prefills.* Prompts that have been started get their next chunks, in service order, up to the token
   budget (chunked prefill, as in Sarathi-Serve). A step with decodes has the smaller budget
   `max_mixed_tokens`, because every decode has to wait for the step's prompts. A submission is admitted
   before the next chunk of a lower-priority prompt is scheduled. The step that admits it skips prompts of
   lower-priority levels, but two consecutive steps never skip prompts in favour of the same level.
3. *Admissions.* Sequences are admitted by level and then by arrival, so preempted sequences precede new
   ones. A sequence does not use slots that are reserved for urgent ones (`Submit.reserved_slots`). The
   first waiting sequence waits for a slot, for blocks for its whole prefill, and for the watermark of free
   blocks. No later sequence is admitted before it, even if that sequence needs fewer blocks, so long prompts
   do not starve. If decodes preempted a sequence in this step, no sequence is admitted.

Later steps may be planned before the results of a step are collected; `engine.core` determines how many. A
sequence's `position` is therefore ahead of its known tokens, and a token may be sampled for a sequence that
has already ended. A preempted sequence is readmitted only after its results in flight have been collected.
Plans are executed in order, so a freed slot or block can be reused in the next plan.
"""

from __future__ import annotations

import time
from collections.abc import Hashable

from engine.levels import LEVELS
from engine.messages import Submit
from engine.plan import StepPlan, StepTokens
from engine.scheduling.accounting import RequestAccounting
from engine.scheduling.admission import Admission
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tables import BlockTables
from engine.scheduling.decodes import DecodeScheduler
from engine.scheduling.invariants import check_consistency
from engine.scheduling.preemption import Preemption
from engine.scheduling.prefills import PrefillScheduler
from engine.scheduling.results import ResultCollector
from engine.scheduling.running import RunningSequences, service_order
from engine.scheduling.sequence import finished_on_arrival, new_submission
from engine.scheduling.step import ScheduledStep
from engine.scheduling.validation import SequenceLimits, refusal
from engine.scheduling.waiting import WaitingQueue

MAX_MIXED_TOKENS = 4096
"""Upper limit for the default value of `max_mixed_tokens`. This many tokens saturate a large GPU. With an 8B
model in bfloat16, such a step takes about 0.1 s on an H200."""


def default_mixed_tokens(max_num_seqs: int, max_num_batched_tokens: int) -> int:
    """Return the default value of `max_mixed_tokens`."""
    return max(max_num_seqs, min(max_num_batched_tokens // 2, MAX_MIXED_TOKENS))


class Scheduler:
    """Plans steps and collects their results. It is single-threaded, and no method blocks.

    `max_num_seqs` is the maximum number of running sequences, and `blocks` the number of blocks in the KV
    pool. `max_num_batched_tokens` is the token budget of a step. `max_mixed_tokens` is the token budget of a
    step with decodes, including the decodes. Its default is half of `max_num_batched_tokens`, but at most
    MAX_MIXED_TOKENS. A new request has to wait for the running step and the one launched after it. With this
    default, the two steps together take no longer than one step with the full token budget.

    Raises ValueError if the sizes are inconsistent.
    """

    def __init__(
        self,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_mixed_tokens: int | None = None,
        max_model_len: int,
        vocab_size: int,
        blocks: int,
        prefix_cache: bool = True,
    ) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}: it must be at least 1")
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens}, but {max_num_seqs} sequences decode "
                f"one token each in a step: raise max_num_batched_tokens or lower max_num_seqs"
            )
        if max_mixed_tokens is None:
            max_mixed_tokens = default_mixed_tokens(max_num_seqs, max_num_batched_tokens)
        elif not max_num_seqs <= max_mixed_tokens <= max_num_batched_tokens:
            raise ValueError(
                f"max_mixed_tokens is {max_mixed_tokens}: it must be at least max_num_seqs ({max_num_seqs}), "
                f"so that prefills make progress while all other slots decode, and at most "
                f"max_num_batched_tokens ({max_num_batched_tokens})"
            )
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_mixed_tokens = max_mixed_tokens
        self.limits = SequenceLimits(
            max_model_len=max_model_len, vocab_size=vocab_size, blocks=blocks, slots=max_num_seqs
        )
        self.pool = BlockPool(blocks, prefix_cache=prefix_cache)
        self.watermark = max(1, blocks // 100)
        """Number of blocks that admissions leave free for the running sequences' next tokens."""
        # The token credit covers two steps with decodes, or one step without decodes. Other requests wait in
        # the core's queue, which also considers quotas and fairness, whereas the scheduler considers only
        # level and arrival time.
        self.accounting = RequestAccounting(
            credit_seqs=max_num_seqs, credit_tokens=max(max_num_batched_tokens, 2 * max_mixed_tokens)
        )
        totals, tables = self.accounting.totals, BlockTables(self.pool)
        self._waiting = WaitingQueue()
        self._running = RunningSequences(max_num_seqs)
        preemption = Preemption(self._running, self._waiting, tables, self.pool, totals)
        self._decodes = DecodeScheduler(self._running, tables, preemption)
        self._prefills = PrefillScheduler(self._running, tables, self.accounting)
        self._admission = Admission(
            self._waiting,
            self._running,
            tables,
            self.pool,
            self._prefills,
            preemption,
            totals,
            self.watermark,
        )
        self._results = ResultCollector(self._waiting, self._running, tables, self.accounting)
        self._step = 0
        self._arrivals = 0
        self._arrivals_before = 0
        """Number of submissions that had arrived by the time the previous step was planned."""

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting_by_level(self) -> tuple[int, ...]:
        return tuple(self._waiting.length(level) for level in range(LEVELS))

    @property
    def has_work(self) -> bool:
        """Whether there are unfinished sequences."""
        return self.accounting.has_open

    # ── submissions ──────────────────────────────────────────────────────────────────────────

    def add(self, origin: Hashable, submit: Submit) -> None:
        """Queue a submission that arrived on the `origin` channel.

        A submission ends exactly once, with one final `Output` per sample and one `Finished`. An invalid
        submission ends immediately with the finish reason "error".
        """
        reason = refusal(submit, self.limits)
        if reason is None and self.accounting.find(origin, submit.handle) is not None:
            reason = f"handle {submit.handle} is in use on this channel: a handle must not be reused"
        if reason is not None:
            self.accounting.refuse(origin, submit, reason)
            return
        self._running.reserved_slots = submit.reserved_slots
        self._arrivals += 1
        submission = new_submission(origin, submit, self._arrivals, self.limits.max_model_len)
        self.accounting.open(submission)
        for sequence in submission.sequences:
            finish_reason = finished_on_arrival(sequence)
            if finish_reason:
                self._results.end(sequence, finish_reason)
            else:
                self._waiting.push(sequence)

    def cancel(self, origin: Hashable, handle: int, sample: int | None = None) -> None:
        """Cancel a submission, or one of its samples. Submissions that are unknown or have ended are
        ignored."""
        submission = self.accounting.find(origin, handle)
        if submission is not None:
            self._results.cancel(
                [sequence for sequence in submission.sequences if sample is None or sequence.sample == sample]
            )

    def cancel_origin(self, origin: Hashable) -> None:
        """Cancel all submissions of a closed channel. Their outputs are dropped, but their final counts are
        still reported."""
        for submission in self.accounting.of_origin(origin):
            self._results.cancel(submission.sequences)
        self.accounting.forget_outputs(origin)

    def cancel_request(self, request_id: str) -> None:
        """Cancel all submissions of a request, on all channels."""
        for submission in self.accounting.of_request(request_id):
            self._results.cancel(submission.sequences)

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step. Returns None if no token can be computed until steps in flight have been
        collected."""
        step = ScheduledStep(StepPlan(self._step + 1, [], [], [], [], [], []), [], [])
        plan, prefills, admission = step.plan, self._prefills, self._admission
        self.pool.now = time.monotonic()
        self._results.begin_step()
        prefills.begin_step()
        admission.begin_step()
        admission.preempt_for_better()
        preempted = self._decodes.schedule(step)
        budget = (self.max_mixed_tokens if plan.decodes else self.max_num_batched_tokens) - len(plan.decodes)
        for sequence in sorted(self._running.prefilling.values(), key=service_order):
            if not preempted:
                budget -= admission.admit(step, budget, better_than=sequence.level)
            if budget and not prefills.leaves_out(sequence):
                budget -= prefills.schedule_chunk(step, sequence, budget)
        if not preempted:
            admission.admit(step, budget)
        prefills.end_step()
        if not plan.decodes and not plan.chunks:
            return None
        self._step += 1
        known = (chunk.sequence.submission.arrival <= self._arrivals_before for chunk in step.chunks)
        step.had_work = bool(plan.decodes) or any(known)
        self._arrivals_before = self._arrivals
        plan.clears.extend(self.pool.take_clears())
        admission.note_batch_size(plan)
        return step

    def collect(self, step: ScheduledStep, tokens: StepTokens) -> None:
        """Assign a step's results to its sequences. Steps must be collected in the order in which they were
        scheduled."""
        self._results.collect(step, tokens)

    def check(self) -> None:
        """Raise InvariantError if slots, waiting queue, blocks and open submissions are inconsistent. Takes
        time linear in the number of blocks."""
        unfinished = [
            sequence
            for submission in self.accounting.all_open()
            for sequence in submission.sequences
            if not sequence.finish_reason
        ]
        check_consistency(unfinished, self._waiting, self._running, self.pool)
