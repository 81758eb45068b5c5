"""Short requests of P0, of light tenants and of P1 beside requests that take much, in virtual time."""

from __future__ import annotations

import pytest

from tests.core.isolation import CASES, broken_promises, figures, full_step_s, random_mix


def test_no_single_request_delays_a_short_one_by_more_than_two_full_steps() -> None:
    made = figures()
    assert made.keys() == {"alone", *CASES}
    bounds = {name: made["alone"] + 2e3 * full_step_s(case[0]) + 5.0 for name, case in CASES.items()}
    late = {name: made[name] for name, bound in bounds.items() if made[name] > bound}
    assert not late, bounds


@pytest.mark.parametrize("seed", range(40))
def test_no_mix_of_requests_delays_a_short_one_by_more_than_two_full_steps_property(seed: int) -> None:
    mix = random_mix(seed)
    assert not broken_promises(mix), mix
