"""Tests of priorities: urgent submissions compete with less urgent ones, and real-time submissions compete
with background ones."""

from __future__ import annotations

import pytest

from engine.messages import BLOCK_TOKENS, Submit
from engine.plan import StepPlan
from tests.engine.scheduling.simulated_engine import SimulatedEngine, both_overlaps
from tests.prompts import prompt_of


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
        if chunk.start == 0 and chunk.token_ids == prompt_of(submit)[: len(chunk.token_ids)]
    )


def test_an_urgent_submission_starts_before_waiting_ones_of_its_class() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64)
    crowd = [engine.submit(64, max_tokens=1) for _ in range(3)]
    urgent = engine.submit(64, max_tokens=1, urgency=2)
    engine.drain()
    assert [started(engine, submit) for submit in (urgent, *crowd)] == [1, 2, 3, 4]


def test_an_urgent_submission_is_served_before_a_running_long_prefill() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64, overlap=False)
    long = engine.submit(300, max_tokens=1)
    assert computed(engine.step()) == [64]
    urgent = engine.submit(100, max_tokens=1, urgency=2)
    assert computed(engine.step()) == [64], "the urgent submission has the whole step"
    assert computed(engine.step()) == [36], "the urgent submission continues before the long one"
    assert computed(engine.step()) == [64]
    engine.drain()
    for submit in (urgent, long):
        engine.expect_alone(submit)


def test_urgency_does_not_overtake_a_higher_class() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64, overlap=False)
    engine.submit(300, max_tokens=1, priority=1)
    engine.step()
    engine.submit(100, max_tokens=1, priority=2, urgency=2)
    chunks = engine.step()
    assert chunks is not None and [chunk.start for chunk in chunks.chunks] == [64]
    engine.drain()


@pytest.mark.parametrize("better", [0, 1, 2])
def test_a_higher_class_is_admitted_before_the_next_chunk_of_a_lower_one(better: int) -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64, overlap=False)
    engine.submit(300, max_tokens=1, priority=3)
    engine.step()
    short = engine.submit(10, max_tokens=1, priority=better)
    assert computed(engine.step()) == [10]
    assert started(engine, short) == 2
    assert computed(engine.step()) == [64]
    engine.drain()


def test_the_prompts_of_a_class_are_left_out_once_for_each_higher_level_in_a_row() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64, overlap=False)
    engine.submit(400, max_tokens=1, priority=3)
    assert computed(engine.step()) == [64]
    engine.submit(10, max_tokens=1, priority=2)
    assert computed(engine.step()) == [10]
    engine.submit(11, max_tokens=1, priority=1)
    assert computed(engine.step()) == [11], "a higher priority leaves out the long prompt again"
    engine.submit(12, max_tokens=1, priority=2)
    assert computed(engine.step()) == [12, 52], "a lower priority does not leave it out"
    engine.drain()


@both_overlaps
def test_samples_of_one_submission_leave_the_reserved_slots_free(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, max_num_seqs=8)
    wide = engine.submit(20, max_tokens=30, n=20, reserved_slots=2)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.running == 6
    narrow = engine.submit(10, max_tokens=4, urgency=2)
    before = len(engine.runner.plans)
    engine.step()
    assert [setup.slot for setup in engine.runner.plans[before].setups], (
        "the submission starts in the next step"
    )
    engine.drain()
    for submit in (wide, narrow):
        engine.expect_alone(submit)


def test_a_wide_submission_that_finds_only_reserved_slots_does_not_block_other_levels() -> None:
    engine = SimulatedEngine(max_num_seqs=4)
    engine.submit(20, max_tokens=30, n=9, priority=0, reserved_slots=1)
    engine.step()
    light = engine.submit(10, max_tokens=2, priority=1, urgency=2, reserved_slots=1)
    engine.step()
    assert started(engine, light) == 2
    engine.drain()


