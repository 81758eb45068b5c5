"""The scheduler's rules and the ends of sequences, one claim at a time."""

from __future__ import annotations

import gc
from typing import Any

import msgspec
import pytest

from engine.core import EngineCore
from engine.messages import BLOCK_TOKENS, Finished, Output, SamplingParams, StepPlan, StepTokens, Submit
from engine.request import Sequence, Submission
from engine.scheduler import Scheduler
from tests.engine.scheduling.simulated_runner import VOCAB, SimulatedRunner, SimulatedStep, alone

FRONT = "front-0"


class House:
    """An engine on the simulated runner, and all it said."""

    def __init__(self, *, overlap: bool = True, runner: Any = None, **sizes: Any) -> None:
        sizes = {"max_rows": 4, "step_tokens": 256, "max_model_len": 512, "blocks": 64, **sizes}
        self.scheduler = Scheduler(vocab_size=VOCAB, **sizes)
        self.runner = runner or SimulatedRunner(sizes["max_rows"], sizes["blocks"])
        self.core = EngineCore(self.scheduler, self.runner, overlap=overlap)
        self.outputs: list[Output] = []
        self.finished: list[Finished] = []
        self.handles = 0

    def submit(self, prompt: list[int] | int, *, front: str = FRONT, **fields: Any) -> Submit:
        """Submit `prompt`, tokens or just how many; fields of Submit or SamplingParams."""
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
        self.core.submit(front, submit)
        return submit

    def step(self) -> StepPlan | None:
        """One turn; returns the plan that it launched."""
        before = len(self.runner.plans)
        result = self.core.step()
        for outputs in result.outputs.values():
            self.outputs += outputs
        self.finished += result.finished
        self.core.check()
        return self.runner.plans[-1] if len(self.runner.plans) > before else None

    def waited_for(self) -> bool:
        """One turn: whether what it launched was waited for."""
        self.runner.gap_us = 7.0
        timing = self.core.step().timing
        assert timing is not None and timing.idle_us in (0.0, 7.0)
        return timing.idle_us == 7.0

    def drain(self) -> None:
        for _ in range(5000):
            if not self.core.has_work:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def told(self, submit: Submit, sample: int = 0) -> tuple[list[int], str]:
        """Tokens and finish of a sample."""
        mine = [o for o in self.outputs if (o.handle, o.sample) == (submit.handle, sample)]
        return [token for o in mine for token in o.token_ids], mine[-1].finish

    def expect_alone(self, submit: Submit) -> None:
        for sample in range(submit.first_sample, submit.first_sample + submit.n):
            expected = alone(submit, sample, self.scheduler.limits.max_model_len)
            assert self.told(submit, sample) == (expected.tokens, expected.finish)


def first_tokens(submit_like: Submit, count: int) -> list[int]:
    sampling = msgspec.structs.replace(
        submit_like.sampling, stop_token_ids=(), max_tokens=count, min_tokens=0
    )
    return alone(msgspec.structs.replace(submit_like, sampling=sampling), 0, 10_000).tokens


both_overlaps = pytest.mark.parametrize("overlap", [False, True])


# ── ends ─────────────────────────────────────────────────────────────────────────────────────────


@both_overlaps
def test_a_stop_token_ends_the_sequence_and_is_its_last_token(overlap: bool) -> None:
    house = House(overlap=overlap)
    stop = first_tokens(house.submit(10, max_tokens=1), 4)[3]
    house = House(overlap=overlap)
    submit = house.submit(10, max_tokens=50, stop_token_ids=(stop,))
    house.drain()
    tokens, finish = house.told(submit)
    assert finish == "stop" and tokens[-1] == stop and stop not in tokens[:-1]


@both_overlaps
def test_ignore_eos_runs_to_max_tokens(overlap: bool) -> None:
    house = House(overlap=overlap)
    submit = house.submit(10, max_tokens=50, stop_token_ids=tuple(range(VOCAB)), ignore_eos=True)
    house.drain()
    tokens, finish = house.told(submit)
    assert (len(tokens), finish) == (50, "length")


class AlwaysStop:
    """A runner without a sampler's manners: it samples token 0 whatever min_tokens says."""

    def __init__(self) -> None:
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan) -> SimulatedStep:
        self.plans.append(plan)
        rows = len(plan.decodes) + sum(len(chunk.sample_rows) for chunk in plan.chunks)
        return SimulatedStep(StepTokens([0] * rows, None, {}))


