"""The step loop: intake, schedule, launch, collect, emit.

Torch-free: what computes comes in as a `Runner`. A runner's exception propagates: a replica whose device
failed ends, and is started anew; there is no half-alive engine.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from engine.messages import Finished, Output, StepPlan, StepTokens, Submit
from engine.scheduler import ScheduledStep, Scheduler


class Launched(Protocol):
    """A step on its way."""

    host_gap_us: float
    """After `wait`: how long the device had nothing to do before this step, whoever was there to compute."""

    def wait(self) -> StepTokens:
        """Block until the step's tokens are known."""
        ...

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        ...


class Runner(Protocol):
    """What executes plans, strictly in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> Launched: ...


@dataclass(frozen=True, slots=True)
class Gauges:
    """Where the engine stands; the names are those of `Report`."""

    step: int
    """The last step whose tokens were read."""
    credit_rows: int
    credit_tokens: int
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class StepTiming:
    """How a step went."""

    plan: StepPlan
    ms: float
    """From where its launch began, or the end of the step before it, to its end."""
    idle_us: float
    """How long the device had idled before it although a sequence waited for it. 0 where each came after the
    step before had been planned: whether there was anything to do is unknown."""

    @property
    def mixed(self) -> bool:
        """Whether it computed prompts."""
        return bool(self.plan.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What one turn of the loop brought."""

    step: int
    """The last step whose tokens were read."""
    outputs: dict[Hashable, list[Output]]
    """New outputs by origin: one frame each."""
    finished: list[Finished]
    """Ledgers of submissions that ended."""
    credits_changed: bool
    """Whether credit was granted since the turn before."""
    timing: StepTiming | None
    """Of the collected step; None if this turn collected none."""


@dataclass(slots=True)
class _InFlight:
    scheduled: ScheduledStep
    launched: Launched
    began: float


class EngineCore:
    """Turns submissions into tokens, one `step` at a time. Single-threaded.

    With `overlap`, a step is launched before the tokens of the one before are read, so the device has work
    while the host reads, plans and sends.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        overlap: bool = True,
    ) -> None:
        self.scheduler = scheduler
        self.before_wait: Callable[[StepPlan], None] | None = None
        """Called with the plan of each step whose end the loop is about to wait for."""
        self._runner = runner
        self._steps_ahead = 1 if overlap else 0
        self._in_flight: deque[_InFlight] = deque()
        self._collected = 0
        self._collected_at = 0.0
        self._credits = self._granted()

    # ── intake ───────────────────────────────────────────────────────────────────────────────

    def submit(self, origin: Hashable, submit: Submit) -> None:
        """Queue a submission. It ends exactly once: by an `Output` with `finish` for each sample, and one
        `Finished`; a submission that cannot be computed ends with "error" at the next step."""
        self.scheduler.add(origin, submit)

    def cancel(self, origin: Hashable, handle: int, sample: int | None = None) -> None:
        """End a submission or one sample of it; passed over if it has ended."""
        self.scheduler.cancel(origin, handle, sample)

    def cancel_origin(self, origin: Hashable) -> None:
        """A channel is gone: end what came from it; its outputs are dropped, its ledgers are kept."""
        self.scheduler.cancel_origin(origin)

    def cancel_request(self, request_id: str) -> None:
        """End every submission of a request."""
        self.scheduler.cancel_request(request_id)

    # ── the loop ─────────────────────────────────────────────────────────────────────────────

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do: sequences, steps in flight, or news to hand out."""
        return bool(self._in_flight) or self.scheduler.has_work or self.scheduler.ledger.has_news

    def step(self) -> StepResult:
        """Plan and launch the next step, then read the tokens of the oldest that should be done.

        Returns without waiting when nothing is to be read; raises what the runner raises.
        """
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            # The device works from the first kernel on; a launch of prompts takes the host 15 to 20 ms.
            began = time.perf_counter()
            launched = self._runner.launch(scheduled.plan)
            self._in_flight.append(_InFlight(scheduled, launched, began))
        timing = None
        if self._in_flight and (scheduled is None or len(self._in_flight) > self._steps_ahead):
            oldest = self._in_flight.popleft()
            if self.before_wait is not None:
                self.before_wait(oldest.scheduled.plan)
            timing = self._collect(oldest)
        outputs, finished = self.scheduler.ledger.take()
        before, self._credits = self._credits, self._granted()
        return StepResult(self._collected, outputs, finished, self._credits != before, timing)

    def _collect(self, oldest: _InFlight) -> StepTiming:
        tokens = oldest.launched.wait()
        now = time.perf_counter()
        # A step begins when its launch does, or when the one before it is done.
        step_ms = 1e3 * (now - max(oldest.began, self._collected_at))
        self._collected_at = now
        self._collected = oldest.scheduled.plan.step
        self.scheduler.collect(oldest.scheduled, tokens)
        idle_us = oldest.launched.host_gap_us if oldest.scheduled.waited_for else 0.0
        return StepTiming(oldest.scheduled.plan, step_ms, idle_us)

    def _granted(self) -> tuple[int, int]:
        return self.scheduler.ledger.credit_rows, self.scheduler.ledger.credit_tokens

    # ── the state of things ──────────────────────────────────────────────────────────────────

    def gauges(self) -> Gauges:
        scheduler, pool, ledger = self.scheduler, self.scheduler.pool, self.scheduler.ledger
        return Gauges(
            step=self._collected,
            credit_rows=ledger.credit_rows,
            credit_tokens=ledger.credit_tokens,
            running=scheduler.running,
            waiting=scheduler.waiting,
            blocks_total=pool.total,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            preemptions=ledger.totals.preemptions,
            prompt_tokens=ledger.totals.prompt_tokens,
            cached_tokens=ledger.totals.cached_tokens,
            computed_tokens=ledger.totals.computed_tokens,
            generated_tokens=ledger.totals.generated_tokens,
        )

    def check(self) -> None:
        """Raise InvariantError unless rows, blocks, queue and ledger agree. O(blocks)."""
        self.scheduler.check()
