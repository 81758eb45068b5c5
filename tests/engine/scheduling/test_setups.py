"""Tests of the slot setups in plans. Forks share one setup, and a step's setups have a limited size."""

from __future__ import annotations

from typing import Any

import pytest

from engine.plan import SlotSetup
from engine.scheduling import admission
from tests.engine.scheduling.simulated_engine import SimulatedEngine
from tests.prompts import prompt_of


def setups_by_step(engine: SimulatedEngine) -> list[list[SlotSetup]]:
    return [plan.setups for plan in engine.runner.plans if plan.setups]


def test_forks_share_one_setup_in_the_plan() -> None:
    engine = SimulatedEngine()
    submit = engine.submit(150, n=4, first_sample=3, temperature=1.0, presence_penalty=0.5)
    engine.drain()
    ((setup,),) = setups_by_step(engine)
    assert setup.history == prompt_of(submit)
    assert [sample for _, sample in setup.members] == [3, 4, 5, 6]
    engine.expect_alone(submit)


def test_the_setups_of_a_step_are_bounded_and_every_sequence_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_SETUP_NUMBERS", 100)
    engine = SimulatedEngine()
    lengths = [120, 40, 40, 40]
    submits = [engine.submit(length, presence_penalty=0.5, max_tokens=50) for length in lengths]
    engine.drain()
    told = [[len(setup.history) for setup in setups] for setups in setups_by_step(engine)]
    assert told == [[120], [40, 40], [40]]
    for submit in submits:
        engine.expect_alone(submit)


def test_biases_and_stop_tokens_count_towards_the_setup_limit_but_prompts_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admission, "MAX_SETUP_NUMBERS", 40)
    engine = SimulatedEngine(max_num_seqs=8)
    biased: dict[str, Any] = {"logit_bias": dict.fromkeys(range(10), 1.0)}
    stopping: dict[str, Any] = {"stop_token_ids": tuple(range(20)), "ignore_eos": True}
    for fields in ({}, biased, stopping, stopping, {}):
        engine.submit(50, **fields)
    engine.drain()
    assert [len(setups) for setups in setups_by_step(engine)] == [2, 3]


def test_a_setup_carries_the_last_output_tokens_if_bad_words_need_them() -> None:
    engine = SimulatedEngine(max_num_seqs=8)
    words: dict[str, Any] = {"bad_words": ((1, 2),), "max_tokens": 60}
    engine.submit(5, **words)
    engine.submit(5, output_token_ids=[4, 3], **words)
    engine.submit(5, output_token_ids=list(range(3, 10)) * 6, **words)
    engine.submit(5, output_token_ids=[4, 3])
    engine.drain()
    setups = [setup for step in setups_by_step(engine) for setup in step]
    assert [setup.recent for setup in setups] == [[], [4, 3], (list(range(3, 10)) * 6)[-31:], []]
