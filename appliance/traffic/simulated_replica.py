"""A replica in simulated time, for replays (`appliance.traffic.what_if`).

Running sequences progress together: each gets one token per step, and the duration of a step depends on their
number, as measured on the real replica. While prompts are computed, steps also contain a chunk of a prompt
and take longer. Prompts are computed one after another. The state changes only when a prompt is complete or a
sequence ends, so a replay of minutes takes only moments.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass

import msgspec

from appliance.traffic.credits import CreditAccount
from engine.levels import LEVELS
from engine.messages import BLOCK_TOKENS, Finished, Report

_CREDIT_STEPS = 2
"""The token credit of a replica covers the prompts of this many mixed steps."""


class ReplicaSpeed(msgspec.Struct, frozen=True, kw_only=True):
    """The measured speed and the capacity of a replica."""

    unit: str
    replica: str
    slots: int
    credit_tokens: int
    kv_tokens: int
    step_s: float
    """Duration of a decode step with one sequence."""
    sequence_s: float
    """Time that each additional sequence adds to a decode step."""
    prompt_token_s: float

    @property
    def chunk(self) -> int:
        """Number of prompt tokens in a mixed step."""
        return max(1, self.credit_tokens // _CREDIT_STEPS)

    def decode_s(self, sequences: int) -> float:
        """Return the duration of a decode step."""
        return self.step_s + self.sequence_s * max(0, sequences - 1)


def speed_of(account: CreditAccount) -> ReplicaSpeed | None:
    """Return the speed of a real replica, or None while it is not known."""
    rates = account.rates
    if not rates.known or not account.slots:
        return None
    one, all_slots = rates.decode_s(1), rates.decode_s(account.slots)
    return ReplicaSpeed(
        unit=account.model,
        replica=account.replica,
        slots=account.slots,
        credit_tokens=max(1, account.tokens),
        kv_tokens=account.kv_tokens,
        step_s=one,
        sequence_s=max(0.0, all_slots - one) / max(1, account.slots - 1),
        prompt_token_s=rates.prompt_token_s,
    )


@dataclass(kw_only=True)
class SimulatedSubmission:
    """One prompt of a request, with its sequences."""

    request_id: str
    index: int
    level: int
    sequences: int
    prompt_tokens: int
    cached_tokens: int
    output_each: int
    """Tokens that each sequence generates."""
    left: float = 0.0
    """Number of prompt tokens that have not been computed yet."""

    @property
    def work(self) -> int:
        """Number of prompt tokens to compute. Even if all are cached, the last one is computed."""
        return max(1, self.prompt_tokens - self.cached_tokens)


class SimulatedReplica:
    """A replica with its queue of prompts and its running sequences."""

    def __init__(self, speed: ReplicaSpeed) -> None:
        self.speed = speed
        self.account = CreditAccount(speed.replica, speed.unit)
        self.account.rates.predict(speed.step_s, speed.prompt_token_s)
        self._now = 0.0
        self._prompts: deque[SimulatedSubmission] = deque()
        self._running: list[tuple[float, int, SimulatedSubmission]] = []
        """The submissions that are decoding: a heap ordered by the token count at which each of them ends."""
        self._prompt_tokens = 0
        """Number of tokens of the prompts in the queue, including those that have already been computed."""
        self._sequences = 0
        self._tokens = 0.0
        """Number of tokens that a sequence would have generated if it had run from the beginning."""
        self._serial = 0
        self._returned_seqs, self._returned_tokens = [0] * LEVELS, [0] * LEVELS
        self._generated = self._computed = self._started = self._cached = 0
        self._steps, self._seconds = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}

    def submit(self, submission: SimulatedSubmission, now: float) -> None:
        """Queue a prompt."""
        self.advance(now)
        submission.left = submission.work
        self._prompt_tokens += submission.work
        self._started += submission.prompt_tokens
        self._cached += submission.cached_tokens
        self._prompts.append(submission)

    def next_change(self) -> float:
        """Return the time of the next change, or infinity if nothing is running."""
        step_s = self._step_s()
        changes = []
        if self._prompts:
            changes.append(self._prompts[0].left / self._chunk() * step_s)
        if self._running:
            changes.append(max(0.0, self._running[0][0] - self._tokens) * step_s)
        return self._now + min(changes, default=math.inf)

    def advance(self, now: float) -> None:
        """Advance the simulation to `now`, which is at most the time of the next change."""
        elapsed, self._now = max(0.0, now - self._now), max(now, self._now)
        if not (self._prompts or self._running) or not elapsed:
            return
        steps = elapsed / self._step_s()
        mixed = bool(self._prompts)
        self._steps[mixed] += steps
        self._seconds[mixed] += elapsed
        self._tokens += steps
        if mixed:
            self._prompts[0].left -= steps * self._chunk()

    def change(self) -> tuple[list[SimulatedSubmission], list[SimulatedSubmission]]:
        """Return the submissions whose prompts are complete at this time, and the submissions that end."""
        started, ended = [], []
        # The next change may be closer than the resolution of the clock, which is 0.24 µs for unix time.
        steps = math.ulp(self._now) / self._step_s()
        if self._prompts and self._prompts[0].left < max(1e-3, steps * self._chunk()):
            submission = self._prompts.popleft()
            self._prompt_tokens -= submission.work
            started.append(submission)
            self._computed += submission.prompt_tokens - submission.cached_tokens
            self._returned_tokens[submission.level] += submission.prompt_tokens
            self._serial += 1
            end = self._tokens + max(0, submission.output_each - 1)
            heapq.heappush(self._running, (end, self._serial, submission))
            self._sequences += submission.sequences
        while self._running and self._running[0][0] <= self._tokens + max(1e-6, steps):
            _, _, submission = heapq.heappop(self._running)
            self._sequences -= submission.sequences
            self._returned_seqs[submission.level] += submission.sequences
            self._generated += submission.sequences * submission.output_each
            ended.append(submission)
        return started, ended

    def report(self, ended: list[SimulatedSubmission]) -> Report:
        """Return the report that the replica would send to the request manager."""
        steps, seconds = self._steps, self._seconds
        self._steps, self._seconds = {False: 0.0, True: 0.0}, {False: 0.0, True: 0.0}

        def mean_ms(mixed: bool) -> float:
            return 1e3 * seconds[mixed] / steps[mixed] if steps[mixed] else 0.0

        return Report(
            step=0,
            credit_seqs=self.speed.slots + sum(self._returned_seqs),
            credit_tokens=self.speed.credit_tokens + sum(self._returned_tokens),
            waiting_seqs=(0,) * LEVELS,
            returned_seqs=tuple(self._returned_seqs),
            returned_tokens=tuple(self._returned_tokens),
            finished=[_finished(submission, self._sequences) for submission in ended],
            running=self._sequences,
            waiting=len(self._prompts),
            blocks_total=self.speed.kv_tokens // BLOCK_TOKENS,
            blocks_used=0,
            preemptions=0,
            prompt_tokens=self._started,
            cached_tokens=self._cached,
            computed_tokens=self._computed,
            generated_tokens=self._generated,
            decode_steps=round(steps[False]),
            step_ms=mean_ms(False),
            mixed_steps=round(steps[True]),
            mixed_step_ms=mean_ms(True),
        )

    def _step_s(self) -> float:
        return self.speed.decode_s(self._sequences) + self.speed.prompt_token_s * self._chunk()

    def _chunk(self) -> float:
        """Return the number of prompt tokens in a step. Short prompts share a step."""
        return min(self.speed.chunk, self._prompt_tokens)


def _finished(submission: SimulatedSubmission, batch_size: int) -> Finished:
    return Finished(
        request_id=submission.request_id,
        index=submission.index,
        first_sample=0,
        prompt_tokens=submission.prompt_tokens,
        cached_tokens=submission.cached_tokens,
        generated_tokens=submission.sequences * submission.output_each,
        preemptions=0,
        batch_size=batch_size,
        finish_reason=["length"] * submission.sequences,
        credit_tokens=submission.prompt_tokens,
    )
