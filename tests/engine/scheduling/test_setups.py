"""What ranks are told when sequences start: once what siblings share, and never too much in one step."""

from __future__ import annotations

from typing import Any

import pytest

from engine import scheduler
from engine.messages import RowSetup
from tests.engine.scheduling.test_scheduler_rules import House


def setups_by_step(house: House) -> list[list[RowSetup]]:
    return [plan.setups for plan in house.runner.plans if plan.setups]


def test_samples_that_start_together_are_told_their_tokens_once() -> None:
    house = House()
    submit = house.submit(150, n=4, first_sample=3, temperature=1.0, presence_penalty=0.5)
    house.drain()
    ((setup,),) = setups_by_step(house)
    assert setup.history == submit.prompt_token_ids
    assert [sample for _, sample in setup.members] == [3, 4, 5, 6]
    house.expect_alone(submit)


def test_histories_of_a_step_are_bounded_and_nobody_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "MOST_SETUP_NUMBERS", 100)
    house = House()
    lengths = [120, 40, 40, 40]
    submits = [house.submit(length, presence_penalty=0.5, max_tokens=50) for length in lengths]
    house.drain()
    told = [[len(setup.history) for setup in setups] for setups in setups_by_step(house)]
    assert told == [[120], [40, 40], [40]]
    for submit in submits:
        house.expect_alone(submit)


def test_biases_and_stop_tokens_count_as_histories_do_and_prompts_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler, "MOST_SETUP_NUMBERS", 40)
    house = House(max_rows=8)
    biased: dict[str, Any] = {"logit_bias": dict.fromkeys(range(10), 1.0)}
    stopping: dict[str, Any] = {"stop_token_ids": tuple(range(20)), "ignore_eos": True}
    for fields in ({}, biased, stopping, stopping, {}):
        house.submit(50, **fields)
    house.drain()
    assert [len(setups) for setups in setups_by_step(house)] == [2, 3]


def test_a_setup_tells_the_last_output_tokens_where_bad_words_need_them() -> None:
    house = House(max_rows=8)
    words: dict[str, Any] = {"bad_words": ((1, 2),), "max_tokens": 60}
    house.submit(5, **words)
    house.submit(5, output_token_ids=[4, 3], **words)
    house.submit(5, output_token_ids=list(range(3, 10)) * 6, **words)
    house.submit(5, output_token_ids=[4, 3])
    house.drain()
    setups = [setup for step in setups_by_step(house) for setup in step]
    assert [setup.recent for setup in setups] == [[], [4, 3], (list(range(3, 10)) * 6)[-31:], []]