@both_overlaps
def test_no_stop_token_ends_a_sequence_before_min_tokens(overlap: bool) -> None:
    house = House(overlap=overlap, runner=AlwaysStop())
    submit = house.submit(10, max_tokens=50, min_tokens=5, stop_token_ids=(0,))
    house.drain()
    # Five tokens that may not be a stop token, then the first that may.
    assert house.told(submit) == ([0] * 6, "stop")


@both_overlaps
@pytest.mark.parametrize("max_tokens", [1, 2, 63, 64, 65])
def test_max_tokens_is_met_exactly_and_no_step_is_scheduled_past_it(overlap: bool, max_tokens: int) -> None:
    house = House(overlap=overlap)
    submit = house.submit(5, max_tokens=max_tokens)
    house.drain()
    house.expect_alone(submit)
    assert house.told(submit)[1] == "length"
    sampled = sum(
        len(plan.decodes) + sum(len(c.sample_rows) for c in plan.chunks) for plan in house.runner.plans
    )
    assert sampled == max_tokens


@both_overlaps
@pytest.mark.parametrize("prompt", [99, 98, 64, 63])
def test_the_models_length_ends_a_sequence(overlap: bool, prompt: int) -> None:
    house = House(overlap=overlap, max_model_len=100, blocks=2)
    submit = house.submit(prompt, max_tokens=1000)
    house.drain()
    tokens, finish = house.told(submit)
    assert (prompt + len(tokens), finish) == (100, "length")


def test_nothing_to_generate_ends_at_once_without_a_step() -> None:
    house = House()
    submit = house.submit(10, max_tokens=0)
    resumed = house.submit(10, max_tokens=2, output_token_ids=[1, 2])
    stopped = house.submit(10, max_tokens=9, output_token_ids=[1, 2], stop_token_ids=(2,))
    house.drain()
    assert [house.told(s) for s in (submit, resumed, stopped)] == [
        ([], "length"),
        ([], "length"),
        ([], "stop"),
    ]
    assert house.runner.plans == []


def test_a_prompt_is_scored_without_generating() -> None:
    house = House(step_tokens=50)
    submit = house.submit(120, max_tokens=0, prompt_logprobs=0)
    house.drain()
    (output,) = house.outputs
    assert output.prompt_logprobs == alone(submit, 0, 512).prompt_logprobs
    assert len(output.prompt_logprobs or ()) == 120
    assert (output.token_ids, output.finish) == ([], "length")


def test_a_resumed_submission_goes_on_where_it_broke_off() -> None:
    whole = House()
    submit = whole.submit(70, max_tokens=40, temperature=1.0, seed=3, presence_penalty=0.5)
    whole.drain()
    tokens, _ = whole.told(submit)
    resumed = House()
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


# ── what cannot be computed ──────────────────────────────────────────────────────────────────────


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
        ([1], {"n": 2, "output_token_ids": [1]}, "output_token_ids go with one sample"),
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
        ([1] * 100, {"max_tokens": 400}, "needs 8 KV blocks, the pool has 4"),
    ],
)
def test_what_cannot_be_computed_ends_with_an_error_that_names_it(
    prompt: list[int], fields: dict[str, Any], message: str
) -> None:
    house = House(blocks=4)
    before = house.core.gauges()
    submit = house.submit(prompt, **fields)
    assert house.core.has_work
    house.drain()
    assert house.runner.plans == []
    assert all(output.finish == "error" and message in (output.error or "") for output in house.outputs)
    (ledger,) = house.finished
    assert set(ledger.finish) == {"error"}
    after = house.core.gauges()
    assert after.credit_rows - before.credit_rows == submit.n
    assert after.credit_tokens - before.credit_tokens == submit.credit_tokens


def test_a_handle_in_use_is_refused() -> None:
    house = House()
    submit = house.submit(10)
    house.core.submit(FRONT, submit)
    house.core.submit("front-1", submit)
    house.drain()
    assert sorted(f.finish[0] for f in house.finished) == ["error", "length", "length"]


def test_sizes_that_cannot_work_are_refused() -> None:
    with pytest.raises(ValueError, match="step_tokens is 3, but 4 rows"):
        House(max_rows=4, step_tokens=3)
    for mixed_tokens in (3, 65):
        with pytest.raises(ValueError, match=f"mixed_tokens is {mixed_tokens}: give at least max_rows, 4"):
            House(max_rows=4, step_tokens=64, mixed_tokens=mixed_tokens)


