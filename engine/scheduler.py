"""Rows and a token budget in, a `StepPlan` out.

The rules, in the order in which a step is filled:

0. *Real-time first.* While real-time submissions (`priority` 0) wait for a row or blocks, background ones
   (`priority` 3) that run are preempted, youngest first, as far as that helps.
1. *Decodes first.* Every decoding sequence gets its one token. When a decode lacks a block, the running
   sequence of the lowest class (highest `priority`), the youngest of it, is preempted: its blocks go back and
   it is recomputed later. The oldest of the highest class is never preempted by others, so something always
   gets ahead.
2. *Then the prefills that run*, in order of service: their next chunks, up to the budget (chunked prefill,
   as in Sarathi-Serve). A step in which sequences decode has the lesser budget, `mixed_tokens`: they all wait
   for its prompts. An urgent submission is admitted before those that come after it in that order, and its
   step is kept free of their prompts, though never two steps in a row.
3. *Then admissions*, in order of class, the urgent before others, then arrival (so preempted before new). The
   head of the queue waits until a row, blocks for all it has to compute, and a watermark of free blocks are
   there, and nobody overtakes it: long prompts cannot starve. A step whose decodes preempted admits nobody.

A sequence takes all blocks of its prefill on admission, so only decodes can run out. As many samples of a
submission as can start together compute the prompt once: siblings take a row, share the blocks when the
prefill ends, and copy the last, partial block before they first write to it. The rest wait as sequences of
their own, and find the prompt in the prefix cache.

Results of a step are collected after later steps were planned (`engine.core` says how many), so `position`
runs ahead of the known tokens, a sequence that ended may still be sampled once, and a preempted one waits
for its results in flight before it is admitted again. Plans are executed in order: a freed row or block may
be given to the next plan at once.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from operator import attrgetter

from engine.block_tables import BlockTables
from engine.blocks import BlockPool, InvariantError
from engine.ledger import Ledger
from engine.messages import (
    BAD_TOKEN,
    BLOCK_TOKENS,
    Chunk,
    Output,
    StepPlan,
    StepTokens,
    Submit,
)
from engine.request import (
    BACKGROUND,
    Limits,
    Order,
    Sequence,
    WaitingQueue,
    already_finished,
    new_submission,
    refusal,
    setup_numbers,
    setup_of,
)

MIXED_TOKENS = 4096
"""Default of `mixed_tokens`: enough to fill the matrix products of a large GPU, and about 0.1 s of an H200
for 8 B parameters in bfloat16."""

MOST_SETUP_NUMBERS = 1 << 20
"""Of token ids and the like that the setups of one step tell, unless a single sequence needs more: ranks get
them with the plan, and the device waits for it. At 5 bytes each that is 5 MiB."""


@dataclass(slots=True)
class Prefill:
    """A chunk of a plan: whose it is and what it covers."""

    sequence: Sequence
    row: int
    start: int
    end: int
    samples: bool
    """Whether tokens are sampled after it, which then say whether its numbers are finite."""


@dataclass(slots=True)
class ScheduledStep:
    """A plan, and to whom its results belong."""

    plan: StepPlan
    slots: list[Sequence]
    """The sequence of each sampling row, in the order of `StepTokens`."""
    prefills: list[Prefill]
    """One for each chunk."""
    waited_for: bool = False
    """Whether a sequence of it was there when the step before was planned."""


_order = attrgetter("order")


class Scheduler:
    """Decides who runs. Single-threaded; `engine.core` calls it, nothing here blocks.

    max_rows: sequences at once. step_tokens: token budget of a step. mixed_tokens: of a step in which
    sequences decode, decodes included: what is more makes each of them wait longer for its next token; None
    is half of step_tokens, at most MIXED_TOKENS: whoever comes waits
    for one that runs and one that is launched, together a full step. blocks: of the KV pool.

    Raises ValueError where the sizes cannot work together.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        step_tokens: int,
        mixed_tokens: int | None = None,
        max_model_len: int,
        vocab_size: int,
        blocks: int,
        prefix_cache: bool = True,
    ) -> None:
        if max_rows < 1:
            raise ValueError(f"max_rows is {max_rows}: give at least 1")
        if step_tokens < max_rows:
            raise ValueError(
                f"step_tokens is {step_tokens}, but {max_rows} rows decode one token each in a step: "
                f"raise step_tokens or lower max_rows"
            )
        if mixed_tokens is None:
            mixed_tokens = max(max_rows, min(step_tokens // 2, MIXED_TOKENS))
        elif not max_rows <= mixed_tokens <= step_tokens:
            raise ValueError(
                f"mixed_tokens is {mixed_tokens}: give at least max_rows, {max_rows}, so that prompts get on "
                f"while all other rows decode, and at most step_tokens, {step_tokens}"
            )
        self.max_rows = max_rows
        self.step_tokens = step_tokens
        self.mixed_tokens = mixed_tokens
        self.limits = Limits(max_model_len=max_model_len, vocab_size=vocab_size, blocks=blocks)
        self.pool = BlockPool(blocks, prefix_cache=prefix_cache)
        self._tables = BlockTables(self.pool)
        self.watermark = max(1, blocks // 100)
        """Blocks that an admission leaves free while others run: room for their next ones."""
        # Ahead of it: two steps beside decodes, or one without any. What is more would wait here, where only
        # the class counts, and not in the core's queue.
        self.ledger = Ledger(credit_rows=max_rows, credit_tokens=max(step_tokens, 2 * mixed_tokens))
        self._step = 0
        self._has_urgent = False
        """Whether the step that is planned computes an urgent prompt."""
        self._short_before = False
        """Whether the step before was kept short for one."""
        self._setup_numbers = 0
        """Of the step that is planned."""
        self._arrivals = 0
        self._known_arrivals = 0
        """As many when the last step was planned."""
        self._waiting = WaitingQueue()
        self._rows: list[Sequence | None] = [None] * max_rows
        self._free_rows = list(range(max_rows - 1, -1, -1))
        self._decoding: dict[int, Sequence] = {}
        self._prefilling: dict[int, Sequence] = {}
        self._admitted: list[Sequence] = []
        self._blocked: tuple[Sequence, int] | None = None

    # ── intake ───────────────────────────────────────────────────────────────────────────────

    @property
    def running(self) -> int:
        return self.max_rows - len(self._free_rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a sequence has not ended."""
        return self.ledger.has_open

    def add(self, origin: Hashable, submit: Submit) -> None:
        """Queue a submission of a channel. One that cannot be computed ends at once, with "error"."""
        reason = refusal(submit, self.limits)
        if reason is None and self.ledger.find(origin, submit.handle) is not None:
            reason = f"handle {submit.handle} is in use on this channel: handles are never reused"
        if reason is not None:
            self.ledger.refuse(origin, submit, reason)
            return
        self._arrivals += 1
        submission = new_submission(origin, submit, self._arrivals, self.limits)
        self.ledger.open(submission)
        for sequence in submission.sequences:
            finish = already_finished(sequence)
            if finish:
                self._end(sequence, finish)
            else:
                self._waiting.push(sequence)

    def cancel(self, origin: Hashable, handle: int, sample: int | None = None) -> None:
        """End a submission, or one sample of it. What has ended, or never was, is passed over."""
        submission = self.ledger.find(origin, handle)
        if submission is not None:
            self._cancel_all(
                [sequence for sequence in submission.sequences if sample is None or sequence.sample == sample]
            )

    def cancel_origin(self, origin: Hashable) -> None:
        """A channel is gone: end everything that came from it, and forget what it was still to be told."""
        for submission in self.ledger.of_origin(origin):
            self._cancel_all(submission.sequences)
        self.ledger.forget_outputs(origin)

    def cancel_request(self, request_id: str) -> None:
        """End every submission of a request, whichever channel it came from."""
        for submission in self.ledger.of_request(request_id):
            self._cancel_all(submission.sequences)

    # ── one step ─────────────────────────────────────────────────────────────────────────────

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed before results in flight are collected."""
        step = ScheduledStep(StepPlan(self._step + 1, [], [], [], [], [], []), [], [])
        plan = step.plan
        self._has_urgent, self._setup_numbers = False, 0
        if self._waiting.real_time:
            self._make_room()
        preempted = self._schedule_decodes(step)
        budget = (self.mixed_tokens if plan.decodes else self.step_tokens) - len(plan.decodes)
        for sequence in sorted(self._prefilling.values(), key=_order):
            if not preempted:
                budget -= self._admit(step, budget, sequence.order)
            if budget and not self._keeps_short(sequence):
                budget -= self._schedule_chunk(step, sequence, budget)
        if not preempted:
            self._admit(step, budget)
        self._short_before = self._has_urgent and not self._short_before
        if not plan.decodes and not plan.chunks:
            return None
        self._step += 1
        known = (prefill.sequence.submission.arrival <= self._known_arrivals for prefill in step.prefills)
        step.waited_for = bool(plan.decodes) or any(known)
        self._known_arrivals = self._arrivals
        plan.clears.extend(self.pool.take_clears())
        if self._admitted:
            self._note_batch_size(plan)
        return step

    def _schedule_decodes(self, step: ScheduledStep) -> bool:
        """Give each decoding sequence its token; returns whether that took a preemption."""
        preempted = False
        decoding = self._decoding
        attention = [sequence for sequence in decoding.values() if sequence.position == sequence.pause]
        if attention:
            preempted = self._attend(step.plan, attention)
        for sequence in decoding.values():
            sequence.position += 1
            sequence.in_flight += 1
        step.plan.decodes.extend(decoding)
        step.slots.extend(decoding.values())
        return preempted

    def _attend(self, plan: StepPlan, attention: list[Sequence]) -> bool:
        """Before decodes at their `pause`: retire those whose last token is launched, give others blocks.

        Returns whether that took a preemption.
        """
        needy = []
        for sequence in attention:
            if sequence.position >= sequence.limit - 1:
                del self._decoding[sequence.row]
            else:
                needy.append(sequence)
        if not needy:
            return False
        needy.sort(key=_order)
        # Whoever got its block comes before the one who needs it now, and victims come from the other end: a
        # victim was given nothing in this plan.
        victims: list[Sequence] | None = None
        for sequence in needy:
            while sequence.row >= 0 and not self._tables.make_writable(plan, sequence):
                if victims is None:
                    victims = sorted([*self._decoding.values(), *self._prefilling.values()], key=_order)
                self._preempt(victims.pop())
        return victims is not None

    def _schedule_chunk(self, step: ScheduledStep, sequence: Sequence, budget: int) -> int:
        """Compute the next tokens of a prefill, `budget` at most; returns how many."""
        plan, start, last = step.plan, sequence.position, sequence.prefill_end
        self._has_urgent = self._has_urgent or sequence.submission.submit.urgent
        end = min(start + budget, last)
        logprobs = next_token = None
        submit = sequence.submission.submit
        prompt = len(submit.prompt_token_ids)
        if sequence.wants_prompt_logprobs and start < prompt:
            # A chunk that is scored stays inside the prompt.
            end = min(end, prompt)
            logprobs = submit.sampling.prompt_logprobs
            next_token = sequence.tokens[end] if end < prompt else None
        sample_rows = []
        if end == last:
            del self._prefilling[sequence.row]
            if sequence.samples:
                sample_rows = self._begin_decoding(step, sequence, end)
        self._tables.send(plan, sequence)
        plan.chunks.append(
            Chunk(sequence.row, start, sequence.tokens[start:end], sample_rows, logprobs, next_token)
        )
        step.prefills.append(Prefill(sequence, sequence.row, start, end, samples=bool(sample_rows)))
        sequence.position = end
        sequence.in_flight += 1
        self.ledger.credit(sequence.submission, end)
        self.ledger.totals.computed_tokens += end - start
        return end - start

    def _begin_decoding(self, step: ScheduledStep, leader: Sequence, end: int) -> list[int]:
        """The prefill ends with this chunk: it and its forks sample from it. Returns their rows."""
        for fork in leader.forks:
            fork.leader = None
            self._tables.fork(leader, fork)
            self._tables.send(step.plan, fork)
        group = [leader, *leader.forks]
        leader.forks = []
        for sequence in group:
            # A last block that is shared is not writable yet: `make_writable` sorts it out.
            writable = end if len(group) > 1 else len(sequence.table) * BLOCK_TOKENS
            sequence.position = end
            sequence.pause = min(writable, sequence.limit - 1)
            sequence.in_flight += 1
            self._watch(sequence)
            self._decoding[sequence.row] = sequence
        step.slots.extend(group)
        return [sequence.row for sequence in group]

    def _keeps_short(self, sequence: Sequence) -> bool:
        """Whether the step goes without this prompt, as it has an urgent one, which waits for all of it.
        Every other step is filled all the same."""
        return self._has_urgent and not self._short_before and not sequence.submission.submit.urgent

    # ── admission and preemption ─────────────────────────────────────────────────────────────

    def _admit(self, step: ScheduledStep, budget: int, before: Order | None = None) -> int:
        """Start waiting sequences, the head of the queue first, until one does not fit; with `before`, only
        urgent ones whose order is less. Returns how many tokens of the budget they take."""
        given = budget
        while budget and self._free_rows:
            sequence = self._waiting.peek()
            # A preempted sequence cannot be recomputed before the tokens it sampled last are known.
            if sequence is None or sequence.in_flight or not self._fits_now(sequence):
                break
            if before is not None and not (sequence.submission.submit.urgent and sequence.order < before):
                break
            if self._keeps_short(sequence) or not self._can_tell(sequence):
                break
            hits = self._take_blocks(sequence)
            if hits is None:
                break
            for member in (sequence, *sequence.forks):
                self._start(member, hits * BLOCK_TOKENS)
            step.plan.setups.append(setup_of(sequence))
            self._setup_numbers += setup_numbers(sequence)
            self._prefilling[sequence.row] = sequence
            budget -= self._schedule_chunk(step, sequence, budget)
        return given - budget

    def _make_room(self) -> None:
        """Preempt background sequences for real-time ones that wait for rows, or for blocks of the first."""
        head = self._waiting.peek()
        if head is None or head.in_flight:
            return
        rows = self._waiting.real_time - len(self._free_rows)
        _, needed, room = self._blocks_for(head)
        if rows <= 0 and needed <= room:
            return
        running = (*self._decoding.values(), *self._prefilling.values())
        victims = sorted((s for s in running if s.order[0] == BACKGROUND), key=_order)
        if needed > room + sum(len(victim.table) for victim in victims):
            needed = 0  # not even without any of them
        while victims and (rows > 0 or needed > room):
            victim = victims.pop()
            rows -= 1 + len(victim.forks)
            before = self.pool.available
            self._preempt(victim)
            room += self.pool.available - before

    def _fits_now(self, sequence: Sequence) -> bool:
        """Whether it is worth looking: enough happened since the same sequence was found not to fit."""
        if self._blocked is None or not self.running:
            return True
        blocked, gains = self._blocked
        return blocked is not sequence or self.pool.gains >= gains

    def _can_tell(self, sequence: Sequence) -> bool:
        """Whether the step's plan has room for its setup. One alone has it in any case."""
        told = self._setup_numbers
        return not told or told + setup_numbers(sequence) <= MOST_SETUP_NUMBERS

    def _siblings(self, sequence: Sequence, most: int) -> list[Sequence]:
        """Samples that start together with this one: those that wait for their first start, as rows allow."""
        most = min(most, len(self._free_rows) - 1)
        siblings: list[Sequence] = []
        if sequence.started or most <= 0:
            return siblings
        for other in sequence.submission.sequences:
            if other is not sequence and other.entry is not None and not other.started:
                siblings.append(other)
                if len(siblings) == most:
                    break
        return siblings

    def _blocks_for(self, sequence: Sequence) -> tuple[list[int], int, int]:
        """As `BlockTables.find`, with room only above the watermark."""
        hits, needed, room = self._tables.find(sequence)
        # An empty house needs no reserve: whatever passed `refusal` fits into the whole pool.
        return hits, needed, room - (self.watermark if self.running else 0)

    def _take_blocks(self, sequence: Sequence) -> int | None:
        """Take the blocks of a prefill, found or new, and attach as many siblings as fit with it.

        Returns the number of blocks found in the prefix cache, or None (and takes nothing) if the sequence
        does not fit.
        """
        hits, needed, room = self._blocks_for(sequence)
        if needed > room:
            self._blocked = (sequence, self.pool.gains + needed - room)
            return None
        self._blocked = None
        # Each fork soon needs one block of its own, for its next token or its copy of the partial block.
        sequence.forks = self._siblings(sequence, room - needed)
        for fork in sequence.forks:
            fork.leader = sequence
        self._tables.take(sequence, hits, needed)
        return len(hits)

    def _start(self, sequence: Sequence, cached: int) -> None:
        """Give a waiting sequence a row."""
        self._waiting.remove(sequence)
        submission = sequence.submission
        row = sequence.row = self._free_rows.pop()
        self._rows[row] = sequence
        sequence.sent_blocks = 0
        prompt = len(submission.submit.prompt_token_ids)
        if not sequence.started:
            sequence.started = True
            sequence.cached_tokens = min(cached, prompt)
            self._admitted.append(sequence)
        if not submission.started:
            submission.started = True
            submission.cached_tokens = sequence.cached_tokens
            self.ledger.totals.prompt_tokens += prompt
            self.ledger.totals.cached_tokens += sequence.cached_tokens

    def _note_batch_size(self, plan: StepPlan) -> None:
        """Sequences in this step: those that decode, and those whose prompt is computed."""
        size = len(plan.decodes) + sum(max(1, len(chunk.sample_rows)) for chunk in plan.chunks)
        for sequence in self._admitted:
            sequence.batch_size = size
            if not sequence.submission.batch_size:
                sequence.submission.batch_size = size
        self._admitted.clear()

    def _preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's row and blocks; it waits to be computed anew."""
        sequence.submission.preemptions += 1
        self.ledger.totals.preemptions += 1
        for member in (sequence, *sequence.forks):
            self._vacate(member)
            member.leader = None
            self._waiting.push(member)
        sequence.forks = []

    def _vacate(self, sequence: Sequence) -> None:
        """Take a running sequence out of its row, and free its blocks."""
        row = sequence.row
        self._decoding.pop(row, None)
        self._prefilling.pop(row, None)
        self._rows[row] = None
        self._free_rows.append(row)
        sequence.row = -1
        self._tables.release(sequence)

    # ── results ──────────────────────────────────────────────────────────────────────────────

    def collect(self, step: ScheduledStep, tokens: StepTokens) -> None:
        """Take in what a step computed. Steps are collected in the order in which they were scheduled."""
        for prefill in step.prefills:
            self._collect_prefill(prefill, tokens)
        emit, logprobs = self.ledger.emit, tokens.logprobs
        generated = 0
        for slot, (sequence, token) in enumerate(zip(step.slots, tokens.token_ids, strict=True)):
            sequence.in_flight -= 1
            if sequence.finish:
                continue
            if token == BAD_TOKEN:
                self._break(sequence, len(sequence.tokens))
                continue
            generated += 1
            sequence.finite = len(sequence.tokens)
            sequence.tokens.append(token)
            finish = ""
            if token in sequence.stops or len(sequence.tokens) >= sequence.watch:
                finish = self._examine(sequence, token)
            submission = sequence.submission
            output = Output(submission.submit.handle, sequence.sample, [token], finish)
            if logprobs is not None:
                entry = logprobs[slot]
                output.logprobs = None if entry is None else [entry]
            if not sequence.announced:
                self._announce(sequence, output)
            emit(submission.origin, output)
            if finish:
                self._finish(sequence, finish)
        self.ledger.totals.generated_tokens += generated

    def _collect_prefill(self, prefill: Prefill, tokens: StepTokens) -> None:
        sequence = prefill.sequence
        sequence.in_flight -= 1
        if sequence.finish:
            return
        if prefill.row in tokens.broken:
            # Forks before their leader, so that its prefill is not handed from one to the next.
            for member in (*reversed(sequence.forks), sequence):
                self._break(member, prefill.end)
            return
        if sequence.row >= 0:
            if not prefill.samples:
                sequence.finite = prefill.end
            self._tables.register(sequence, prefill.end)
        # The row is the plan's: the sequence may have lost it since, what was computed stands.
        scores = tokens.prompt_logprobs.get(prefill.row)
        if scores is not None and sequence.prompt_logprobs is not None:
            # The first score is that of the token at start + 1; recomputed ones are known already.
            sequence.prompt_logprobs.extend(scores[len(sequence.prompt_logprobs) - prefill.start - 1 :])
        if not sequence.samples and not sequence.wants_prompt_logprobs:
            self._end(sequence, "length")

    def _examine(self, sequence: Sequence, token: int) -> str:
        """After a token that might end the sequence or fill a block: its finish, or ""."""
        if sequence.row >= 0:
            # The newest token was sampled, not yet fed: its keys and values are not in the cache.
            self._tables.register(sequence, len(sequence.tokens) - 1)
            self._watch(sequence)
        # Stop tokens before min_tokens are suppressed by the sampler; none may slip through as an end.
        if token in sequence.stops and (
            sequence.output_tokens > sequence.submission.submit.sampling.min_tokens
        ):
            return "stop"
        return "length" if len(sequence.tokens) >= sequence.limit else ""

    def _watch(self, sequence: Sequence) -> None:
        """Set the length at which `collect` looks closer."""
        full = (len(sequence.tokens) - 1) // BLOCK_TOKENS
        sequence.watch = min((full + 1) * BLOCK_TOKENS + 1, sequence.limit)

    # ── ends ─────────────────────────────────────────────────────────────────────────────────

    def _cancel_all(self, sequences: list[Sequence]) -> None:
        # Forks before their leader, so that its prefill is not handed from one to the next.
        for sequence in reversed(sequences):
            if not sequence.finish:
                self._end(sequence, "cancelled")

    def _break(self, sequence: Sequence, position: int) -> None:
        """End a sequence whose numbers are not finite after `position` tokens, and keep what it computed from
        anybody else."""
        self._tables.taint(sequence)
        self._end(
            sequence,
            "error",
            f"the model's numbers overflowed at position {position}: no token has a finite score "
            "(a damaged checkpoint, a dtype with too little range, or logit_bias, allowed_token_ids and "
            "bad_words that together ban every token)",
        )

    def _end(self, sequence: Sequence, finish: str, error: str | None = None) -> None:
        """End a sequence outside of sampling: its last output brings no token."""
        submission = sequence.submission
        output = Output(submission.submit.handle, sequence.sample, [], finish, error=error)
        if not sequence.announced:
            self._announce(sequence, output)
        self.ledger.emit(submission.origin, output)
        self._finish(sequence, finish)

    def _announce(self, sequence: Sequence, output: Output) -> None:
        """A sample's first output says how it started."""
        sequence.announced = True
        output.cached_tokens = sequence.cached_tokens
        output.batch_size = sequence.batch_size
        if sequence.prompt_logprobs is not None and not sequence.wants_prompt_logprobs:
            output.prompt_logprobs = sequence.prompt_logprobs

    def _finish(self, sequence: Sequence, finish: str) -> None:
        """A sequence's end: everything it held goes back; the last of a submission closes the ledger."""
        sequence.finish = finish
        if sequence.entry is not None:
            self._waiting.remove(sequence)
        if sequence.leader is not None:
            sequence.leader.forks.remove(sequence)
            sequence.leader = None
        if sequence.forks:
            self._hand_over(sequence)
        if sequence.row >= 0:
            self._vacate(sequence)
        self.ledger.end_sample(sequence)

    def _hand_over(self, leader: Sequence) -> None:
        """A leader ends before its forks sampled: the first of them goes on with its prefill."""
        heir, *rest = leader.forks
        heir.leader, heir.forks = None, rest
        for fork in rest:
            fork.leader = heir
        heir.table, leader.table = leader.table, []
        heir.position, heir.chain, heir.finite = leader.position, leader.chain, leader.finite
        self._prefilling[heir.row] = heir
        leader.forks = []

    # ── invariants ───────────────────────────────────────────────────────────────────────────

    def check(self) -> None:
        """Raise InvariantError unless rows, queue, blocks and ledger tell the same story."""
        live = [s for submission in self.ledger.all_open() for s in submission.sequences if not s.finish]
        self.pool.check([sequence.table for sequence in live])
        rows = {sequence.row: sequence for sequence in live if sequence.row >= 0}
        waiting = set(self._waiting)
        for sequence in live:
            name = f"sample {sequence.sample} of {sequence.submission.submit.request_id}"
            if (sequence.row >= 0) == (sequence in waiting):
                raise InvariantError(f"{name} must either have a row or wait: row {sequence.row}")
            if sequence.row >= 0 and self._rows[sequence.row] is not sequence:
                raise InvariantError(f"{name} believes to own row {sequence.row}, which is another's")
            if sequence.row < 0 and (sequence.table or sequence.leader or sequence.forks):
                raise InvariantError(f"{name} waits, yet holds blocks or siblings")
            if sequence.table and not sequence.position <= len(sequence.table) * BLOCK_TOKENS:
                raise InvariantError(
                    f"{name} wrote {sequence.position} tokens into {len(sequence.table)} blocks"
                )
            if sequence.leader is not None and sequence not in sequence.leader.forks:
                raise InvariantError(f"{name} waits for a leader that does not know it")
        if len(waiting) != len(self._waiting):
            raise InvariantError(f"{len(waiting)} sequences wait, the queue counts {len(self._waiting)}")
        taken = {row for row, sequence in enumerate(self._rows) if sequence is not None}
        if taken != set(rows):
            raise InvariantError(f"rows {sorted(taken)} are taken, live sequences own {sorted(rows)}")
        if len(set(self._free_rows)) != len(self._free_rows) or taken & set(self._free_rows):
            raise InvariantError(f"free rows {self._free_rows} overlap, or are taken: {sorted(taken)}")
        if len(taken) + len(self._free_rows) != self.max_rows:
            raise InvariantError(
                f"{len(taken)} taken and {len(self._free_rows)} free rows of {self.max_rows}"
            )
        if self._decoding.keys() & self._prefilling.keys():
            raise InvariantError("a row both decodes and prefills")
        for row, sequence in [*self._decoding.items(), *self._prefilling.items()]:
            if self._rows[row] is not sequence:
                raise InvariantError(f"row {row} is scheduled for a sequence that does not own it")
        if not live and (self.pool.used or self.running):
            raise InvariantError(f"idle, with {self.pool.used} blocks and {self.running} rows in use")
