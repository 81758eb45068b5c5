"""Tests that the cost of another sample of a long prompt does not depend on the prompt's length."""

from __future__ import annotations

import time
from collections import Counter

import msgspec
import pytest

from engine.messages import BLOCK_TOKENS, SamplingParams, Submit, pack_tokens
from engine.scheduling.admission import MAX_TABLE_ENTRIES
from engine.scheduling.block_pool import BlockPool
from tests.engine.scheduling.host_times import entries, measure, receive
from tests.engine.scheduling.simulated_engine import SimulatedEngine, first_tokens
from tests.prompts import prompt_of

PROMPT = 64 * BLOCK_TOKENS + 10
PROMPT_BLOCKS = 65
SAMPLES = 40


@pytest.fixture
def pool_calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the references to blocks that are added and dropped one by one."""
    calls: Counter[str] = Counter()
    for name in ("share", "release"):
        original = getattr(BlockPool, name)

        def counted(pool: BlockPool, block: int, name: str = name, original: object = original) -> None:
            calls[name] += 1
            original(pool, block)  # type: ignore[operator]

        monkeypatch.setattr(BlockPool, name, counted)
    return calls


def test_samples_share_their_prompts_blocks_in_plans_and_reference_counts(pool_calls: Counter[str]) -> None:
    _, costs = measure(prompt=PROMPT, samples=SAMPLES, slots=64)
    # The plans list the prompt's blocks once. Each sample adds one entry for the shared blocks, one for its
    # copy of the last block, and one for each later block.
    assert max(cost.entries for cost in costs) <= PROMPT_BLOCKS + 3 * SAMPLES
    assert sum(cost.entries for cost in costs) <= PROMPT_BLOCKS + 6 * SAMPLES
    assert pool_calls["share"] <= SAMPLES
    assert pool_calls["release"] <= PROMPT_BLOCKS + 5 * SAMPLES


def test_samples_that_wait_for_slots_share_their_prompts_blocks_too(pool_calls: Counter[str]) -> None:
    _, costs = measure(prompt=PROMPT, samples=SAMPLES, slots=16)
    groups = 3
    assert max(cost.entries for cost in costs) <= PROMPT_BLOCKS + 3 * SAMPLES
    assert sum(cost.entries for cost in costs) <= groups * PROMPT_BLOCKS + 6 * SAMPLES
    assert pool_calls["share"] <= groups * PROMPT_BLOCKS + SAMPLES


@pytest.mark.parametrize("cached", [False, True])
def test_plans_of_a_resumed_request_have_a_bounded_size(cached: bool) -> None:
    """After the loss of its replica, a request is resumed with a separate submission for every sample, each
    of which lists all of its blocks."""
    _, costs = measure(prompt=4 * PROMPT, samples=2 * SAMPLES, slots=2 * SAMPLES, cached=cached, resumed=True)
    assert sum(cost.entries for cost in costs) >= 2 * SAMPLES * 4 * (PROMPT_BLOCKS - 1)
    assert max(cost.entries for cost in costs) <= MAX_TABLE_ENTRIES + 4 * PROMPT_BLOCKS


LONG_PROMPT = 150 * BLOCK_TOKENS + 10
LIMIT = MAX_TABLE_ENTRIES + 2 * SAMPLES
"""Maximum number of block table entries in a step: the entries of admitted sequences plus the entries of
decodes."""


def steps_until_done(engine: SimulatedEngine) -> list[int]:
    """Run the engine until it has no work. Returns the number of block table entries of each step."""
    made = []
    while engine.core.has_work:
        plan = engine.step()
        made.append(entries(plan) if plan is not None else 0)
    return made


def wide_engine() -> SimulatedEngine:
    return SimulatedEngine(
        max_num_seqs=64, max_num_batched_tokens=8192, max_model_len=LONG_PROMPT + 100, blocks=800
    )


def test_preempted_samples_of_a_long_prompt_return_in_plans_of_bounded_size() -> None:
    engine = wide_engine()
    wide = engine.submit(LONG_PROMPT, n=SAMPLES, max_tokens=20, priority=3)
    while len(engine.outputs) < 2 * SAMPLES:
        engine.step()
    urgent = [engine.submit(10, max_tokens=1, priority=0, urgency=2) for _ in range(64)]
    made = steps_until_done(engine)
    assert engine.finished[-1].preemptions >= 30, engine.finished[-1]
    assert max(made) <= LIMIT
    for submit in (wide, *urgent):
        engine.expect_alone(submit)


def test_samples_that_are_resumed_on_another_replica_start_in_plans_of_bounded_size() -> None:
    engine = wide_engine()
    first = engine.submit(LONG_PROMPT, max_tokens=1)
    steps_until_done(engine)
    resumed = [
        engine.submit(
            prompt_of(first),
            output_token_ids=first_tokens(first, 3),
            first_sample=0,
            max_tokens=10,
        )
        for _ in range(SAMPLES)
    ]
    made = steps_until_done(engine)
    assert sum(made) > LIMIT, "together, the samples have more entries than one step may have"
    assert max(made) <= LIMIT
    for submit in resumed:
        engine.expect_alone(submit)


def test_cancelling_many_resumed_samples_releases_a_bounded_number_of_blocks_per_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = wide_engine()
    first = engine.submit(LONG_PROMPT, max_tokens=1)
    steps_until_done(engine)
    resumed = [
        engine.submit(
            prompt_of(first), output_token_ids=first_tokens(first, 3), first_sample=0, max_tokens=1000
        )
        for _ in range(SAMPLES)
    ]
    while engine.scheduler.waiting:
        engine.step()
    blocks = LONG_PROMPT // BLOCK_TOKENS
    monkeypatch.setattr("engine.scheduling.results.MAX_RELEASED", 4 * blocks)
    ended = len(engine.finished)
    for submit in resumed:
        engine.scheduler.cancel_request(submit.request_id)
    steps = 0
    while engine.scheduler.has_work:
        engine.step()
        steps += 1
        assert len(engine.finished) - ended <= 5 * (1 + steps)
    assert steps >= SAMPLES // 5 - 1
    assert [one.finish_reason for one in engine.finished[ended:]] == [["cancelled"]] * SAMPLES
    engine.drain()


def test_reading_a_long_prompt_is_much_faster_than_decoding_a_list_of_its_tokens() -> None:
    tokens = list(range(131_000))
    submit = Submit(
        handle=1,
        request_id="long",
        prompt=pack_tokens(tokens),
        n=128,
        sampling=SamplingParams(max_tokens=1),
    )
    encoded = msgspec.msgpack.encode(tokens)
    read_ms, list_ms = [], []
    # Compare the minimum of several alternating measurements, because other work on the machine affects it
    # little.
    for _ in range(5):
        received, elapsed_ms = receive(submit)
        read_ms.append(elapsed_ms)
        began = time.thread_time()
        msgspec.msgpack.decode(encoded)
        list_ms.append(1e3 * (time.thread_time() - began))
    assert prompt_of(received) == tokens
    assert min(read_ms) < min(list_ms) / 2