@pytest.mark.parametrize(
    ("max_rows", "step_tokens", "mixed_tokens"),
    [(64, 2048, 1024), (1024, 8192, 4096), (6000, 8192, 6000), (8192, 8192, 8192)],
)
def test_without_a_budget_for_mixed_steps_they_get_one_that_fits(
    max_rows: int, step_tokens: int, mixed_tokens: int
) -> None:
    assert House(max_rows=max_rows, step_tokens=step_tokens).scheduler.mixed_tokens == mixed_tokens


@pytest.mark.parametrize(("overlap", "cleared"), [(True, 2), (False, 0)])
def test_blocks_that_a_step_in_flight_writes_are_cleared_for_their_next_owners(
    overlap: bool, cleared: int
) -> None:
    house = House(overlap=overlap, max_rows=1, step_tokens=100, blocks=8, prefix_cache=False)
    house.submit(64, max_tokens=100)
    house.drain()
    cancelled = house.submit(300)
    house.step()
    house.core.cancel(FRONT, cancelled.handle)
    house.submit(400, max_tokens=1)
    plans = [house.step() for _ in range(4)]
    # 100 tokens of the cancelled prompt; the sequence that ran to its end leaves nothing to clear.
    assert [len(plan.clears) for plan in plans if plan] == [cleared, 0, 0, 0]
    house.drain()


def test_the_step_that_overtook_a_stop_token_leaves_one_block_to_clear() -> None:
    house = House(max_rows=1, blocks=8, prefix_cache=False)
    stop = first_tokens(house.submit(130, max_tokens=1), 4)[3]
    house = House(max_rows=1, blocks=8, prefix_cache=False)
    house.submit(130, max_tokens=50, stop_token_ids=(stop,))
    house.drain()
    house.submit(400, max_tokens=1)
    plan = house.step()
    assert plan is not None and len(plan.clears) == 1


# ── order ────────────────────────────────────────────────────────────────────────────────────────


def test_decodes_come_first_and_a_long_prompt_fills_the_rest_of_each_step() -> None:
    house = House(step_tokens=64, mixed_tokens=64, blocks=32)
    house.submit(10, max_tokens=100)
    house.step()
    house.submit(300)
    plans = [house.step() for _ in range(5)]
    assert all(plan is not None and len(plan.decodes) == 1 for plan in plans)
    assert [len(chunk.token_ids) for plan in plans if plan for chunk in plan.chunks] == [63, 63, 63, 63, 48]


def test_a_step_computes_less_of_prompts_while_sequences_decode() -> None:
    house = House(step_tokens=128, mixed_tokens=40, blocks=32)
    house.submit(128, max_tokens=100)
    house.submit(300)
    # The whole budget while nobody decodes; the lesser one, decodes included, from then on.
    plans = [house.step() for _ in range(9)]
    assert [
        (len(plan.decodes), sum(len(chunk.token_ids) for chunk in plan.chunks)) for plan in plans if plan
    ] == [(0, 128), *[(1, 39)] * 7, (1, 27)]


def test_prompts_get_on_while_all_other_rows_decode() -> None:
    house = House(max_rows=4, step_tokens=128, mixed_tokens=4)
    for _ in range(3):
        house.submit(4, max_tokens=60)
    house.step()
    house.submit(10)
    plans = [house.step() for _ in range(10)]
    assert [len(chunk.token_ids) for plan in plans if plan for chunk in plan.chunks] == [1] * 10


def test_a_running_prefill_goes_on_before_new_admissions() -> None:
    house = House(step_tokens=100)
    house.submit(150, priority=3)
    house.step()
    house.submit(80, priority=0)
    plan = house.step()
    assert plan is not None
    assert [(chunk.start, len(chunk.token_ids)) for chunk in plan.chunks] == [(100, 50), (0, 50)]


def test_admission_is_by_class_then_arrival() -> None:
    house = House(max_rows=1, step_tokens=64)
    late, early, urgent = (house.submit(4, max_tokens=1, priority=p) for p in (3, 2, 0))
    second = house.submit(4, max_tokens=1, priority=2)
    house.drain()
    assert [o.handle for o in house.outputs] == [s.handle for s in (urgent, early, second, late)]


