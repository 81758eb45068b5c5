"""Tests of predicted step durations."""

from __future__ import annotations

import pytest

from engine.plan import Chunk, StepPlan
from engine.step_forecast import MIN_CPU_FLOPS, StepForecast


def forecast() -> StepForecast:
    return StepForecast(parameters=1_000_000, attention_width=1000, on_gpu=False)


def prompt(tokens: int, start: int = 0) -> StepPlan:
    return StepPlan(1, [], [], [], [], [Chunk(0, start, list(range(tokens)), [0])])


def decodes(rows: int) -> StepPlan:
    return StepPlan(1, [], [], [], list(range(rows)), [])


def test_an_unmeasured_step_is_given_the_time_that_the_slowest_device_needs() -> None:
    work = 2048 * (2 * 1_000_000 + 4 * 1000 * 2048)
    assert forecast().predict_s(prompt(2048)) == pytest.approx(work / MIN_CPU_FLOPS)


def test_a_measured_speed_is_scaled_to_the_size_of_the_step() -> None:
    known = forecast()
    for _ in range(20):
        known.learn(prompt(100), 0.5)
    assert known.predict_s(prompt(100)) == pytest.approx(0.5)
    assert known.predict_s(prompt(1000)) > 5.0
    assert known.predict_s(decodes(1)) < 0.01, "steps without prompts are measured separately"


def test_a_chunk_far_into_a_long_prompt_takes_longer_than_its_first() -> None:
    known = forecast()
    known.learn(prompt(100), 0.1)
    assert known.predict_s(prompt(100, start=100_000)) > 10 * known.predict_s(prompt(100))


def test_predictions_adapt_to_a_slow_machine_within_a_few_steps() -> None:
    known = forecast()
    for _ in range(50):
        known.learn(decodes(4), 0.01)
    for _ in range(10):
        known.learn(decodes(4), 0.1)
    assert known.predict_s(decodes(4)) > 0.05
