"""Tests that jumps of the system clock are detected and reported."""

from __future__ import annotations

import pytest

from appliance.core.clock import HOLD_S, ClockGuard

HOUR_S, YEAR_S = 3600.0, 366 * 86400.0


class Clocks:
    def __init__(self) -> None:
        self.steady, self.set_by = 1000.0, 0.0
        self.guard = ClockGuard(lambda: 1.79e9 + self.steady + self.set_by, lambda: self.steady)


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S, YEAR_S, -YEAR_S])
def test_a_jump_is_reported_until_the_clock_is_set_back(jump_s: float) -> None:
    clocks = Clocks()
    clocks.steady += YEAR_S
    assert clocks.guard.jump_s == 0
    clocks.set_by = jump_s
    assert clocks.guard.jump_s == pytest.approx(jump_s)
    clocks.set_by = 0.0
    assert clocks.guard.jump_s == 0


def test_a_new_time_counts_as_right_after_a_day() -> None:
    clocks = Clocks()
    clocks.set_by = YEAR_S
    assert clocks.guard.jump_s > 0
    clocks.steady += HOLD_S - 1
    assert clocks.guard.jump_s > 0
    clocks.steady += 2
    assert clocks.guard.jump_s == 0
    clocks.set_by = 0.0
    assert clocks.guard.jump_s == pytest.approx(-YEAR_S)


def test_small_corrections_do_not_count_as_jumps() -> None:
    clocks = Clocks()
    clocks.set_by = 5.0
    assert clocks.guard.jump_s == 0