def test_nobody_overtakes_a_head_of_queue_that_waits_for_blocks() -> None:
    house = House(blocks=6)
    house.submit(4 * BLOCK_TOKENS, max_tokens=20)
    house.step()
    large, small = house.submit(3 * BLOCK_TOKENS, max_tokens=2), house.submit(5, max_tokens=2)
    house.drain()
    started = list(dict.fromkeys(output.handle for output in house.outputs))
    assert started.index(large.handle) < started.index(small.handle)


def test_a_head_of_queue_starts_as_soon_as_its_blocks_are_free() -> None:
    house = House(blocks=7, max_rows=3, overlap=False)
    house.submit(2 * BLOCK_TOKENS - 30, max_tokens=10)
    long = house.submit(2 * BLOCK_TOKENS - 30, max_tokens=25)
    house.submit(4 * BLOCK_TOKENS, max_tokens=2)
    house.drain()
    started = {s.prompt_tokens: plan.step for plan in house.runner.plans for s in plan.setups}
    assert started == {len(long.prompt_token_ids): 1, 4 * BLOCK_TOKENS: 11}


def test_an_admission_leaves_a_watermark_of_free_blocks_while_others_run() -> None:
    house = House(blocks=4, max_model_len=256)
    house.submit(10, max_tokens=3)
    house.step()
    house.submit(3 * BLOCK_TOKENS, max_tokens=2)
    assert house.step() is not None
    assert house.scheduler.pool.available == 3, "it would fit, without the watermark"
    assert (house.scheduler.running, house.scheduler.waiting) == (1, 1)
    house.drain()
    assert [ledger.finish for ledger in house.finished] == [["length"], ["length"]]


# ── preemption ───────────────────────────────────────────────────────────────────────────────────


@both_overlaps
def test_the_lowest_class_is_preempted_the_youngest_of_it_first(overlap: bool) -> None:
    house = House(overlap=overlap, blocks=6, max_rows=4)
    oldest = house.submit(50, max_tokens=100, priority=1)
    low = house.submit(50, max_tokens=100, priority=2)
    young = house.submit(50, max_tokens=100, priority=1)
    house.drain()
    for submit in (oldest, low, young):
        house.expect_alone(submit)
    preempted = {ledger.request_id: ledger.preemptions for ledger in house.finished}
    assert preempted[low.request_id] >= 1
    assert preempted[oldest.request_id] == preempted[young.request_id] == 0


@both_overlaps
def test_a_preempted_sequence_goes_before_new_ones_of_its_class(overlap: bool) -> None:
    house = House(overlap=overlap, blocks=4, max_rows=2)
    house.submit(60, max_tokens=80)
    victim = house.submit(60, max_tokens=120)
    new = house.submit(10, max_tokens=2)
    house.drain()
    ledgers = {ledger.request_id: ledger for ledger in house.finished}
    assert ledgers[victim.request_id].preemptions == 1
    readmitted = [
        plan.step for plan in house.runner.plans for s in plan.setups if s.sampling.max_tokens == 120
    ]
    started = [plan.step for plan in house.runner.plans for s in plan.setups if s.sampling.max_tokens == 2]
    assert len(readmitted) == 2 and started[0] >= readmitted[1]
    house.expect_alone(new)


@both_overlaps
def test_prompt_scores_survive_a_preemption_in_the_middle_of_the_prompt(overlap: bool) -> None:
    house = House(overlap=overlap, blocks=5, max_rows=2, step_tokens=3)
    house.submit(60, max_tokens=80)
    while house.scheduler.waiting or not house.outputs:
        house.step()
    scored = house.submit(180, max_tokens=60, prompt_logprobs=0, priority=2)
    house.drain()
    ledger = next(f for f in house.finished if f.request_id == scored.request_id)
    assert ledger.preemptions == 1
    first = next(output for output in house.outputs if output.handle == scored.handle)
    assert first.prompt_logprobs == alone(scored, 0, 512).prompt_logprobs
    house.expect_alone(scored)


# ── samples ──────────────────────────────────────────────────────────────────────────────────────


@both_overlaps
@pytest.mark.parametrize("prompt", [1, 63, 64, 65, 130])
def test_samples_share_one_prefill_and_copy_the_partial_block(overlap: bool, prompt: int) -> None:
    house = House(overlap=overlap)
    submit = house.submit(prompt, n=3, temperature=1.0, max_tokens=70, first_sample=2)
    house.drain()
    house.expect_alone(submit)
    assert len({tuple(house.told(submit, sample)[0]) for sample in (2, 3, 4)}) == 3
    plans = house.runner.plans
    assert sum(len(chunk.token_ids) for plan in plans for chunk in plan.chunks) == prompt
    assert sum(len(plan.copies) for plan in plans) == (2 if prompt % BLOCK_TOKENS else 0)


