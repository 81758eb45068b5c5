"""Tests that the core's credits and the engine's scheduler agree on how many slots requests of each priority
and urgency may take."""

from __future__ import annotations

import random

import msgspec
import pytest

from appliance.traffic.credits import CreditAccount
from engine.levels import LEVELS, TIERS, split_level
from engine.messages import Submit
from engine.rank_messages import Report
from tests.engine.scheduling.simulated_engine import SimulatedEngine
from tests.prompts import prompt_of

SHARE = 0.25
PROMPT = 10


class Pair:
    """An engine that never runs out of tokens or blocks, and the core's credit account for it."""

    def __init__(self, slots: int) -> None:
        self.engine = SimulatedEngine(max_num_seqs=slots, max_num_batched_tokens=4096, blocks=4096)
        self.account = CreditAccount("r", "m")
        self.several = False
        self.report()

    @property
    def share(self) -> float:
        return SHARE if self.several else 0.0

    def report(self) -> None:
        gauges = msgspec.structs.asdict(self.engine.core.gauges())
        self.account.learn(Report(**gauges, finished=[], decode_steps=0, step_ms=0.0, mixed_steps=0))

    def submit(self, level: int, n: int, max_tokens: int) -> Submit:
        priority, urgency = split_level(level)
        self.account.spend(level, n, PROMPT)
        return self.engine.submit(
            PROMPT,
            n=n,
            max_tokens=max_tokens,
            priority=priority,
            urgency=urgency,
            reserved_slots=self.account.reserved_slots(self.share),
        )

    def step(self) -> None:
        self.engine.step()
        self.report()


@pytest.mark.parametrize("seed", range(12))
def test_a_request_for_which_the_credits_name_a_slot_starts_in_the_next_step(seed: int) -> None:
    draw = random.Random(seed)
    pair = Pair(draw.choice((4, 8, 16, 64)))
    tried = 0
    for _ in range(60):
        # The number of reserved slots changes when a second tenant sends requests.
        pair.several = draw.random() < 0.5
        level = draw.randrange(LEVELS)
        waiting = pair.engine.scheduler.waiting_by_level
        if pair.account.levels(pair.share).slots >> level & 1 and not any(waiting[: level + 1]):
            tried += 1
            samples = draw.choice((1, 1, 3, 40)) if TIERS[level] else 1
            submit = pair.submit(level, samples, draw.choice((2, 20, 100)))
            before = len(pair.engine.runner.plans)
            pair.step()
            plan = pair.engine.runner.plans[before]
            assert prompt_of(submit) in [chunk.token_ids for chunk in plan.chunks], level
        for _ in range(draw.choice((0, 1, 5))):
            pair.step()
    assert tried >= 10
