"""Tests of step timing, with a clock that advances only during launches and waits."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from engine import core
from engine.plan import StepPlan, StepTokens
from tests.engine.scheduling.simulated_engine import SimulatedEngine, both_overlaps
from tests.engine.scheduling.simulated_runner import SimulatedRunner, SimulatedStep

LAUNCH_S, STEP_S = 0.015, 0.1


class Clock:
    now = 1000.0

    def perf_counter(self) -> float:
        return self.now


class Device(SimulatedRunner):
    """A device on which each step takes `STEP_S`. A step starts when its first kernel is launched or when the
    previous step ends, whichever is later."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(4, 64)
        self._clock = clock
        self._free_at = 0.0

    def launch(self, plan: StepPlan) -> SimulatedStep:
        clock = self._clock
        done_at = self._free_at = max(clock.now, self._free_at) + STEP_S
        clock.now += LAUNCH_S

        class Timed(SimulatedStep):
            def wait(self) -> StepTokens:
                clock.now = max(clock.now, done_at)
                return super().wait()

        return Timed(super().launch(plan).tokens)


@both_overlaps
def test_a_step_of_an_idle_engine_is_timed_from_the_start_of_its_launch(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is launched while another step runs is timed from the end of that other step, so that the
    times add up to the device's busy time."""
    clock = Clock()
    monkeypatch.setattr(core, "time", SimpleNamespace(perf_counter=clock.perf_counter))
    engine = SimulatedEngine(overlap=overlap, runner=Device(clock))
    for _ in range(2):
        clock.now += 60
        engine.submit(40, max_tokens=3)
        lasted = []
        while engine.core.has_work:
            timing = engine.core.step().timing
            lasted += [timing.ms] if timing is not None else []
        assert lasted == pytest.approx([1e3 * STEP_S] * 3)


def test_the_longest_step_with_decodes_names_the_request_with_the_largest_chunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    monkeypatch.setattr(core, "time", SimpleNamespace(perf_counter=clock.perf_counter))

    class Slow(Device):
        """A device on which steps with prefill take longer than other steps."""

        def launch(self, plan: StepPlan) -> SimulatedStep:
            self._free_at = max(clock.now, self._free_at) + STEP_S * len(plan.chunks)
            return super().launch(plan)

    engine = SimulatedEngine(overlap=False, runner=Slow(clock))
    engine.submit(40, max_tokens=30)
    engine.step()
    assert engine.core.take_longest_step() is None, "no sequence decoded in the first step"
    engine.step()
    alone = engine.core.take_longest_step()
    assert alone is not None
    assert (alone.decodes, alone.prompt_tokens, alone.request_id) == (1, 0, "")
    engine.submit(20, max_tokens=30, request_id="small")
    engine.submit(50, max_tokens=30, request_id="large")
    for _ in range(4):
        engine.step()
    longest = engine.core.take_longest_step()
    assert longest is not None
    assert (longest.decodes, longest.prompt_tokens, longest.request_id) == (1, 70, "large")
    assert longest.ms == pytest.approx(1e3 * 3 * STEP_S)
    assert engine.core.take_longest_step() is None, "the step was already returned"
