"""Tests of the survey of KV blocks: block states, owners and ages, the limit on the survey's size, and the
number of blocks read between two steps."""

from __future__ import annotations

import time
from array import array

import msgspec
import pytest

from engine import block_survey
from engine.block_survey import BlockSurvey
from engine.messages import BLOCK_TOKENS
from engine.rank_messages import BLOCK_CELLS, NO_OWNER, BlockUse
from engine.scheduling.block_pool import BlockPool
from tests.engine.scheduling.simulated_engine import SimulatedEngine

FREE, CACHED, USED, SHARED = range(4)


def survey(engine: SimulatedEngine) -> BlockUse:
    found, use = BlockSurvey(engine.scheduler), None
    found.request()
    while use is None:
        use = found.advance()
    assert not found.active
    return msgspec.msgpack.decode(msgspec.msgpack.encode(use), type=BlockUse)


def owners(use: BlockUse) -> list[str]:
    """Return, for each described block, the request that owns it, or an empty string."""
    numbers = array("H", use.owners)
    return ["" if one == NO_OWNER else use.requests[one].request_id for one in numbers]


def test_each_block_is_described_with_its_state_and_its_owner() -> None:
    engine = SimulatedEngine(blocks=16)
    prefix = [1 + i % 30 for i in range(2 * BLOCK_TOKENS)]
    engine.submit([*prefix, 1], max_tokens=200, request_id="first")
    for _ in range(4):
        engine.step()
    engine.submit([*prefix, 2], max_tokens=200, request_id="second")
    ended = engine.submit(BLOCK_TOKENS + 5, max_tokens=1)
    for _ in range(4):
        engine.step()
    assert any(one.request_id == ended.request_id for one in engine.finished)
    use = survey(engine)
    named = list(zip(use.states, owners(use), strict=True))
    assert use.stride == 1
    assert sorted(one for one in named if one[0] != FREE) == [
        (CACHED, ""),
        (USED, "first"),
        (USED, "second"),
        (SHARED, "first"),
        (SHARED, "first"),
    ]
    pool = engine.scheduler.pool
    counts = [use.states.count(state) for state in range(4)]
    assert counts == [16 - pool.used - pool.cached, pool.cached, pool.used - pool.shared, pool.shared]
    assert [(one.request_id, one.blocks, one.preemptions) for one in use.requests] == [
        ("first", 3, 0),
        ("second", 3, 0),
    ]


def test_the_samples_of_a_request_have_one_owner_and_its_preemptions_are_counted() -> None:
    engine = SimulatedEngine(blocks=8, max_num_seqs=4)
    engine.submit(2 * BLOCK_TOKENS + 5, n=3, max_tokens=200, request_id="wide")
    for _ in range(4):
        engine.step()
    use = survey(engine)
    assert {name for name in owners(use) if name} == {"wide"}
    (owner,) = use.requests
    assert owner.blocks == engine.scheduler.pool.used == 2 + 3
    while not engine.core.gauges().preemptions:
        engine.step()
    (owner,) = survey(engine).requests
    assert owner.preemptions == engine.core.gauges().preemptions


def test_the_age_of_a_cached_block_is_the_logarithm_of_the_time_since_its_last_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(block_survey.time, "monotonic", lambda: now)
    engine = SimulatedEngine(blocks=8)
    engine.submit(BLOCK_TOKENS + 5, max_tokens=1)
    engine.drain()
    for passed_s, age in ((0.0, 0), (9.0, 3), (1e9, 29)):
        monkeypatch.setattr(block_survey.time, "monotonic", lambda passed_s=passed_s: now + passed_s)
        use = survey(engine)
        assert use.states.count(CACHED) == 1
        assert use.ages[use.states.index(CACHED)] == age


def test_of_a_larger_pool_every_nth_block_is_described_and_the_size_is_bounded() -> None:
    total = 5 * BLOCK_CELLS - 7
    engine = SimulatedEngine(blocks=total, max_model_len=4096, max_num_batched_tokens=4096)
    engine.submit(4000, max_tokens=90, request_id="long")
    engine.step()
    engine.step()
    use = survey(engine)
    pool = engine.scheduler.pool
    assert use.stride == 5 and len(use.states) == len(range(0, total, 5)) <= BLOCK_CELLS
    assert len(use.ages) == len(use.states) and len(use.owners) == 2 * len(use.states)
    expected = ["long" if pool.references(block) else "" for block in range(0, total, 5)]
    assert "long" in expected and owners(use) == expected
    assert len(msgspec.msgpack.encode(use)) < 66_000


def test_a_survey_reads_a_bounded_number_of_blocks_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks may change state between two slices of a survey. Nevertheless, no slice fails and every block is
    described."""
    monkeypatch.setattr(block_survey, "_SLICE", 4)
    read: list[int] = []
    states = BlockPool.states

    def counted(pool: BlockPool, blocks: range) -> tuple[bytes, bytes]:
        read.append(len(blocks))
        return states(pool, blocks)

    monkeypatch.setattr(BlockPool, "states", counted)
    engine = SimulatedEngine(blocks=40)
    found = BlockSurvey(engine.scheduler)
    for number in range(12):
        engine.submit(100, max_tokens=20 + 9 * number)
    surveys = slices = 0
    while engine.core.has_work:
        engine.step()
        found.request()
        slices += 1
        if (use := found.advance()) is not None:
            surveys += 1
            assert len(use.states) == 40 and sum(read) == 40 and max(read) == 4
            read.clear()
            for state, owner in zip(use.states, array("H", use.owners), strict=True):
                assert owner == NO_OWNER or (state in (USED, SHARED) and owner < len(use.requests))
    assert surveys > 2 and slices > 10 * surveys
