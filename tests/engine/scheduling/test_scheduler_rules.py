"""Tests of the scheduler's rules and of the ends of sequences, one claim at a time."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from engine.core import EngineCore
from engine.messages import BLOCK_TOKENS, Finished, Output, SamplingParams, Submit
from engine.plan import StepPlan, StepTokens
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.simulated_runner import VOCAB, SimulatedRunner, SimulatedStep, alone

FRONT = "front-0"


class SimulatedEngine:
    """An engine on the simulated runner, with all of its outputs."""

    def __init__(self, *, overlap: bool = True, runner: Any = None, **sizes: Any) -> None:
        sizes = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 256,
            "max_model_len": 512,
            "blocks": 64,
            **sizes,
        }
        self.scheduler = Scheduler(vocab_size=VOCAB, **sizes)
        self.runner = runner or SimulatedRunner(sizes["max_num_seqs"], sizes["blocks"])
        self.core = EngineCore(self.scheduler, self.runner, overlap=overlap)
        self.outputs: list[Output] = []
        self.finished: list[Finished] = []
        self.handles = 0

    def submit(self, prompt: list[int] | int, *, front: str = FRONT, **fields: Any) -> Submit:
        """Submit `prompt`, given as tokens or as a length. `fields` are fields of Submit or
        SamplingParams."""
        self.handles += 1
        tokens = (
            [(7 * self.handles + i) % VOCAB for i in range(prompt)] if isinstance(prompt, int) else prompt
        )
        sampling = {name: fields.pop(name) for name in SamplingParams.__struct_fields__ if name in fields}
        submit = Submit(
            handle=self.handles,
            request_id=fields.pop("request_id", f"request-{self.handles}"),
            prompt_token_ids=tokens,
            sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
            **fields,
        )
        self.scheduler.add(front, submit)
        return submit

    def step(self) -> StepPlan | None:
        """Run one turn of the loop, and return the plan that it launched."""
        before = len(self.runner.plans)
        result = self.core.step()
        for outputs in result.outputs.values():
            self.outputs += outputs
        self.finished += result.finished
        self.scheduler.check()
        return self.runner.plans[-1] if len(self.runner.plans) > before else None

    def waited_for(self) -> bool:
        """Run one turn of the loop, and return whether its idle time was counted."""
        self.runner.gap_us = 7.0
        timing = self.core.step().timing
        assert timing is not None and timing.idle_us in (0.0, 7.0)
        return timing.idle_us == 7.0

    def drain(self) -> None:
        for _ in range(5000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the engine did not finish within the limit of turns")

    def told(self, submit: Submit, sample: int = 0) -> tuple[list[int], str]:
        """Return the tokens and the finish reason of a sample."""
        mine = [o for o in self.outputs if (o.handle, o.sample) == (submit.handle, sample)]
        return [token for o in mine for token in o.token_ids], mine[-1].finish_reason

    def expect_alone(self, submit: Submit) -> None:
        for sample in range(submit.first_sample, submit.first_sample + submit.n):
            expected = alone(submit, sample, self.scheduler.limits.max_model_len)
            assert self.told(submit, sample) == (expected.tokens, expected.finish_reason)


def first_tokens(submit_like: Submit, count: int) -> list[int]:
    sampling = msgspec.structs.replace(
        submit_like.sampling, stop_token_ids=(), max_tokens=count, min_tokens=0
    )
    return alone(msgspec.structs.replace(submit_like, sampling=sampling), 0, 10_000).tokens


both_overlaps = pytest.mark.parametrize("overlap", [False, True])


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────


@both_overlaps
def test_a_stop_token_ends_the_sequence_and_is_its_last_token(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap)
    stop = first_tokens(engine.submit(10, max_tokens=1), 4)[3]
    engine = SimulatedEngine(overlap=overlap)
    submit = engine.submit(10, max_tokens=50, stop_token_ids=(stop,))
    engine.drain()
    tokens, finish = engine.told(submit)
    assert finish == "stop" and tokens[-1] == stop and stop not in tokens[:-1]


@both_overlaps
def test_ignore_eos_runs_to_max_tokens(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap)
    submit = engine.submit(10, max_tokens=50, stop_token_ids=tuple(range(VOCAB)), ignore_eos=True)
    engine.drain()
    tokens, finish = engine.told(submit)
    assert (len(tokens), finish) == (50, "length")


class AlwaysStop:
    """A runner that always samples token 0, even before min_tokens."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> SimulatedStep:
        self.plans.append(plan)
        rows = len(plan.decodes) + sum(len(chunk.sample_slots) for chunk in plan.chunks)
        return SimulatedStep(StepTokens([0] * rows, None, {}))