@pytest.mark.parametrize(("better", "worse"), [((1, 0), (2, 0)), ((1, 2), (1, 0)), ((0, 0), (1, 2))])
def test_a_higher_level_preempts_lower_ones_for_blocks(
    better: tuple[int, int], worse: tuple[int, int]
) -> None:
    engine = SimulatedEngine(blocks=8, max_num_seqs=4)
    for _ in range(2):
        engine.submit(3 * BLOCK_TOKENS, max_tokens=40, priority=worse[0], urgency=worse[1])
    engine.step()
    submit = engine.submit(BLOCK_TOKENS + 10, max_tokens=2, priority=better[0], urgency=better[1])
    before = len(engine.runner.plans)
    engine.step()
    assert engine.scheduler.accounting.totals.preemptions == 1
    assert started(engine, submit) == before + 1, "the submission starts in the next step"
    engine.drain()


def test_a_long_urgent_prompt_does_not_preempt_its_own_class() -> None:
    engine = SimulatedEngine(blocks=8, max_num_seqs=4)
    for _ in range(2):
        engine.submit(3 * BLOCK_TOKENS, max_tokens=40)
    engine.step()
    engine.submit(3 * BLOCK_TOKENS, max_tokens=2, urgency=1)
    engine.step()
    assert engine.scheduler.accounting.totals.preemptions == 0
    engine.drain()


@both_overlaps
def test_real_time_preempts_the_youngest_background_sequences_for_slots(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, max_num_seqs=4)
    background = [engine.submit(20, max_tokens=60, priority=3) for _ in range(3)]
    batch = engine.submit(20, max_tokens=60, priority=2)
    while len({output.handle for output in engine.outputs}) < 4:
        engine.step()
    real_time = [engine.submit(10, max_tokens=4, priority=0) for _ in range(2)]
    before = len(engine.runner.plans)
    engine.step()
    plan = engine.runner.plans[before]
    assert len(plan.setups) == 2, "both submissions start in the next step"
    engine.drain()
    preempted = {finished.request_id: finished.preemptions for finished in engine.finished}
    assert [preempted[submit.request_id] for submit in background] == [0, 1, 1]
    assert preempted[batch.request_id] == 0
    for submit in (*background, batch, *real_time):
        engine.expect_alone(submit)


@both_overlaps
@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((0, 0), (1, 0)),
        ((0, 2), (3, 0)),
        ((0, 2), (0, 0)),
        ((0, 2), (1, 3)),
        ((1, 0), (2, 0)),
        ((1, 2), (3, 0)),
        ((1, 2), (1, 0)),
        ((2, 0), (3, 0)),
    ],
)
def test_a_higher_class_or_an_urgent_submission_preempts_samples_for_slots(
    better: tuple[int, int], worse: tuple[int, int], overlap: bool
) -> None:
    engine = SimulatedEngine(max_num_seqs=4, overlap=overlap)
    wide = engine.submit(20, max_tokens=60, n=9, priority=worse[0], urgency=worse[1])
    while len(engine.outputs) < 8:
        engine.step()
    crowd = [engine.submit(10, max_tokens=4, priority=better[0], urgency=better[1]) for _ in range(3)]
    before = len(engine.runner.plans)
    engine.step()
    assert len(engine.runner.plans[before].setups) == 3, "all three start in the next step"
    engine.drain()
    assert engine.finished[-1].preemptions == 3
    for submit in (wide, *crowd):
        engine.expect_alone(submit)


@pytest.mark.parametrize(
    ("better", "worse"),
    [
        ((0, 0), (1, 2)),
        ((0, 3), (0, 2)),
        ((1, 2), (1, 1)),
        ((1, 0), (1, 0)),
        ((2, 0), (2, 0)),
        ((3, 0), (3, 0)),
    ],
)
def test_urgent_sequences_of_the_same_class_and_equals_are_not_preempted_for_slots(
    better: tuple[int, int], worse: tuple[int, int]
) -> None:
    engine = SimulatedEngine(max_num_seqs=2)
    for _ in range(2):
        engine.submit(20, max_tokens=30, priority=worse[0], urgency=worse[1])
    engine.step()
    engine.submit(10, max_tokens=2, priority=better[0], urgency=better[1])
    engine.drain()
    assert not any(finished.preemptions for finished in engine.finished)


