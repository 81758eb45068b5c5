"""Tests of how long a model stays loaded after several tenants have used it."""

from __future__ import annotations

import math

import pytest

from appliance.traffic.model_uses import ModelUses


def leaves_at(*uses: tuple[str, float, float | None], loaded_at: float = 0.0) -> float:
    """Return the time at which a model with a time to live of 60 s is unloaded. Each use consists of a
    tenant, a time and a `keep_alive` value."""
    known = ModelUses()
    for tenant, used_at, keep_alive_s in uses:
        known.accept(tenant, keep_alive_s, used_at)
    return known.leaves_at(60.0, loaded_at, 5.0)


def test_the_setting_applies_without_a_request() -> None:
    assert leaves_at() == 65.0


@pytest.mark.parametrize(
    ("keep_alive_s", "expected"), [(None, 70.0), (0.0, 10.0), (90.0, 100.0), (-1.0, math.inf)]
)
def test_the_keep_alive_of_the_only_tenant_applies(keep_alive_s: float | None, expected: float) -> None:
    assert leaves_at(("a", 10.0, keep_alive_s)) == expected


def test_the_keep_alive_of_the_latest_request_of_a_tenant_applies() -> None:
    assert leaves_at(("a", 10.0, -1.0), ("a", 20.0, 0.0)) == 20.0


def test_the_longest_keep_alive_of_all_tenants_applies() -> None:
    assert leaves_at(("a", 10.0, None), ("b", 20.0, 0.0)) == 70.0
    assert leaves_at(("a", 10.0, 5.0), ("b", 20.0, 0.0)) == 20.0
    assert leaves_at(("a", 10.0, -1.0), ("b", 20.0, 0.0)) == math.inf


def test_uses_before_the_load_do_not_count() -> None:
    assert leaves_at(("a", 10.0, -1.0), ("b", 20.0, 0.0), loaded_at=15.0) == 20.0


def test_the_time_begins_at_the_end_of_a_request_and_not_before_the_model_is_ready() -> None:
    uses = ModelUses()
    uses.accept("a", 10.0, 1.0)
    assert uses.leaves_at(60.0, 0.0, 5.0) == 15.0
    uses.end("a", 8.0)
    assert uses.leaves_at(60.0, 0.0, 5.0) == 18.0
