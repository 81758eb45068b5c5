"""Rank 0's step loop. Each iteration schedules and launches a step, reads an earlier step's tokens, and
returns new outputs.

The device code is passed in as a `StepRunner`, so this module does not load torch. If the runner raises an
exception, the replica's process exits, and the service starts a new replica.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from typing import Protocol

from engine.expert_use import expert_use
from engine.messages import Output
from engine.plan import MemoryPlan, RankPlan, StepPlan, StepTokens
from engine.rank_messages import EngineGauges, Finished, LayerExperts, LongestStep
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import ScheduledStep


class LaunchedStep(Protocol):
    """A launched step, which may still be running on the device."""

    host_gap_us: float
    """Time, in microseconds, that the device was idle before this step for any reason. Set by `wait`."""

    def wait(self) -> StepTokens:
        """Block until the step has finished, then return its tokens. If the step failed, raises its
        exception."""
        ...

    def ready(self) -> bool:
        """True if the step has finished, so that `wait` would not block."""
        ...


class PlanChannels(Protocol):
    """Sends plans to the other ranks. Implemented by `engine.plan_channel.PlanSender`."""

    def send(self, plan: RankPlan) -> None:
        """Queue a plan for every other rank without blocking. Raises RankFailureError if a rank is lost."""

    def flush(self, step: int) -> None:
        """Block until all plans up to `step` have been written. Raises RankFailureError if a rank is lost."""


class StepRunner(Protocol):
    """Executes step plans in launch order."""

    def launch(self, plan: StepPlan) -> LaunchedStep: ...


@dataclass(frozen=True, slots=True)
class StepTiming:
    """Timing of one step."""

    plan: StepPlan
    ms: float
    """Duration in milliseconds, measured from the start of the step's launch or the end of the previous step,
    whichever is later."""
    idle_us: float
    """Time, in microseconds, that the device was idle before the step while sequences were waiting. It is
    0 if all of the step's sequences arrived after the previous step was planned, because the device may then
    have been idle for lack of work."""
    plan_us: float = 0.0
    """Time, in microseconds, that the step loop spent sending the plan to the other ranks, including
    waits."""

    @property
    def mixed(self) -> bool:
        """Whether the step computed prompt tokens."""
        return bool(self.plan.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step loop iteration."""

    step: int
    """Number of the last step whose tokens were read."""
    outputs: dict[Hashable, list[Output]]
    """New outputs, grouped by their submissions' origin. Each origin's outputs are sent in one frame."""
    finished: list[Finished]
    """Final token counts of the submissions that have ended."""
    credits_changed: bool
    """Whether the core has been granted submission credit since the previous iteration."""
    timing: StepTiming | None
    """Timing of the step collected in this iteration, or None."""


@dataclass(slots=True)
class _InFlight:
    scheduled: ScheduledStep
    launched: LaunchedStep
    began: float
    plan_us: float


