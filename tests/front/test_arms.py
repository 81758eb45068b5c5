"""Tests of how an arm of a traffic split (a model version with a weight) is chosen for a request."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from appliance.channel.served_models import Arm
from appliance.front.arms import choose_arm
from tests.examples import examples

CALLERS = [f"key-{number}\0user-{number % 7}" for number in range(5_000)]


def arms(**weights: float) -> list[Arm]:
    return [Arm(f"unit-{target}", weight, target) for target, weight in weights.items()]


def chosen(split: list[Arm], name: str = "chat") -> list[str]:
    return [choose_arm(name, split, caller).target for caller in CALLERS]


def test_each_arm_gets_callers_in_proportion_to_its_weight() -> None:
    found = chosen(arms(a=90, b=9, c=1))
    for target, share in (("a", 0.9), ("b", 0.09), ("c", 0.01)):
        # The tolerance is more than four standard deviations.
        assert abs(found.count(target) / len(CALLERS) - share) < 0.02, target


def test_a_changed_weight_moves_callers_only_to_or_from_its_arm() -> None:
    before, after = chosen(arms(a=50, b=30, c=20)), chosen(arms(a=50, b=30, c=40))
    moved = [pair for pair in zip(before, after, strict=True) if pair[0] != pair[1]]
    assert moved and {to for _, to in moved} == {"c"}
    # Arm c's share grows from 20/100 to 40/120. No caller moves between the other arms.
    assert abs(len(moved) / len(CALLERS) - (40 / 120 - 20 / 100)) < 0.03


def test_the_callers_of_a_removed_arm_move_and_all_others_stay() -> None:
    before, after = chosen(arms(a=50, b=30, c=20)), chosen(arms(a=50, c=20))
    assert all(was == now for was, now in zip(before, after, strict=True) if was != "b")


def test_splits_of_two_names_are_independent() -> None:
    first, second = chosen(arms(a=50, b=50)), chosen(arms(a=50, b=50), "other")
    equal = sum(one == two for one, two in zip(first, second, strict=True))
    assert abs(equal / len(CALLERS) - 0.5) < 0.03


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=16), st.text())
@examples(40)
def test_the_order_and_the_scale_of_the_weights_do_not_matter(weights: list[float], caller: str) -> None:
    split = [Arm(f"unit-{number}", weight, str(number)) for number, weight in enumerate(weights)]
    doubled = [Arm(arm.unit, arm.weight * 2, arm.target) for arm in split]
    assert (
        choose_arm("chat", split, caller).unit
        == choose_arm("chat", split[::-1], caller).unit
        == choose_arm("chat", doubled, caller).unit
    )