def test_samples_that_find_no_row_run_later_on_the_cached_prompt() -> None:
    house = House(max_rows=2)
    submit = house.submit(130, n=3, temperature=1.0)
    house.drain()
    house.expect_alone(submit)
    cached = [output.cached_tokens for output in house.outputs if output.cached_tokens is not None]
    assert cached == [0, 0, 128]
    computed = sum(len(chunk.token_ids) for plan in house.runner.plans for chunk in plan.chunks)
    assert computed == 130 + 2
    (ledger,) = house.finished
    assert (ledger.cached_tokens, ledger.generated_tokens, ledger.finish) == (0, 24, ["length"] * 3)


# ── cancel ───────────────────────────────────────────────────────────────────────────────────────


@both_overlaps
@pytest.mark.parametrize("after_steps", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("sample", [None, 0, 1, 2])
def test_a_cancel_ends_what_it_names_and_nothing_else_at_any_time(
    overlap: bool, after_steps: int, sample: int | None
) -> None:
    house = House(overlap=overlap, step_tokens=40)
    submit = house.submit(100, n=3, temperature=1.0, max_tokens=90)
    other = house.submit(30, max_tokens=20)
    for _ in range(after_steps):
        house.step()
    house.core.cancel(FRONT, submit.handle, sample)
    if sample is None:
        assert house.scheduler.pool.used <= 1, "a cancelled submission's blocks are free at once"
    house.drain()
    house.expect_alone(other)
    for index in range(3):
        expected = alone(submit, index, 512)
        tokens, finish = house.told(submit, index)
        assert tokens == expected.tokens[: len(tokens)]
        assert finish == ("cancelled" if sample in (None, index) else "length")
    assert len(house.finished) == 2


def test_a_sibling_goes_on_with_the_prefill_of_a_cancelled_sample() -> None:
    house = House(step_tokens=40, overlap=False)
    submit = house.submit(100, n=3)
    house.step()
    house.core.cancel(FRONT, submit.handle, 0)
    house.drain()
    assert sum(len(chunk.token_ids) for plan in house.runner.plans for chunk in plan.chunks) == 100


def test_a_preempted_sequence_can_be_cancelled() -> None:
    house = House(blocks=4, max_rows=2)
    house.submit(60, max_tokens=100)
    victim = house.submit(60, max_tokens=100)
    house.step()
    while not house.scheduler.waiting:
        house.step()
    house.core.cancel(FRONT, victim.handle)
    assert (house.scheduler.waiting, house.scheduler.running) == (0, 1)
    house.drain()
    assert house.told(victim)[1] == "cancelled"


def test_what_has_ended_or_never_was_is_passed_over() -> None:
    house = House()
    submit = house.submit(5, n=2)
    house.core.cancel(FRONT, 99)
    house.core.cancel("nobody", 1)
    house.core.cancel(FRONT, submit.handle, 17)
    house.core.cancel_request("nobody's")
    house.drain()
    house.core.cancel(FRONT, submit.handle)
    assert not house.core.has_work
    house.expect_alone(submit)


def test_a_request_is_cancelled_on_every_channel() -> None:
    house = House()
    one = house.submit(5, max_tokens=90, request_id="r", front="front-0")
    two = house.submit(5, max_tokens=90, request_id="r", front="front-1", index=1)
    house.step()
    house.core.cancel_request("r")
    house.drain()
    assert house.told(one)[1] == house.told(two)[1] == "cancelled"


def test_a_gone_channel_gets_nothing_more_and_its_ledgers_are_kept() -> None:
    house = House()
    house.submit(5, max_tokens=90, front="gone")
    stays = house.submit(5, max_tokens=90, front="stays")
    for _ in range(5):
        house.step()
    house.outputs.clear()
    house.core.cancel_origin("gone")
    house.drain()
    assert {output.handle for output in house.outputs} == {stays.handle}
    assert [ledger.finish for ledger in house.finished] == [["cancelled"], ["length"]]


# ── the ledger ───────────────────────────────────────────────────────────────────────────────────


def test_the_first_output_says_what_was_cached_and_how_many_ran() -> None:
    house = House()
    warm = house.submit(130, max_tokens=1)
    house.drain()
    house.outputs.clear()
    house.submit(5, max_tokens=40)
    house.step()
    house.submit(warm.prompt_token_ids, max_tokens=3)
    house.drain()
    cached = {o.handle: (o.cached_tokens, o.batch_size) for o in house.outputs if o.batch_size is not None}
    assert cached == {2: (0, 1), 3: (128, 2)}
    ledger = next(f for f in house.finished if f.request_id == "request-3")
    assert (ledger.prompt_tokens, ledger.cached_tokens, ledger.batch_size) == (130, 128, 2)


def test_tokens_of_outputs_are_cached_too() -> None:
    house = House()
    submit = house.submit(60, max_tokens=10)
    house.drain()
    turn = submit.prompt_token_ids + house.told(submit)[0]
    follow_up = house.submit([*turn, 1, 2], max_tokens=2)
    house.drain()
    house.expect_alone(follow_up)
    assert next(o for o in house.outputs if o.handle == follow_up.handle).cached_tokens == BLOCK_TOKENS


@both_overlaps
def test_the_last_token_is_never_cached_since_it_was_not_fed(overlap: bool) -> None:
    house = House(overlap=overlap)
    submit = house.submit(60, max_tokens=BLOCK_TOKENS - 60)
    house.drain()
    follow_up = house.submit([*submit.prompt_token_ids, *house.told(submit)[0], 1, 2])
    house.drain()
    house.expect_alone(follow_up)
    assert next(o for o in house.outputs if o.handle == follow_up.handle).cached_tokens == 0


def test_token_credit_comes_back_with_each_chunk() -> None:
    house = House(step_tokens=50)
    before = house.core.gauges().credit_tokens
    house.submit(120)
    granted = []
    for _ in range(3):
        house.step()
        granted.append(house.core.gauges().credit_tokens - before)
    assert granted == [50, 100, 120]


def test_a_runners_failure_is_not_swallowed() -> None:
    class Broken(AlwaysStop):
        def launch(self, plan: StepPlan) -> SimulatedStep:
            raise RuntimeError("device lost")

    house = House(runner=Broken())
    house.submit(5)
    with pytest.raises(RuntimeError, match="device lost"):
        house.core.step()


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

    house = House(runner=Watched(4, 64))
    house.submit(5, max_tokens=4)
    house.drain()
    assert reads == [(1, 2), (2, 3), (3, 4), (4, 4)]


def test_a_steady_decode_step_is_a_list_of_rows() -> None:
    house = House()
    for _ in range(3):
        house.submit(5, max_tokens=30)
    house.step()
    plan = house.step()
    assert plan is not None
    assert (plan.setups, plan.blocks, plan.copies, plan.chunks) == ([], [], [], [])
    assert len(plan.decodes) == 3


@both_overlaps
def test_what_has_ended_is_freed_without_the_collector(overlap: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        house = House(overlap=overlap, max_rows=3, blocks=5)
        for n in (1, 2, 3):
            house.submit(100, n=n, max_tokens=40)
        house.core.cancel(FRONT, house.submit(100, n=2).handle)
        house.drain()
        assert house.core.gauges().preemptions
        left = [one for one in gc.get_objects() if type(one) in (Sequence, Submission)]
        assert not left
    finally:
        gc.enable()


def test_a_gap_counts_only_where_a_sequence_was_there_before_it() -> None:
    """A step of newcomers may have come after hours of rest."""
    house = House(overlap=False)
    house.submit(40, max_tokens=1)
    assert not house.waited_for(), "nobody was there before the first step"
    house.submit(40, max_tokens=2)
    assert not house.waited_for(), "it came after the step before"
    assert house.waited_for(), "it decodes"
    house.submit(600 - 100, max_tokens=1)
    assert not house.waited_for()
    assert house.waited_for(), "the rest of its prompt"
    for _ in range(6):
        house.submit(250, max_tokens=1)
    assert not house.waited_for()
    assert house.waited_for(), "newcomers that the step before had no room for"
    house.drain()
    waiting = [house.submit(250, max_tokens=1) for _ in range(2)]
    assert not house.waited_for()
    house.core.cancel(FRONT, waiting[1].handle)
    house.submit(40, max_tokens=1)
    assert not house.waited_for(), "who was left waiting has gone"