class EngineCore:
    """Generates the tokens of the scheduler's submissions, one `step` at a time. It is single-threaded.

    Callers add submissions to `scheduler` and cancel them there. With `overlap`, each step is launched before
    the previous step's tokens are read, which keeps the device busy while the host reads tokens, plans the
    next step and sends outputs. With several ranks, `plans` sends each plan to the other ranks.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        *,
        overlap: bool = True,
        plans: PlanChannels | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.plans = plans
        self.before_wait: Callable[[StepPlan], None] | None = None
        """Called with a step's plan before the loop waits for that step to finish."""
        self.paused = False
        """Whether planning is suspended because the model's memory has been released. Sequences cancelled in
        this state are still reported."""
        self._runner = runner
        self._steps_ahead = 1 if overlap else 0
        self._in_flight: deque[_InFlight] = deque()
        self._expert_layers: tuple[LayerExperts, ...] = ()
        self._collected = 0
        self._collected_at = 0.0
        self._longest: LongestStep | None = None
        self._credits = self._granted()

    @property
    def has_work(self) -> bool:
        """Whether `step` has work to do: there are unfinished sequences, steps in flight, or outputs that
        have not been returned yet."""
        plannable = self.scheduler.has_work and not self.paused
        return bool(self._in_flight) or plannable or self.scheduler.accounting.has_news

    @property
    def steps_in_flight(self) -> int:
        """Number of launched steps whose tokens have not been read yet."""
        return len(self._in_flight)

    @property
    def last_step(self) -> int:
        """Number of the last step whose tokens were read."""
        return self._collected

    def step(self) -> StepResult:
        """Plan and launch the next step, then wait for the oldest step in flight and read its tokens. With
        `overlap`, the tokens of a newly launched step are not read before the next call. Exceptions from the
        runner propagate.
        """
        scheduled = None if self.paused else self.scheduler.schedule()
        if scheduled is not None:
            # Measure the step from the start of its launch, because the device starts as soon as the first
            # kernel is launched. For a step with prompts, the host takes 15 to 20 ms to launch all kernels.
            began = time.perf_counter()
            plan_us = self._send(scheduled.plan)
            launched = self._runner.launch(scheduled.plan)
            self._in_flight.append(_InFlight(scheduled, launched, began, plan_us))
        timing = None
        if self._in_flight and (scheduled is None or len(self._in_flight) > self._steps_ahead):
            oldest = self._in_flight.popleft()
            if self.before_wait is not None:
                self.before_wait(oldest.scheduled.plan)
            timing = self._collect(oldest)
        outputs, finished = self.scheduler.accounting.take()
        before, self._credits = self._credits, self._granted()
        return StepResult(self._collected, outputs, finished, self._credits != before, timing)

    def change_memory(self, plan: MemoryPlan) -> None:
        """Send the other ranks a plan to release or restore memory. No step may be in flight."""
        if self.plans is not None:
            self.plans.send(plan)
            self.plans.flush(plan.step)

    def _send(self, plan: StepPlan) -> float:
        """Send a plan to the other ranks and return the time taken in microseconds."""
        if self.plans is None:
            return 0.0
        began = time.perf_counter()
        self.plans.send(plan)
        return 1e6 * (time.perf_counter() - began)

    def _collect(self, oldest: _InFlight) -> StepTiming:
        plan_us = oldest.plan_us
        if self.plans is not None:
            # The other ranks cannot finish the step until they have received the complete plan.
            began = time.perf_counter()
            self.plans.flush(oldest.scheduled.plan.step)
            plan_us += 1e6 * (time.perf_counter() - began)
        tokens = oldest.launched.wait()
        if tokens.expert_choices is not None:
            self._expert_layers = expert_use(tokens.expert_choices)
        now = time.perf_counter()
        step_ms = 1e3 * (now - max(oldest.began, self._collected_at))
        self._collected_at = now
        self._collected = oldest.scheduled.plan.step
        if oldest.scheduled.plan.decodes and (self._longest is None or step_ms > self._longest.ms):
            self._longest = _longest_step(oldest.scheduled, step_ms)
        self.scheduler.collect(oldest.scheduled, tokens)
        idle_us = oldest.launched.host_gap_us if oldest.scheduled.had_work else 0.0
        return StepTiming(oldest.scheduled.plan, step_ms, idle_us, plan_us)

    def take_longest_step(self) -> LongestStep | None:
        """Return the longest step with decodes that was collected since the previous call, or None if there
        was none."""
        longest, self._longest = self._longest, None
        return longest

    def _granted(self) -> tuple[int, int]:
        return self.scheduler.accounting.credit_seqs, self.scheduler.accounting.credit_tokens

    def gauges(self) -> EngineGauges:
        """Return the engine's current counters and gauges."""
        scheduler, pool, accounting = self.scheduler, self.scheduler.pool, self.scheduler.accounting
        return EngineGauges(
            step=self._collected,
            credit_seqs=accounting.credit_seqs,
            credit_tokens=accounting.credit_tokens,
            returned_seqs=tuple(accounting.returned_seqs),
            returned_tokens=tuple(accounting.returned_tokens),
            running=scheduler.running,
            waiting=scheduler.waiting,
            waiting_seqs=scheduler.waiting_by_level,
            blocks_total=pool.total,
            blocks_used=pool.used,
            blocks_cached=pool.cached,
            blocks_shared=pool.shared,
            evictions=pool.evictions,
            expert_layers=self._expert_layers,
            **asdict(accounting.totals),
        )


def _longest_step(step: ScheduledStep, ms: float) -> LongestStep:
    largest, request_id, prompt_tokens = 0, "", 0
    for chunk in step.chunks:
        tokens = chunk.end - chunk.start
        prompt_tokens += tokens
        if tokens > largest:
            largest, request_id = tokens, chunk.sequence.submission.submit.request_id
    return LongestStep(ms, len(step.plan.decodes), prompt_tokens, request_id)
