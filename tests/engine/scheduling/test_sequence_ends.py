"""Tests of how sequences end: by stop tokens, by reaching a length limit, or by cancellation."""

from __future__ import annotations

import pytest

from tests.engine.scheduling.simulated_engine import (
    FRONT,
    AlwaysStop,
    SimulatedEngine,
    both_overlaps,
    first_tokens,
)
from tests.engine.scheduling.simulated_runner import VOCAB, alone
from tests.prompts import prompt_of

# ── finish reasons ────────────────────────────────────────────────────────────────────────────────


@both_overlaps
def test_a_stop_token_ends_the_sequence_and_is_its_last_token(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap)
    stop = first_tokens(engine.submit(10, max_tokens=1), 4)[3]
    engine = SimulatedEngine(overlap=overlap)
    submit = engine.submit(10, max_tokens=50, stop_token_ids=(stop,))
    engine.drain()
    tokens, finish_reason = engine.told(submit)
    assert finish_reason == "stop" and tokens[-1] == stop and stop not in tokens[:-1]


@both_overlaps
def test_ignore_eos_runs_to_max_tokens(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap)
    submit = engine.submit(10, max_tokens=50, stop_token_ids=tuple(range(VOCAB)), ignore_eos=True)
    engine.drain()
    tokens, finish_reason = engine.told(submit)
    assert (len(tokens), finish_reason) == (50, "length")


@both_overlaps
def test_no_stop_token_ends_a_sequence_before_min_tokens(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, runner=AlwaysStop())
    submit = engine.submit(10, max_tokens=50, min_tokens=5, stop_token_ids=(0,))
    engine.drain()
    # A stop token among the first five tokens must not end the sequence. The sixth token may end it.
    assert engine.told(submit) == ([0] * 6, "stop")


@both_overlaps
@pytest.mark.parametrize("max_tokens", [1, 2, 63, 64, 65])
def test_a_sequence_generates_exactly_max_tokens_and_no_step_is_scheduled_after(
    overlap: bool, max_tokens: int
) -> None:
    engine = SimulatedEngine(overlap=overlap)
    submit = engine.submit(5, max_tokens=max_tokens)
    engine.drain()
    engine.expect_alone(submit)
    assert engine.told(submit)[1] == "length"
    sampled = sum(
        len(plan.decodes) + sum(len(c.sample_slots) for c in plan.chunks) for plan in engine.runner.plans
    )
    assert sampled == max_tokens


@both_overlaps
@pytest.mark.parametrize("prompt", [99, 98, 64, 63])
def test_the_models_length_ends_a_sequence(overlap: bool, prompt: int) -> None:
    engine = SimulatedEngine(overlap=overlap, max_model_len=100, blocks=2)
    submit = engine.submit(prompt, max_tokens=1000)
    engine.drain()
    tokens, finish_reason = engine.told(submit)
    assert (prompt + len(tokens), finish_reason) == (100, "length")


def test_a_request_without_tokens_to_generate_ends_without_a_step() -> None:
    engine = SimulatedEngine()
    submit = engine.submit(10, max_tokens=0)
    resumed = engine.submit(10, max_tokens=2, output_token_ids=[1, 2])
    stopped = engine.submit(10, max_tokens=9, output_token_ids=[1, 2], stop_token_ids=(2,))
    engine.drain()
    assert [engine.told(s) for s in (submit, resumed, stopped)] == [
        ([], "length"),
        ([], "length"),
        ([], "stop"),
    ]
    assert engine.runner.plans == []


def test_prompt_logprobs_are_returned_without_generating_tokens() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=50)
    submit = engine.submit(120, max_tokens=0, prompt_logprobs=0)
    engine.drain()
    (output,) = engine.outputs
    assert output.prompt_logprobs == alone(submit, 0, 512).prompt_logprobs
    assert len(output.prompt_logprobs or ()) == 120
    assert (output.token_ids, output.finish_reason) == ([], "length")


