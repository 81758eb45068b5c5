"""The step loop: schedule, launch, collect, emit.

This module does not load torch: the device code is passed in as a `StepRunner`. An exception of the runner
propagates and ends the replica's process; the core then starts a new one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import asdict, dataclass
from typing import Protocol

from engine.messages import EngineGauges, Finished, Output
from engine.plan import StepPlan, StepTokens
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.step import ScheduledStep


class LaunchedStep(Protocol):
    """A step that was launched and may still be running."""

    host_gap_us: float
    """Time for which the device was idle before this step, for any reason. Set by `wait`."""

    def wait(self) -> StepTokens:
        """Block until the step's tokens are known, and return them. Raises the step's exception if it
        failed."""
        ...

    def ready(self) -> bool:
        """Return whether `wait` would return at once."""
        ...


class PlanChannels(Protocol):
    """Sends plans to the other ranks (`engine.plan_channel.PlanSender`)."""

    def send(self, plan: StepPlan) -> None:
        """Hand a plan over to every other rank without waiting. Raises RankLost if a rank is lost."""

    def flush(self, step: int) -> None:
        """Wait until the plans up to `step` are written. Raises RankLost if a rank is lost."""


class StepRunner(Protocol):
    """Executes plans strictly in the order in which they are launched."""

    def launch(self, plan: StepPlan) -> LaunchedStep: ...


@dataclass(frozen=True, slots=True)
class StepTiming:
    """The timing of one step."""

    plan: StepPlan
    ms: float
    """Duration, from the start of the step's launch or the end of the previous step, whichever is later."""
    idle_us: float
    """Time for which the device was idle before the step while a sequence waited for it. 0 if every sequence
    of the step arrived after the previous step was planned: the device may then have had nothing to do."""
    plan_us: float = 0.0
    """Time that the step loop spent sending the plan to the other ranks, waits included."""

    @property
    def mixed(self) -> bool:
        """Whether the step computed prompts."""
        return bool(self.plan.chunks)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one turn of the loop."""

    step: int
    """The last step whose tokens were read."""
    outputs: dict[Hashable, list[Output]]
    """New outputs by origin: one frame each."""
    finished: list[Finished]
    """Final counts of the submissions that ended."""
    credits_changed: bool
    """Whether credit was granted since the previous turn."""
    timing: StepTiming | None
    """Timing of the collected step; None if this turn collected none."""


@dataclass(slots=True)
class _InFlight:
    scheduled: ScheduledStep
    launched: LaunchedStep
    began: float
    plan_us: float


class EngineCore:
    """Turns the scheduler's submissions into tokens, one `step` at a time. Single-threaded.

    Submissions are added to and cancelled on `scheduler` directly. With `overlap`, each step is launched
    before the tokens of the previous one are read, so that the device has work while the host reads, plans
    and sends. With several ranks, `plans` sends each plan to the other ranks.
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
        """Called with the plan of each step before the loop waits for its end."""
        self._runner = runner
        self._steps_ahead = 1 if overlap else 0
        self._in_flight: deque[_InFlight] = deque()
        self._collected = 0
        self._collected_at = 0.0
        self._credits = self._granted()

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do: unfinished sequences, steps in flight, or outputs to return."""
        return bool(self._in_flight) or self.scheduler.has_work or self.scheduler.accounting.has_news

    def step(self) -> StepResult:
        """Plan and launch the next step, then read the tokens of the oldest step in flight if it is due.

        Does not wait if no step is due. Raises the exceptions of the runner.
        """
        scheduled = self.scheduler.schedule()
        if scheduled is not None:
            # The duration counts from the start of the launch, because the device starts with the first
            # kernel: launching all kernels of a step with prompts takes the host 15 to 20 ms.
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

    def _send(self, plan: StepPlan) -> float:
        """Send a plan to the other ranks. Returns the µs that this took."""
        if self.plans is None:
            return 0.0
        began = time.perf_counter()
        self.plans.send(plan)
        return 1e6 * (time.perf_counter() - began)

    def _collect(self, oldest: _InFlight) -> StepTiming:
        plan_us = oldest.plan_us
        if self.plans is not None:
            # The other ranks cannot finish the step without the whole plan.
            began = time.perf_counter()
            self.plans.flush(oldest.scheduled.plan.step)
            plan_us += 1e6 * (time.perf_counter() - began)
        tokens = oldest.launched.wait()
        now = time.perf_counter()
        step_ms = 1e3 * (now - max(oldest.began, self._collected_at))
        self._collected_at = now
        self._collected = oldest.scheduled.plan.step
        self.scheduler.collect(oldest.scheduled, tokens)
        idle_us = oldest.launched.host_gap_us if oldest.scheduled.had_work else 0.0
        return StepTiming(oldest.scheduled.plan, step_ms, idle_us, plan_us)

    def _granted(self) -> tuple[int, int]:
        return self.scheduler.accounting.credit_seqs, self.scheduler.accounting.credit_tokens

    def gauges(self) -> EngineGauges:
        """Return the current state of the engine."""
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
            **asdict(accounting.totals),
        )
