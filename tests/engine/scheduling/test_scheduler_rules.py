"""Tests of individual rules of the scheduler: order, preemption, and samples of one prompt."""

from __future__ import annotations

import pytest

from engine.messages import BLOCK_TOKENS
from tests.engine.scheduling.simulated_engine import (
    SimulatedEngine,
    both_overlaps,
)
from tests.engine.scheduling.simulated_runner import alone

# ── order ─────────────────────────────────────────────────────────────────────────────────────────


def test_decodes_come_first_and_a_long_prompt_fills_the_rest_of_each_step() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=64, max_mixed_tokens=64, blocks=32)
    engine.submit(10, max_tokens=100)
    engine.step()
    engine.submit(300)
    plans = [engine.step() for _ in range(5)]
    assert all(plan is not None and len(plan.decodes) == 1 for plan in plans)
    assert [len(chunk.token_ids) for plan in plans if plan for chunk in plan.chunks] == [63, 63, 63, 63, 48]


def test_a_step_with_decodes_has_the_smaller_token_budget() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=128, max_mixed_tokens=40, blocks=32)
    engine.submit(128, max_tokens=100)
    engine.submit(300)
    # The whole token budget applies until a sequence decodes. From then on, a smaller budget applies, which
    # includes the decodes.
    plans = [engine.step() for _ in range(9)]
    assert [
        (len(plan.decodes), sum(len(chunk.token_ids) for chunk in plan.chunks)) for plan in plans if plan
    ] == [(0, 128), *[(1, 39)] * 7, (1, 27)]


def test_prefills_make_progress_while_all_other_slots_decode() -> None:
    engine = SimulatedEngine(max_num_seqs=4, max_num_batched_tokens=128, max_mixed_tokens=4)
    for _ in range(3):
        engine.submit(4, max_tokens=60)
    engine.step()
    engine.submit(10)
    plans = [engine.step() for _ in range(10)]
    assert [len(chunk.token_ids) for plan in plans if plan for chunk in plan.chunks] == [1] * 10


def test_a_running_prefill_continues_before_new_admissions_of_its_class() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=100)
    engine.submit(150, priority=3)
    engine.step()
    engine.submit(80, priority=3)
    plan = engine.step()
    assert plan is not None
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(100, 50), (0, 50)]


def test_admission_is_by_class_then_arrival() -> None:
    engine = SimulatedEngine(max_num_seqs=1, max_num_batched_tokens=64)
    late, early, urgent = (engine.submit(4, max_tokens=1, priority=p) for p in (3, 2, 0))
    second = engine.submit(4, max_tokens=1, priority=2)
    engine.drain()
    assert [o.handle for o in engine.outputs] == [s.handle for s in (urgent, early, second, late)]


def test_no_sequence_overtakes_the_head_of_the_queue_while_it_waits_for_blocks() -> None:
    engine = SimulatedEngine(blocks=6)
    engine.submit(4 * BLOCK_TOKENS, max_tokens=20)
    engine.step()
    large, small = engine.submit(3 * BLOCK_TOKENS, max_tokens=2), engine.submit(5, max_tokens=2)
    engine.drain()
    started = list(dict.fromkeys(output.handle for output in engine.outputs))
    assert started.index(large.handle) < started.index(small.handle)


def test_the_head_of_the_queue_starts_as_soon_as_its_blocks_are_free() -> None:
    engine = SimulatedEngine(blocks=7, max_num_seqs=3, overlap=False)
    engine.submit(2 * BLOCK_TOKENS - 30, max_tokens=10)
    long = engine.submit(2 * BLOCK_TOKENS - 30, max_tokens=25)
    engine.submit(4 * BLOCK_TOKENS, max_tokens=2)
    engine.drain()
    started = {s.prompt_tokens: plan.step for plan in engine.runner.plans for s in plan.setups}
    assert started == {long.prompt_tokens: 1, 4 * BLOCK_TOKENS: 11}


