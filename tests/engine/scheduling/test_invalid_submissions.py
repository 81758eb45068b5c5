"""Tests that invalid submissions and sizes are refused, and that the error names the value."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.scheduling.simulated_engine import (
    FRONT,
    SimulatedEngine,
    first_tokens,
)
from tests.engine.scheduling.simulated_runner import VOCAB


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "prompt is empty"),
        (b"12345", {}, "prompt has 5 bytes"),
        ([1, VOCAB], {}, f"prompt contains {VOCAB}"),
        ([-1], {}, "prompt contains -1"),
        ([1], {"output_token_ids": [99]}, "output_token_ids contains 99"),
        ([1], {"stop_token_ids": (99,)}, "stop_token_ids contains 99"),
        ([1], {"logit_bias": {99: 1.0}}, "logit_bias contains 99"),
        ([1], {"logit_bias": {1: float("nan")}}, "logit_bias of token 1"),
        ([1], {"n": 0}, "n is 0"),
        ([1], {"n": 10**9}, "n is 1000000000"),
        ([1], {"n": 2, "output_token_ids": [1]}, "must be 1 when output_token_ids are given"),
        ([1], {"priority": 4}, "priority is 4"),
        ([1], {"max_tokens": -1}, "max_tokens is -1"),
        ([1], {"temperature": float("nan")}, "temperature is nan"),
        ([1], {"top_p": 0.0}, "top_p is 0.0"),
        ([1], {"presence_penalty": 1e300}, "presence_penalty is 1e+300"),
        ([1], {"frequency_penalty": -3e38}, "frequency_penalty is -3e+38"),
        ([1], {"repetition_penalty": 1e-44}, "repetition_penalty is 1e-44"),
        ([1], {"logit_bias": {1: float("inf")}}, "logit_bias of token 1 is inf"),
        ([1], {"allowed_tokens": b"\0\0"}, "allowed_tokens allows no token"),
        (
            [1],
            {"allowed_tokens": bytes(VOCAB // 8) + bytes([1 << VOCAB % 8])},
            "allowed_tokens allows no token",
        ),
        ([1], {"bad_words": ((1, 99),)}, "bad_words contains 99"),
        ([1], {"bad_words": ((1,), ())}, "bad_words has an entry of 0 tokens"),
        ([1], {"bad_words": ((1,) * 33,)}, "bad_words has an entry of 33 tokens"),
        ([1], {"bad_words": ((1,),) * 513}, "bad_words has 513 entries"),
        ([1], {"min_tokens": 2**63}, "min_tokens is 9223372036854775808"),
        ([1], {"top_k": 2**63}, "top_k is 9223372036854775808"),
        ([1], {"first_sample": 2**63}, "first_sample is 9223372036854775808"),
        ([1], {"min_p": 1.5}, "min_p is 1.5"),
        ([1], {"top_k": -1}, "top_k is -1"),
        ([1], {"logprobs": VOCAB + 1}, f"logprobs is {VOCAB + 1}"),
        ([1] * 512, {}, "the prompt has 512 tokens"),
        ([1] * 100, {"max_tokens": 400}, "needs 8 KV blocks, but the pool has 4"),
    ],
)
def test_an_invalid_submission_ends_with_an_error_that_names_the_field(
    prompt: list[int] | bytes, fields: dict[str, Any], message: str
) -> None:
    engine = SimulatedEngine(blocks=4)
    before = engine.core.gauges()
    submit = engine.submit(prompt, **fields)
    assert engine.core.has_work
    engine.drain()
    assert engine.runner.plans == []
    assert all(
        output.finish_reason == "error" and message in (output.error or "") for output in engine.outputs
    )
    (finished,) = engine.finished
    assert set(finished.finish_reason) == {"error"}
    after = engine.core.gauges()
    assert after.credit_seqs - before.credit_seqs == submit.n
    assert after.credit_tokens - before.credit_tokens == submit.credit_tokens


def test_a_handle_in_use_is_refused() -> None:
    engine = SimulatedEngine()
    submit = engine.submit(10)
    engine.scheduler.add(FRONT, submit)
    engine.scheduler.add("front-1", submit)
    engine.drain()
    assert sorted(f.finish_reason[0] for f in engine.finished) == ["error", "length", "length"]


def test_inconsistent_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens is 3, but 4 sequences"):
        SimulatedEngine(max_num_seqs=4, max_num_batched_tokens=3)
    for max_mixed_tokens in (3, 65):
        with pytest.raises(
            ValueError, match=f"max_mixed_tokens is {max_mixed_tokens}: it must be at least max_num_seqs"
        ):
            SimulatedEngine(max_num_seqs=4, max_num_batched_tokens=64, max_mixed_tokens=max_mixed_tokens)


@pytest.mark.parametrize(
    ("max_num_seqs", "max_num_batched_tokens", "max_mixed_tokens"),
    [(64, 2048, 1024), (1024, 8192, 4096), (6000, 8192, 6000), (8192, 8192, 8192)],
)
def test_the_default_budget_of_mixed_steps_fits_the_other_sizes(
    max_num_seqs: int, max_num_batched_tokens: int, max_mixed_tokens: int
) -> None:
    assert (
        SimulatedEngine(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=max_num_batched_tokens
        ).scheduler.max_mixed_tokens
        == max_mixed_tokens
    )


@pytest.mark.parametrize(("overlap", "cleared"), [(True, 2), (False, 0)])
def test_blocks_written_by_a_step_in_flight_are_zeroed_when_reallocated(overlap: bool, cleared: int) -> None:
    engine = SimulatedEngine(
        overlap=overlap, max_num_seqs=1, max_num_batched_tokens=100, blocks=8, prefix_cache=False
    )
    engine.submit(64, max_tokens=100)
    engine.drain()
    cancelled = engine.submit(300)
    engine.step()
    engine.scheduler.cancel(FRONT, cancelled.handle)
    engine.submit(400, max_tokens=1)
    plans = [engine.step() for _ in range(4)]
    # With overlap, the KV blocks of the cancelled prompt's 100 tokens are zeroed. The blocks of the sequence
    # that ended normally are not zeroed.
    assert [len(plan.clears) for plan in plans if plan] == [cleared, 0, 0, 0]
    engine.drain()


def test_the_step_launched_before_a_stop_token_was_read_leaves_one_block_to_zero() -> None:
    engine = SimulatedEngine(max_num_seqs=1, blocks=8, prefix_cache=False)
    stop = first_tokens(engine.submit(130, max_tokens=1), 4)[3]
    engine = SimulatedEngine(max_num_seqs=1, blocks=8, prefix_cache=False)
    engine.submit(130, max_tokens=50, stop_token_ids=(stop,))
    engine.drain()
    engine.submit(400, max_tokens=1)
    plan = engine.step()
    assert plan is not None and len(plan.clears) == 1