@both_overlaps
def test_no_stop_token_ends_a_sequence_before_min_tokens(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, runner=AlwaysStop())
    submit = engine.submit(10, max_tokens=50, min_tokens=5, stop_token_ids=(0,))
    engine.drain()
    # The first five tokens must not be a stop token; the sixth may be one.
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
    tokens, finish = engine.told(submit)
    assert (prompt + len(tokens), finish) == (100, "length")


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
        submit.prompt_token_ids,
        output_token_ids=tokens[:25],
        max_tokens=40,
        temperature=1.0,
        seed=3,
        presence_penalty=0.5,
    )
    resumed.drain()
    assert resumed.told(rest) == (tokens[25:], "length")
    (ledger,) = resumed.finished
    assert ledger.generated_tokens == 15


# ── invalid submissions ──────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "prompt_token_ids is empty"),
        ([1, VOCAB], {}, f"prompt_token_ids contains {VOCAB}"),
        ([-1], {}, "prompt_token_ids contains -1"),
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
        ([1], {"allowed_tokens": b"\0\0"}, "allowed_tokens has no token id"),
        (
            [1],
            {"allowed_tokens": bytes(VOCAB // 8) + bytes([1 << VOCAB % 8])},
            "allowed_tokens has no token id",
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
    prompt: list[int], fields: dict[str, Any], message: str
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
    (ledger,) = engine.finished
    assert set(ledger.finish_reason) == {"error"}
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
    # The 100 tokens of the cancelled prompt need zeroing. The sequence that ended normally leaves nothing to
    # zero.
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


# ── order ────────────────────────────────────────────────────────────────────────────────────────


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
    # The whole budget applies until a sequence decodes; from then on the smaller budget applies, decodes
    # included.
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
    assert started == {len(long.prompt_token_ids): 1, 4 * BLOCK_TOKENS: 11}


def test_admission_keeps_the_watermark_of_free_blocks_while_sequences_run() -> None:
    engine = SimulatedEngine(blocks=4, max_model_len=256)
    engine.submit(10, max_tokens=3)
    engine.step()
    engine.submit(3 * BLOCK_TOKENS, max_tokens=2)
    assert engine.step() is not None
    assert engine.scheduler.pool.available == 3, "without the watermark it would fit"
    assert (engine.scheduler.running, engine.scheduler.waiting) == (1, 1)
    engine.drain()
    assert [ledger.finish_reason for ledger in engine.finished] == [["length"], ["length"]]


# ── preemption ───────────────────────────────────────────────────────────────────────────────────


@both_overlaps
def test_the_youngest_sequence_of_the_lowest_class_is_preempted_first(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, blocks=6, max_num_seqs=4)
    oldest = engine.submit(50, max_tokens=100, priority=1)
    low = engine.submit(50, max_tokens=100, priority=2)
    young = engine.submit(50, max_tokens=100, priority=1)
    engine.drain()
    for submit in (oldest, low, young):
        engine.expect_alone(submit)
    preempted = {ledger.request_id: ledger.preemptions for ledger in engine.finished}
    assert preempted[low.request_id] >= 1
    assert preempted[oldest.request_id] == preempted[young.request_id] == 0


@both_overlaps
def test_a_preempted_sequence_is_admitted_before_new_ones_of_its_class(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap, blocks=4, max_num_seqs=2)
    engine.submit(60, max_tokens=80)
    victim = engine.submit(60, max_tokens=120)
    new = engine.submit(10, max_tokens=2)
    engine.drain()
    ledgers = {ledger.request_id: ledger for ledger in engine.finished}
    assert ledgers[victim.request_id].preemptions == 1
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
    ledger = next(f for f in engine.finished if f.request_id == scored.request_id)
    assert ledger.preemptions == 1
    first = next(output for output in engine.outputs if output.handle == scored.handle)
    assert first.prompt_logprobs == alone(scored, 0, 512).prompt_logprobs
    engine.expect_alone(scored)


# ── samples ──────────────────────────────────────────────────────────────────────────────────────


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
    (ledger,) = engine.finished
    assert (ledger.cached_tokens, ledger.generated_tokens, ledger.finish_reason) == (0, 24, ["length"] * 3)


# ── cancel ───────────────────────────────────────────────────────────────────────────────────────


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
        assert engine.scheduler.pool.used <= 1, "a cancelled submission's blocks are free at once"
    engine.drain()
    engine.expect_alone(other)
    for index in range(3):
        expected = alone(submit, index, 512)
        tokens, finish = engine.told(submit, index)
        assert tokens == expected.tokens[: len(tokens)]
        assert finish == ("cancelled" if sample in (None, index) else "length")
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
    assert [ledger.finish_reason for ledger in engine.finished] == [["cancelled"], ["length"]]


# ── final counts and credit ──────────────────────────────────────────────────────────────────────


def test_the_first_output_carries_the_cached_tokens_and_the_final_counts_the_batch_size() -> None:
    engine = SimulatedEngine()
    warm = engine.submit(130, max_tokens=1)
    engine.drain()
    engine.outputs.clear()
    engine.submit(5, max_tokens=40)
    engine.step()
    engine.submit(warm.prompt_token_ids, max_tokens=3)
    engine.drain()
    cached = {o.handle: o.cached_tokens for o in engine.outputs if o.cached_tokens is not None}
    assert cached == {2: 0, 3: 128}
    ledger = next(f for f in engine.finished if f.request_id == "request-3")
    assert (ledger.prompt_tokens, ledger.cached_tokens, ledger.batch_size) == (130, 128, 2)


def test_generated_tokens_are_cached_too() -> None:
    engine = SimulatedEngine()
    submit = engine.submit(60, max_tokens=10)
    engine.drain()
    turn = submit.prompt_token_ids + engine.told(submit)[0]
    follow_up = engine.submit([*turn, 1, 2], max_tokens=2)
    engine.drain()
    engine.expect_alone(follow_up)
    assert next(o for o in engine.outputs if o.handle == follow_up.handle).cached_tokens == BLOCK_TOKENS


@both_overlaps
def test_the_last_token_is_never_cached_since_it_was_not_fed(overlap: bool) -> None:
    engine = SimulatedEngine(overlap=overlap)
    submit = engine.submit(60, max_tokens=BLOCK_TOKENS - 60)
    engine.drain()
    follow_up = engine.submit([*submit.prompt_token_ids, *engine.told(submit)[0], 1, 2])
    engine.drain()
    engine.expect_alone(follow_up)
    assert next(o for o in engine.outputs if o.handle == follow_up.handle).cached_tokens == 0


def test_token_credit_comes_back_with_each_chunk() -> None:
    engine = SimulatedEngine(max_num_batched_tokens=50)
    before = engine.core.gauges().credit_tokens
    engine.submit(120)
    granted = []
    for _ in range(3):
        engine.step()
        granted.append(engine.core.gauges().credit_tokens - before)
    assert granted == [50, 100, 120]