def test_admission_keeps_the_watermark_of_free_blocks_while_sequences_run() -> None:
    engine = SimulatedEngine(blocks=4, max_model_len=256)
    engine.submit(10, max_tokens=3)
    engine.step()
    engine.submit(3 * BLOCK_TOKENS, max_tokens=2)
    assert engine.step() is not None
    assert engine.scheduler.pool.available == 3, "the prompt would fit without the watermark"
    assert (engine.scheduler.running, engine.scheduler.waiting) == (1, 1)
    engine.drain()
    assert [finished.finish_reason for finished in engine.finished] == [["length"], ["length"]]


# ── preemption ────────────────────────────────────────────────────────────────────────────────────


@both_overlaps
def test_the_youngest_sequence_of_the_lowest_class_is_preempted_first(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, blocks=6, max_num_seqs=4)
    oldest = engine.submit(50, max_tokens=100, priority=1)
    low = engine.submit(50, max_tokens=100, priority=2)
    young = engine.submit(50, max_tokens=100, priority=1)
    engine.drain()
    for submit in (oldest, low, young):
        engine.expect_alone(submit)
    preempted = {finished.request_id: finished.preemptions for finished in engine.finished}
    assert preempted[low.request_id] >= 1
    assert preempted[oldest.request_id] == preempted[young.request_id] == 0


@both_overlaps
def test_a_preempted_sequence_is_admitted_before_new_ones_of_its_class(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, blocks=4, max_num_seqs=2)
    engine.submit(60, max_tokens=80)
    victim = engine.submit(60, max_tokens=120)
    new = engine.submit(10, max_tokens=2)
    engine.drain()
    finished_by_id = {finished.request_id: finished for finished in engine.finished}
    assert finished_by_id[victim.request_id].preemptions == 1
    readmitted = [
        plan.step for plan in engine.runner.plans for s in plan.setups if s.sampling.max_tokens == 120
    ]
    started = [plan.step for plan in engine.runner.plans for s in plan.setups if s.sampling.max_tokens == 2]
    assert len(readmitted) == 2 and started[0] >= readmitted[1]
    engine.expect_alone(new)


@both_overlaps
def test_prompt_logprobs_survive_a_preemption_during_prefill(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, blocks=5, max_num_seqs=2, max_num_batched_tokens=3)
    engine.submit(60, max_tokens=80)
    while engine.scheduler.waiting or not engine.outputs:
        engine.step()
    scored = engine.submit(180, max_tokens=60, prompt_logprobs=0, priority=2)
    engine.drain()
    finished = next(f for f in engine.finished if f.request_id == scored.request_id)
    assert finished.preemptions == 1
    first = next(output for output in engine.outputs if output.handle == scored.handle)
    assert first.prompt_logprobs == alone(scored, 0, 512).prompt_logprobs
    engine.expect_alone(scored)


# ── samples ───────────────────────────────────────────────────────────────────────────────────────


@both_overlaps
@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 130])
def test_samples_share_one_prefill_and_copy_the_partial_block(overlap: bool, prompt: int) -> None:
    engine = SimulatedEngine(overlap=overlap)
    submit = engine.submit(prompt, n=3, temperature=1.0, max_tokens=70, first_sample=2)
    engine.drain()
    engine.expect_alone(submit)
    assert len({tuple(engine.told(submit, sample)[0]) for sample in (2, 3, 4)}) == 3
    plans = engine.runner.plans
    assert sum(len(chunk.token_ids) for plan in plans for chunk in plan.chunks) == prompt
    assert sum(len(plan.copies) for plan in plans) == (2 if prompt % BLOCK_TOKENS else 0)


def test_samples_without_a_free_slot_run_later_with_the_cached_prompt() -> None:
    engine = SimulatedEngine(max_num_seqs=2)
    submit = engine.submit(130, n=3, temperature=1.0)
    engine.drain()
    engine.expect_alone(submit)
    cached = [output.cached_tokens for output in engine.outputs if output.cached_tokens is not None]
    assert cached == [0, 0, 128]
    computed = sum(len(chunk.token_ids) for plan in engine.runner.plans for chunk in plan.chunks)
    assert computed == 130 + 2
    (finished,) = engine.finished
    assert (finished.cached_tokens, finished.generated_tokens, finished.finish_reason) == (
        0,
        24,
        ["length"] * 3,
    )
