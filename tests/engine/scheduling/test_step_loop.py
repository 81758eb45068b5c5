"""Tests of the step loop: runner failures, overlap, steady decodes, and the release of sequences."""

from __future__ import annotations

import gc

import pytest

from engine.plan import StepPlan, StepTokens
from engine.scheduling.sequence import Sequence, Submission
from tests.engine.scheduling.simulated_engine import FRONT, AlwaysStop, SimulatedEngine, both_overlaps
from tests.engine.scheduling.simulated_runner import SimulatedRunner, SimulatedStep


def test_an_exception_of_the_runner_propagates() -> None:
    class Broken(AlwaysStop):
        def launch(self, plan: StepPlan) -> SimulatedStep:
            raise RuntimeError("device lost")

    engine = SimulatedEngine(runner=Broken())
    engine.submit(5)
    with pytest.raises(RuntimeError, match="device lost"):
        engine.core.step()


def test_with_overlap_the_next_step_is_launched_before_tokens_are_read() -> None:
    reads: list[tuple[int, int]] = []

    class Watched(SimulatedRunner):
        def launch(self, plan: StepPlan) -> SimulatedStep:
            step = super().launch(plan)
            launched = self

            class Read(SimulatedStep):
                def wait(self) -> StepTokens:
                    reads.append((plan.step, len(launched.plans)))
                    return super().wait()

            return Read(step.tokens)

    engine = SimulatedEngine(runner=Watched(4, 64))
    engine.submit(5, max_tokens=4)
    engine.drain()
    assert reads == [(1, 2), (2, 3), (3, 4), (4, 4)]


def test_the_plan_of_a_steady_decode_step_has_only_slots() -> None:
    engine = SimulatedEngine()
    for _ in range(3):
        engine.submit(5, max_tokens=30)
    engine.step()
    plan = engine.step()
    assert plan is not None
    assert (plan.setups, plan.blocks, plan.copies, plan.chunks) == ([], [], [], [])
    assert len(plan.decodes) == 3


@both_overlaps
def test_ended_sequences_are_freed_by_reference_counting(overlap: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        engine = SimulatedEngine(overlap=overlap, max_num_seqs=3, blocks=5)
        for n in (1, 2, 3):
            engine.submit(100, n=n, max_tokens=40)
        engine.scheduler.cancel(FRONT, engine.submit(100, n=2).handle)
        engine.drain()
        assert engine.core.gauges().preemptions
        left = [one for one in gc.get_objects() if type(one) in (Sequence, Submission)]
        assert not left
    finally:
        gc.enable()


def test_a_waiting_sequence_is_cancelled_while_planning_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.scheduling.results.MAX_RELEASED", 0)
    engine = SimulatedEngine()
    running = [engine.submit(100) for _ in range(2)]
    engine.step()
    for submit in running:
        engine.scheduler.cancel(FRONT, submit.handle)
    engine.drain()
    engine.core.paused = True
    waiting = engine.submit(100)
    engine.scheduler.cancel(FRONT, waiting.handle)
    engine.drain()
    assert engine.finished[-1].request_id == waiting.request_id
    assert engine.told(waiting) == ([], "cancelled")


def test_idle_time_counts_only_if_a_sequence_was_waiting() -> None:
    """The engine may have been idle for hours before a step that has only new sequences, so this idle time
    must not be counted."""
    engine = SimulatedEngine(overlap=False)
    engine.submit(40, max_tokens=1)
    assert not engine.waited_for(), "no sequence was waiting before the first step"
    engine.submit(40, max_tokens=2)
    assert not engine.waited_for(), "the sequence arrived after the previous step was planned"
    assert engine.waited_for(), "the sequence is decoding"
    engine.submit(600 - 100, max_tokens=1)
    assert not engine.waited_for()
    assert engine.waited_for(), "a sequence is waiting for the rest of its prompt"
    for _ in range(6):
        engine.submit(250, max_tokens=1)
    assert not engine.waited_for()
    assert engine.waited_for(), "sequences that did not fit into the previous step are waiting"
    engine.drain()
    waiting = [engine.submit(250, max_tokens=1) for _ in range(2)]
    assert not engine.waited_for()
    engine.scheduler.cancel(FRONT, waiting[1].handle)
    engine.submit(40, max_tokens=1)
    assert not engine.waited_for(), "no sequence is waiting"
