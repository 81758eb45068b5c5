"""The scheduler: decides in each step which sequences compute, within a token budget, and returns a
`StepPlan`.

A submission's *level* is its class (`priority`) and its urgency inside the class. A step is filled in this
order:

0. *Better levels first.* If the first waiting sequence lacks blocks, running sequences of worse levels are
   preempted, beginning with the youngest of the worst level, but only if that frees enough blocks. If
   real-time submissions (`priority` 0) wait for a slot, background sequences (`priority` 3) are preempted;
   for real-time submissions that fit into one step, all sequences that are not urgent.
1. *Decodes.* Every decoding sequence gets one token. If a decode lacks a block, the youngest running sequence
   of the worst level is preempted: its blocks are freed, and it is recomputed later. The oldest sequence of
   the best level is never preempted for others, so the engine always makes progress.
2. *Running prefills*, in order of service: their next chunks, up to the budget (chunked prefill, as in
   Sarathi-Serve). A step with decodes has the smaller budget `max_mixed_tokens`, because every decode waits
   for the step's prompts. A submission of a better level is admitted before the next chunk of a worse one,
   and its step leaves out prompts of worse levels, but not in two consecutive steps for the same level.
3. *Admissions*, by level, then by arrival, so preempted sequences come before new ones. A sequence does not
   take slots that are reserved for better levels (`Submit.spare_slots`). The first waiting sequence waits for
   a slot, for blocks for its whole prefill, and for the watermark of free blocks. No later sequence is
   admitted before it because it needs fewer blocks, so long prompts cannot starve. A step in which decodes
   preempted a sequence admits none.

The results of a step are collected after later steps were planned (`engine.core` decides how many). Therefore
`position` is ahead of the known tokens, a sequence that has ended may be sampled once more, and a preempted
sequence is admitted again only after its results in flight are collected. Plans are executed in order, so the
next plan may reuse a freed slot or block at once.
"""

from __future__ import annotations

from collections.abc import Hashable

from engine.messages import LEVELS, Submit
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

MIXED_TOKENS = 4096
"""Upper bound of the default of `max_mixed_tokens`: enough to saturate the GEMMs of a large GPU, and about
0.1 s of computation on an H200 for a model of 8 B parameters in bfloat16."""


class Scheduler:
    """Plans steps and collects their results. Single-threaded; no method blocks.

    max_num_seqs: maximum number of running sequences. max_num_batched_tokens: token budget of a step.
    max_mixed_tokens: token budget of a step with decodes, these included; None: half of
    max_num_batched_tokens, at most MIXED_TOKENS, since a new request waits for one running and one launched
    step, which together are then a full step. blocks: size of the KV pool.

    Raises ValueError if the sizes do not fit together.
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
            max_mixed_tokens = max(max_num_seqs, min(max_num_batched_tokens // 2, MIXED_TOKENS))
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
        """Number of blocks that an admission leaves free for the next tokens of running sequences."""
        # The token credit covers two steps with decodes, or one without. Further requests are better kept in
        # the core's queue, which also considers quotas and fairness; the scheduler considers only class and
        # arrival.
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
        """Number of arrivals when the previous step was planned."""

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
        """Whether a sequence has not ended."""
        return self.accounting.has_open

    # ── intake ───────────────────────────────────────────────────────────────────────────────

    def add(self, origin: Hashable, submit: Submit) -> None:
        """Queue a submission that came from channel `origin`.

        A submission ends exactly once: with one `Output` per sample that has a finish reason, and one
        `Finished`. An invalid submission ends at once, with "error".
        """
        reason = refusal(submit, self.limits)
        if reason is None and self.accounting.find(origin, submit.handle) is not None:
            reason = f"handle {submit.handle} is in use on this channel: a handle must not be reused"
        if reason is not None:
            self.accounting.refuse(origin, submit, reason)
            return
        self._arrivals += 1
        submission = new_submission(origin, submit, self._arrivals, self.limits.max_model_len)
        self.accounting.open(submission)
        for sequence in submission.sequences:
            finish = finished_on_arrival(sequence)
            if finish:
                self._results.end(sequence, finish)
            else:
                self._waiting.push(sequence)

    def cancel(self, origin: Hashable, handle: int, sample: int | None = None) -> None:
        """End a submission, or one sample of it. Unknown and ended submissions are ignored."""
        submission = self.accounting.find(origin, handle)
        if submission is not None:
            self._results.cancel(
                [sequence for sequence in submission.sequences if sample is None or sequence.sample == sample]
            )

    def cancel_origin(self, origin: Hashable) -> None:
        """End all submissions of a closed channel. Their outputs are dropped; their final counts are still
        reported."""
        for submission in self.accounting.of_origin(origin):
            self._results.cancel(submission.sequences)
        self.accounting.forget_outputs(origin)

    def cancel_request(self, request_id: str) -> None:
        """End all submissions of a request, from any channel."""
        for submission in self.accounting.of_request(request_id):
            self._results.cancel(submission.sequences)

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step. Returns None if nothing can be computed before results in flight are
        collected."""
        step = ScheduledStep(StepPlan(self._step + 1, [], [], [], [], [], []), [], [])
        plan, prefills, admission = step.plan, self._prefills, self._admission
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
        """Apply the results of a step. Steps must be collected in the order in which they were scheduled."""
        self._results.collect(step, tokens)

    def check(self) -> None:
        """Raise InvariantError unless slots, queue, blocks and open submissions are consistent. O(blocks)."""
        unfinished = [
            sequence
            for submission in self.accounting.all_open()
            for sequence in submission.sequences
            if not sequence.finish_reason
        ]
        check_consistency(unfinished, self._waiting, self._running, self.pool)