def test_waiting_samples_leave_the_slots_free_that_later_submissions_reserve() -> None:
    engine = SimulatedEngine(max_num_seqs=8)
    engine.submit(20, max_tokens=10, n=20)
    for _ in range(3):
        engine.step()
    assert engine.scheduler.running == 8
    engine.submit(10, max_tokens=60, priority=3, reserved_slots=3)
    while engine.scheduler.waiting > 1:
        engine.step()
        if len(engine.finished) == 0 and engine.scheduler.running < 8:
            assert engine.scheduler.running <= 5
    engine.drain()


def test_preempted_forks_do_not_interrupt_their_leaders_prefill() -> None:
    engine = SimulatedEngine(max_num_seqs=4, max_num_batched_tokens=64, overlap=False)
    wide = engine.submit(300, max_tokens=10, n=4)
    engine.step()
    crowd = [engine.submit(10, max_tokens=4, urgency=2) for _ in range(3)]
    plan = engine.step()
    assert plan is not None and len(plan.setups) == 3, "all three start in the next step"
    while not engine.outputs or engine.outputs[-1].handle != wide.handle:
        engine.step()
    starts = [
        c.start for plan in engine.runner.plans for c in plan.chunks if len(c.token_ids) > 10 or c.start
    ]
    assert starts[:5] == sorted(set(starts[:5])), "no part of the prompt is computed again"
    engine.drain()
    assert engine.finished[-1].preemptions == 3
    for submit in (wide, *crowd):
        engine.expect_alone(submit)


@both_overlaps
def test_real_time_preempts_background_for_blocks_only_if_that_frees_enough(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, blocks=8, max_num_seqs=4)
    background = [engine.submit(2 * BLOCK_TOKENS - 10, max_tokens=8, priority=3) for _ in range(2)]
    interactive = engine.submit(2 * BLOCK_TOKENS - 10, max_tokens=40, priority=0)
    while len({output.handle for output in engine.outputs}) < 3:
        engine.step()
    # Even if all background sequences were preempted, fewer than five blocks would be free.
    too_large = engine.submit(7 * BLOCK_TOKENS - 10, max_tokens=2, priority=0)
    engine.step()
    assert engine.scheduler.accounting.totals.preemptions == 0
    engine.scheduler.cancel_request(too_large.request_id)
    fits = engine.submit(3 * BLOCK_TOKENS - 10, max_tokens=2, priority=0)
    engine.drain()
    preempted = {finished.request_id: finished.preemptions for finished in engine.finished}
    assert [preempted[submit.request_id] for submit in background] == [0, 1]
    assert preempted[interactive.request_id] == 0
    engine.expect_alone(fits)


def test_blocks_that_samples_share_count_once_among_those_that_preemption_would_free() -> None:
    engine = SimulatedEngine(blocks=10, max_num_seqs=4, overlap=False)
    interactive = engine.submit(4 * BLOCK_TOKENS - 45, max_tokens=40, priority=0)
    background = engine.submit(3 * BLOCK_TOKENS - 40, max_tokens=30, n=2, priority=3)
    while len(engine.outputs) < 6:
        engine.step()
    # The two samples use four blocks: two shared blocks, and one separate block each. One of the two free
    # blocks is reserved as the watermark. Preempting the samples could therefore not provide the seven blocks
    # that are needed.
    assert engine.scheduler.pool.available == 2
    large = engine.submit(7 * BLOCK_TOKENS - 10, max_tokens=2, priority=0)
    engine.drain()
    assert not any(finished.preemptions for finished in engine.finished)
    for submit in (interactive, background, large):
        engine.expect_alone(submit)


def test_an_urgent_prompts_step_leaves_out_other_prompts_but_never_twice_in_a_row() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64)
    engine.submit(400, max_tokens=1)
    assert computed(engine.step()) == [64]
    engine.submit(10, max_tokens=1, urgency=2)
    assert computed(engine.step()) == [10], "the step has no chunk of the long prompt"
    engine.submit(10, max_tokens=1, urgency=2)
    assert computed(engine.step()) == [10, 54], "the long prompt continues in every other step"
