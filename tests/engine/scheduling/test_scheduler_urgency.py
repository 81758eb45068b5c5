"""Tests of priorities: urgent submissions, and real-time submissions against background ones."""

from __future__ import annotations

import pytest

from engine.messages import BLOCK_TOKENS, Submit
from engine.plan import StepPlan
from tests.engine.scheduling.test_scheduler_rules import SimulatedEngine, both_overlaps


def computed(plan: StepPlan | None) -> list[int]:
    """Return the number of tokens of each chunk."""
    assert plan is not None
    return [len(chunk.token_ids) for chunk in plan.chunks]


def started(engine: SimulatedEngine, submit: Submit) -> int:
    """Return the step that computed a submission's first tokens."""
    return next(
        plan.step
        for plan in engine.runner.plans
        for chunk in plan.chunks
        if chunk.start == 0 and chunk.token_ids == submit.prompt_token_ids[: len(chunk.token_ids)]
    )


def test_an_urgent_submission_starts_before_waiting_ones_of_its_class() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64)
    crowd = [engine.submit(64, max_tokens=1) for _ in range(3)]
    urgent = engine.submit(64, max_tokens=1, urgent=True)
    engine.drain()
    assert [started(engine, submit) for submit in (urgent, *crowd)] == [1, 2, 3, 4]


def test_an_urgent_submission_is_served_before_a_running_long_prefill() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64, overlap=False)
    long = engine.submit(300, max_tokens=1)
    assert computed(engine.step()) == [64]
    urgent = engine.submit(100, max_tokens=1, urgent=True)
    assert computed(engine.step()) == [64], "the urgent one has the whole step"
    assert computed(engine.step()) == [36, 28], "and goes on before the long one"
    engine.drain()
    for submit in (urgent, long):
        engine.expect_alone(submit)


def test_urgency_does_not_overtake_a_higher_class() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64, overlap=False)
    engine.submit(300, max_tokens=1, priority=1)
    engine.step()
    engine.submit(100, max_tokens=1, priority=2, urgent=True)
    engine.submit(10, max_tokens=1, priority=0)
    chunks = engine.step()
    assert chunks is not None and [chunk.start for chunk in chunks.chunks] == [64]
    engine.drain()


@both_overlaps
def test_real_time_preempts_the_youngest_background_sequences_for_slots(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, max_num_seqs=4)
    background = [engine.submit(20, max_tokens=60, priority=3) for _ in range(3)]
    batch = engine.submit(20, max_tokens=60, priority=2)
    while not engine.outputs:
        engine.step()
    real_time = [engine.submit(10, max_tokens=4, priority=0) for _ in range(2)]
    before = len(engine.runner.plans)
    engine.step()
    plan = engine.runner.plans[before]
    assert len(plan.setups) == 2, "both start in the next step"
    engine.drain()
    preempted = {ledger.request_id: ledger.preemptions for ledger in engine.finished}
    assert [preempted[submit.request_id] for submit in background] == [0, 1, 1]
    assert preempted[batch.request_id] == 0
    for submit in (*background, batch, *real_time):
        engine.expect_alone(submit)


@pytest.mark.parametrize("priority", [1, 2])
def test_only_background_is_preempted_and_only_for_real_time(priority: int) -> None:
    engine = SimulatedEngine(max_num_seqs=2)
    for other in (priority, priority):
        engine.submit(20, max_tokens=30, priority=other)
    engine.step()
    engine.submit(10, max_tokens=2, priority=0)
    engine.drain()
    engine.submit(20, max_tokens=30, priority=3)
    engine.submit(20, max_tokens=30, priority=3)
    engine.step()
    engine.submit(10, max_tokens=2, priority=priority, urgent=True)
    engine.drain()
    assert not any(ledger.preemptions for ledger in engine.finished)


@both_overlaps
def test_real_time_preempts_background_for_blocks_only_if_that_frees_enough(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, blocks=8, max_num_seqs=4)
    background = [engine.submit(2 * BLOCK_TOKENS - 10, max_tokens=8, priority=3) for _ in range(2)]
    interactive = engine.submit(2 * BLOCK_TOKENS - 10, max_tokens=40)
    while len(engine.outputs) < 3:
        engine.step()
    # Even without the background sequences, five blocks would not be free.
    too_large = engine.submit(7 * BLOCK_TOKENS - 10, max_tokens=2, priority=0)
    engine.step()
    assert engine.scheduler.accounting.totals.preemptions == 0
    engine.scheduler.cancel_request(too_large.request_id)
    fits = engine.submit(3 * BLOCK_TOKENS - 10, max_tokens=2, priority=0)
    engine.drain()
    preempted = {ledger.request_id: ledger.preemptions for ledger in engine.finished}
    assert [preempted[submit.request_id] for submit in background] == [0, 1]
    assert preempted[interactive.request_id] == 0
    engine.expect_alone(fits)


def test_an_urgent_prompts_step_leaves_out_other_prompts_but_never_twice_in_a_row() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64)
    engine.submit(400, max_tokens=1)
    assert computed(engine.step()) == [64]
    engine.submit(10, max_tokens=1, urgent=True)
    assert computed(engine.step()) == [10], "nothing of the long prompt"
    engine.submit(10, max_tokens=1, urgent=True)
    assert computed(engine.step()) == [10, 54], "it gets on in every other step"
