"""Tests of the final token counts of submissions, and of how credit is counted."""

from __future__ import annotations

from engine.messages import BLOCK_TOKENS
from tests.engine.scheduling.simulated_engine import (
    SimulatedEngine,
    both_overlaps,
)
from tests.prompts import prompt_of


def test_the_first_output_carries_the_cached_tokens_and_the_final_counts_the_batch_size() -> None:
    engine = SimulatedEngine()
    warm = engine.submit(130, max_tokens=1)
    engine.drain()
    engine.outputs.clear()
    engine.submit(5, max_tokens=40)
    engine.step()
    engine.submit(prompt_of(warm), max_tokens=3)
    engine.drain()
    cached = {o.handle: o.cached_tokens for o in engine.outputs if o.cached_tokens is not None}
    assert cached == {2: 0, 3: 128}
    finished = next(f for f in engine.finished if f.request_id == "request-3")
    assert (finished.prompt_tokens, finished.cached_tokens, finished.batch_size) == (130, 128, 2)


def test_generated_tokens_are_cached_too() -> None:
    engine = SimulatedEngine()
    submit = engine.submit(60, max_tokens=10)
    engine.drain()
    turn = prompt_of(submit) + engine.told(submit)[0]
    follow_up = engine.submit([*turn, 1, 2], max_tokens=2)
    engine.drain()
    engine.expect_alone(follow_up)
    assert next(o for o in engine.outputs if o.handle == follow_up.handle).cached_tokens == BLOCK_TOKENS


@both_overlaps
def test_the_last_token_is_never_cached_because_it_was_never_an_input(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap)
    submit = engine.submit(60, max_tokens=BLOCK_TOKENS - 60)
    engine.drain()
    follow_up = engine.submit([*prompt_of(submit), *engine.told(submit)[0], 1, 2])
    engine.drain()
    engine.expect_alone(follow_up)
    assert next(o for o in engine.outputs if o.handle == follow_up.handle).cached_tokens == 0


def test_token_credit_is_returned_with_each_chunk() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=50)
    before = engine.core.gauges().credit_tokens
    engine.submit(120)
    granted = []
    for _ in range(3):
        engine.step()
        granted.append(engine.core.gauges().credit_tokens - before)
    assert granted == [50, 100, 120]
