"""Tests of setups in plans: forks share one setup, and the setups of a step are bounded."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan import SlotSetup
from engine.scheduling import admission
from tests.engine.scheduling.test_scheduler_rules import House


def setups_by_step(house: House) -> list[list[SlotSetup]]:
    return [plan.setups for plan in house.runner.plans if plan.setups]


def test_forks_share_one_setup_in_the_plan() -> None:
    house = House()
    submit = house.submit(150, n=4, first_sample=3, temperature=1.0, presence_penalty=0.5)
    house.drain()
    ((setup,),) = setups_by_step(house)
    assert setup.history == submit.prompt_token_ids
    assert [sample for _, sample in setup.members] == [3, 4, 5, 6]
    house.expect_alone(submit)


def test_the_setups_of_a_step_are_bounded_and_every_sequence_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_SETUP_NUMBERS", 100)
    house = House()
    lengths = [120, 40, 40, 40]
    submits = [house.submit(length, presence_penalty=0.5, max_tokens=50) for length in lengths]
    house.drain()
    told = [[len(setup.history) for setup in setups] for setups in setups_by_step(house)]
    assert told == [[120], [40, 40], [40]]
    for submit in submits:
        house.expect_alone(submit)


def test_biases_and_stop_tokens_count_towards_the_setup_limit_but_prompts_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_SETUP_NUMBERS", 40)
    house = House(max_num_seqs=8)
    biased: dict[str, Any] = {"logit_bias": dict.fromkeys(range(10), 1.0)}
    stopping: dict[str, Any] = {"stop_token_ids": tuple(range(20)), "ignore_eos": True}
    for fields in ({}, biased, stopping, stopping, {}):
        house.submit(50, **fields)
    house.drain()
    assert [len(setups) for setups in setups_by_step(house)] == [2, 3]