def test_a_resubmitted_sample_continues_after_its_known_output() -> None:
    whole = SimulatedEngine()
    submit = whole.submit(70, max_tokens=40, temperature=1.0, seed=3, presence_penalty=0.5)
    whole.drain()
    tokens, _ = whole.told(submit)
    resumed = SimulatedEngine()
    rest = resumed.submit(
        prompt_of(submit),
        output_token_ids=tokens[:25],
        max_tokens=40,
        temperature=1.0,
        seed=3,
        presence_penalty=0.5,
    )
    resumed.drain()
    assert resumed.told(rest) == (tokens[25:], "length")
    (finished,) = resumed.finished
    assert finished.generated_tokens == 15


# ── cancelled requests ────────────────────────────────────────────────────────────────────────────


@both_overlaps
@pytest.mark.parametrize("after_steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("sample", [None, 0, 1, 2])
def test_a_cancel_ends_only_the_given_sample_or_submission_at_any_time(
    overlap: bool, after_steps: int, sample: int | None
) -> None:
    engine = SimulatedEngine(overlap=overlap, max_num_batched_tokens=40)
    submit = engine.submit(100, n=3, temperature=1.0, max_tokens=90)
    other = engine.submit(30, max_tokens=20)
    for _ in range(after_steps):
        engine.step()
    engine.scheduler.cancel(FRONT, submit.handle, sample)
    if sample is None:
        assert engine.scheduler.pool.used <= 1, "a cancelled submission's blocks are free immediately"
    engine.drain()
    engine.expect_alone(other)
    for index in range(3):
        expected = alone(submit, index, 512)
        tokens, finish_reason = engine.told(submit, index)
        assert tokens == expected.tokens[: len(tokens)]
        assert finish_reason == ("cancelled" if sample in (None, index) else "length")
    assert len(engine.finished) == 2


def test_a_fork_continues_the_prefill_of_its_cancelled_leader() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=40, overlap=False)
    submit = engine.submit(100, n=3)
    engine.step()
    engine.scheduler.cancel(FRONT, submit.handle, 0)
    engine.drain()
    assert sum(len(chunk.token_ids) for plan in engine.runner.plans for chunk in plan.chunks) == 100


def test_a_preempted_sequence_can_be_cancelled() -> None:
    engine = SimulatedEngine(blocks=4, max_num_seqs=2)
    engine.submit(60, max_tokens=100)
    victim = engine.submit(60, max_tokens=100)
    engine.step()
    while not engine.scheduler.waiting:
        engine.step()
    engine.scheduler.cancel(FRONT, victim.handle)
    assert (engine.scheduler.waiting, engine.scheduler.running) == (0, 1)
    engine.drain()
    assert engine.told(victim)[1] == "cancelled"


def test_cancelling_an_ended_or_unknown_submission_has_no_effect() -> None:
    engine = SimulatedEngine()
    submit = engine.submit(5, n=2)
    engine.scheduler.cancel(FRONT, 99)
    engine.scheduler.cancel("nobody", 1)
    engine.scheduler.cancel(FRONT, submit.handle, 17)
    engine.scheduler.cancel_request("nobody's")
    engine.drain()
    engine.scheduler.cancel(FRONT, submit.handle)
    assert not engine.core.has_work
    engine.expect_alone(submit)


def test_a_request_is_cancelled_on_every_channel() -> None:
    engine = SimulatedEngine()
    one = engine.submit(5, max_tokens=90, request_id="r", front="front-0")
    two = engine.submit(5, max_tokens=90, request_id="r", front="front-1", index=1)
    engine.step()
    engine.scheduler.cancel_request("r")
    engine.drain()
    assert engine.told(one)[1] == engine.told(two)[1] == "cancelled"


def test_a_closed_channel_gets_no_outputs_but_its_final_counts_are_reported() -> None:
    engine = SimulatedEngine()
    engine.submit(5, max_tokens=90, front="gone")
    stays = engine.submit(5, max_tokens=90, front="stays")
    for _ in range(5):
        engine.step()
    engine.outputs.clear()
    engine.scheduler.cancel_origin("gone")
    engine.drain()
    assert {output.handle for output in engine.outputs} == {stays.handle}
    assert [finished.finish_reason for finished in engine.finished] == [["cancelled"], ["length"]]
