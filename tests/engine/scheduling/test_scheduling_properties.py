"""Property tests of the scheduler, block pool and step loop under random traffic. Invariants hold after every
step, all credit is returned, and every sample ends exactly once with the tokens that it would have if it ran
alone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.core import EngineCore
from engine.messages import Output, SamplingParams, Submit, pack_tokens
from engine.rank_messages import Finished
from engine.scheduling.scheduler import Scheduler
from tests.engine.scheduling.simulated_runner import STOP, VOCAB, Expected, SimulatedRunner, alone
from tests.examples import examples
from tests.prompts import prompt_of

MAX_STEPS_TO_DRAIN = 40_000
OWN_SALT = "own"
"""Prefix of cache salts that only one submission uses."""


@dataclass
class Told:
    """The outputs that a front process received for one sample."""

    expected: Expected
    tokens: list[int] = field(default_factory=list)
    outputs: int = 0
    finish_reason: str = ""
    cancelled: bool = False


@dataclass(frozen=True)
class Ask:
    """The parameters of a submission."""

    front: str
    request: int
    family: int
    """The prompts of all submissions of one family have the same first `shared` tokens."""
    shared: int
    own: int
    """Number of further prompt tokens, which differ between submissions."""
    follows: bool
    """Whether the prompt continues an earlier conversation, provided that there is one."""
    resumed: int
    n: int
    max_tokens: int
    min_tokens: int
    stops: bool
    ignore_eos: bool
    temperature: float
    penalty: float
    logprobs: int | None
    prompt_logprobs: int | None
    salt: str
    priority: int
    urgency: int
    reserved: int


CHOICES: dict[str, list[Any]] = {
    "front": ["front-0", "front-0", "front-1"],
    "request": list(range(12)),
    "family": [0, 0, 1],
    "shared": [130, 64, 65, 63, 1, 30, 128, 150, 192, 260, 0],
    "own": [1, 0, 5, 20],
    "follows": [False, False, True],
    "resumed": [0, 0, 0, 1, 5, 64],
    "n": [1, 1, 1, 2, 3, 5],
    "max_tokens": [70, 140, 5, 30, 2, 1, 0],
    "min_tokens": [0, 0, 3],
    "stops": [False, False, True],
    "ignore_eos": [False, False, True],
    "temperature": [0.0, 1.0],
    "penalty": [0.0, 0.0, 0.5],
    "logprobs": [None, None, 1],
    "prompt_logprobs": [None, None, None, 0],
    "salt": ["", "", "a", OWN_SALT],
    "priority": [1, 1, 0, 2, 3],
    "urgency": [0, 0, 1, 2],
    "reserved": [0, 0, 1, 2],
}
"""Lengths around the boundaries of blocks and chunks. Some of them are long enough to fill tiny pools.
Hypothesis shrinks a failing example towards the first values."""

ASKS = st.builds(Ask, **{name: st.sampled_from(choices) for name, choices in CHOICES.items()})


class Traffic(RuleBasedStateMachine):
    @initialize(
        max_num_seqs=st.sampled_from([4, 3, 2, 1, 6]),
        extra_budget=st.sampled_from([100, 0, 1, 7, 64, 400]),
        mixed_share=st.sampled_from([1.0, 0.0, 0.5]),
        blocks=st.sampled_from([6, 5, 7, 9, 14, 4, 2]),
        max_model_len=st.sampled_from([320, 100, 700]),
        prefix_cache=st.booleans(),
        overlap=st.booleans(),
    )
    def start(
        self,
        max_num_seqs: int,
        extra_budget: int,
        mixed_share: float,
        blocks: int,
        max_model_len: int,
        prefix_cache: bool,
        overlap: bool,
    ) -> None:
        self.max_model_len = max_model_len
        self.scheduler = Scheduler(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_seqs + extra_budget,
            max_mixed_tokens=max_num_seqs + int(mixed_share * extra_budget),
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            blocks=blocks,
            prefix_cache=prefix_cache,
        )
        self.core = EngineCore(self.scheduler, SimulatedRunner(max_num_seqs, blocks), overlap=overlap)
        self.submits: dict[tuple[str, int], Submit] = {}
        self.told: dict[tuple[str, int, int], Told] = {}
        self.finished: list[Finished] = []
        self.conversations: list[list[int]] = []
        """Prompts and outputs of finished samples without a cache salt."""
        self.spent_rows = self.spent_tokens = 0
        self.initial = (max_num_seqs, self.scheduler.accounting.credit_tokens)
        self.next_handle = 0

    # ── generated events ──────────────────────────────────────────────────────────────────────

    @rule(asks=st.lists(ASKS, min_size=1, max_size=5))
    def burst(self, asks: list[Ask]) -> None:
        for ask in asks:
            self.submit(ask)

    def submit(self, ask: Ask) -> None:
        self.next_handle += 1
        handle, front = self.next_handle, ask.front
        prompt = [(position * (ask.family + 3) + ask.family) % VOCAB for position in range(ask.shared)]
        if ask.follows and self.conversations:
            prompt, ask = self.conversations[handle % len(self.conversations)].copy(), replace(ask, salt="")
        prompt += [(handle + 5 * position) % VOCAB for position in range(ask.own)]
        sampling = SamplingParams(
            max_tokens=ask.max_tokens,
            min_tokens=ask.min_tokens,
            stop_token_ids=(STOP,) if ask.stops else (),
            ignore_eos=ask.ignore_eos,
            temperature=ask.temperature,
            seed=handle % 3,
            presence_penalty=ask.penalty,
            logprobs=ask.logprobs,
            prompt_logprobs=ask.prompt_logprobs,
        )
        submit = Submit(
            handle=handle,
            request_id=f"request-{ask.request}",
            prompt=pack_tokens(prompt),
            n=ask.n,
            first_sample=handle % 2,
            sampling=sampling,
            cache_salt=f"{OWN_SALT}-{handle}" if ask.salt == OWN_SALT else ask.salt,
            priority=ask.priority,
            urgency=ask.urgency,
            reserved_slots=min(ask.reserved, max(0, self.initial[0] - 2)),
        )
        if ask.resumed and ask.n == 1 and prompt:
            # Resubmit the sample with its emitted tokens, as a front does after the death of a replica.
            emitted = alone(submit, submit.first_sample, self.max_model_len).tokens[: ask.resumed]
            if not (STOP in emitted and ask.stops and not ask.ignore_eos):
                submit = msgspec.structs.replace(submit, output_token_ids=emitted)
        self.submits[front, handle] = submit
        for sample in range(submit.first_sample, submit.first_sample + ask.n):
            expected = alone(submit, sample, self.max_model_len) if prompt else Expected([], "error", None)
            self.told[front, handle, sample] = Told(expected)
        self.spent_rows += ask.n
        self.spent_tokens += submit.credit_tokens
        self.scheduler.add(front, submit)

    @precondition(lambda self: self.submits)
    @rule(data=st.data(), whole=st.booleans())
    def cancel(self, data: st.DataObject, whole: bool) -> None:
        front, handle = data.draw(st.sampled_from(sorted(self.submits)))
        submit = self.submits[front, handle]
        sample = None if whole else submit.first_sample + data.draw(st.integers(0, submit.n - 1))
        self.cancel_one(front, handle, sample)

    def cancel_one(self, front: str, handle: int, sample: int | None) -> None:
        for key, told in self.told.items():
            if key[:2] == (front, handle) and sample in (None, key[2]):
                told.cancelled = True
        self.scheduler.cancel(front, handle, sample)

    @rule(request=st.sampled_from(CHOICES["request"]))
    def cancel_request(self, request: int) -> None:
        for (front, handle, _), told in self.told.items():
            if self.submits[front, handle].request_id == f"request-{request}":
                told.cancelled = True
        self.scheduler.cancel_request(f"request-{request}")

    @rule(front=st.sampled_from(CHOICES["front"]))
    def front_dies(self, front: str) -> None:
        self.scheduler.cancel_origin(front)
        for key, told in self.told.items():
            if key[0] == front and not told.finish_reason:
                told.cancelled = True
                told.finish_reason = "disconnected"

    @rule(turns=st.sampled_from([1, 1, 2, 5, 20, 80]))
    def steps(self, turns: int) -> None:
        for _ in range(turns):
            if not self.core.has_work:
                return
            self.step()

    # ── invariants ───────────────────────────────────────────────────────────────────────────

    def step(self) -> None:
        result = self.core.step()
        for front, outputs in result.outputs.items():
            for output in outputs:
                self.take(str(front), output)
        self.finished += result.finished
        self.scheduler.check()
        self.check_salts()

    def take(self, front: str, output: Output) -> None:
        told = self.told[front, output.handle, output.sample]
        assert not told.finish_reason, f"output after the end ({told.finish_reason}): {output}"
        told.outputs += 1
        told.tokens += output.token_ids
        told.finish_reason = output.finish_reason
        assert (output.cached_tokens is not None) == (told.outputs == 1)
        submit = self.submits[front, output.handle]
        if told.outputs == 1:
            assert output.cached_tokens is not None
            assert 0 <= output.cached_tokens <= submit.prompt_tokens
            if submit.n == 1 and submit.cache_salt.startswith(OWN_SALT):
                assert output.cached_tokens == 0, (
                    "a cache hit on blocks that no submission with this salt computed"
                )
        if output.token_ids:
            expected = told.expected.prompt_logprobs if told.outputs == 1 else None
            assert output.prompt_logprobs == expected
            assert (output.logprobs is not None) == (submit.sampling.logprobs is not None)
            for chosen, token in zip(output.logprobs or (), output.token_ids, strict=False):
                assert chosen.token_id == token
        if output.finish_reason == "length" and not told.tokens and told.expected.prompt_logprobs is not None:
            assert output.prompt_logprobs == told.expected.prompt_logprobs
        assert told.tokens == told.expected.tokens[: len(told.tokens)]
        if output.finish_reason == "cancelled":
            assert told.cancelled
        elif output.finish_reason == "error":
            assert output.error
        elif output.finish_reason:
            assert (told.tokens, told.finish_reason) == (told.expected.tokens, told.expected.finish_reason)
            if not submit.cache_salt:
                self.conversations.append(prompt_of(submit) + submit.output_token_ids + told.tokens)
        else:
            assert output.token_ids, "an output without content"

    def check_salts(self) -> None:
        salt_of_block: dict[int, str] = {}
        for submission in self.scheduler.accounting.all_open():
            for sequence in submission.sequences:
                for block in map(sequence.block, range(sequence.block_count)):
                    salt = submission.submit.cache_salt
                    assert salt_of_block.setdefault(block, salt) == salt, "two salts share a block"

    @invariant()
    def credit_is_never_granted_twice(self) -> None:
        if hasattr(self, "core"):
            gauges = self.core.gauges()
            assert gauges.credit_seqs - self.spent_rows <= self.initial[0]
            assert gauges.credit_tokens - self.spent_tokens <= self.initial[1]
            self.scheduler.check()

    def teardown(self) -> None:
        if not hasattr(self, "core"):
            return
        for _ in range(MAX_STEPS_TO_DRAIN):
            if not self.core.has_work:
                break
            self.step()
        assert not self.core.has_work, "the engine did not finish within the step limit"
        gauges = self.core.gauges()
        assert (gauges.running, gauges.waiting, gauges.blocks_used) == (0, 0, 0)
        assert gauges.credit_seqs - self.spent_rows == self.initial[0]
        assert gauges.credit_tokens - self.spent_tokens == self.initial[1]
        assert len(self.finished) == len(self.submits)
        for key, told in self.told.items():
            assert told.finish_reason, f"{key} never ended"
        emitted = sum(len(told.tokens) for told in self.told.values())
        generated = sum(entry.generated_tokens for entry in self.finished)
        disconnected = any(told.finish_reason == "disconnected" for told in self.told.values())
        assert generated == emitted or (disconnected and generated > emitted)
        assert gauges.generated_tokens == generated
        assert gauges.preemptions == sum(entry.preemptions for entry in self.finished)


TestTraffic = Traffic.TestCase
TestTraffic.settings = examples(
    50,
    stateful_step_count=20,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.mark.parametrize("seed", range(30))
def test_in_heavy_traffic_every_sample_ends_once_with_the_tokens_that_it_gets_alone(seed: int) -> None:
    # This traffic is denser than the traffic generated by hypothesis, so preemptions, forks and prefix-cache
    # hits are frequent.
    draw = random.Random(seed)
    traffic = Traffic()
    traffic.start(
        max_num_seqs=draw.choice([2, 3, 4, 8]),
        extra_budget=draw.choice([0, 3, 64, 100, 500]),
        mixed_share=draw.choice([0.0, 0.3, 1.0]),
        blocks=draw.choice([5, 6, 8, 12, 24]),
        max_model_len=draw.choice([200, 320]),
        prefix_cache=draw.random() < 0.8,
        overlap=draw.random() < 0.5,
    )
    for _ in range(30):
        if draw.random() < 0.8:
            traffic.submit(Ask(**{name: draw.choice(choices) for name, choices in CHOICES.items()}))
        if traffic.submits and draw.random() < 0.15:
            front, handle = draw.choice(sorted(traffic.submits))
            traffic.cancel_one(
                front, handle, draw.choice([None, traffic.submits[front, handle].first_sample])
            )
        if draw.random() < 0.02:
            traffic.front_dies(draw.choice(CHOICES["front"]))
        if draw.random() < 0.02:
            traffic.cancel_request(draw.choice(CHOICES["request"]))
        traffic.steps(draw.choice([0, 1, 2, 5, 20]))
    traffic.teardown()
