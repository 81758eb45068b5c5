"""Tests of quotas: reservations, refusals, settlement, changed limits and restarts."""

from __future__ import annotations

import math
from typing import Any

import pytest

from appliance.quantities import duration
from appliance.traffic.quotas import Quotas, Reservation, Shortage
from store.policies import KeyRecord, Policies, Quota, TenantRecord
from store.quotas import QuotaState, Used


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


def key(key_id: str = "k", tenant: str = "acme", **fields: Any) -> KeyRecord:
    return KeyRecord(
        id=key_id, name=key_id, tenant=tenant, prefix="", sha256=key_id, created_at=0.0, **fields
    )


def tenant(name: str = "acme", **limits: Any) -> TenantRecord:
    return TenantRecord(name=name, created_at=0.0, quota=Quota(**limits))


def quotas(time: Time, *tenants: TenantRecord, keys: tuple[KeyRecord, ...] = ()) -> Quotas:
    made = Quotas(time)
    made.set_policies(Policies(tenants, keys))
    return made


def reserve(of: Quotas, prompt: int = 10, most: int = 90, key_id: str = "", **how: Any) -> Any:
    return of.reserve("acme", key_id, prompt_tokens=prompt, max_tokens=most, **how)


def taken(of: Quotas, prompt: int = 10, most: int = 90, key_id: str = "", **how: Any) -> Reservation:
    found = reserve(of, prompt, most, key_id, **how)
    assert isinstance(found, Reservation), found.message
    return found


def spent(of: Quotas, prompt: int, most: int, key_id: str = "") -> None:
    """Run a request that uses its whole reservation."""
    held = taken(of, prompt, most, key_id)
    of.settle(held, prompt + most)
    of.close(held)


def short(of: Quotas, prompt: int = 10, most: int = 90, key_id: str = "") -> Shortage:
    found = reserve(of, prompt, most, key_id)
    assert isinstance(found, Shortage)
    return found


def used(of: Quotas, scope: str = "tenant", name: str = "acme") -> dict[str, int]:
    return {usage.limit: usage.used for usage in of.usage(scope, name)}


def test_a_tenant_without_limits_is_never_delayed(time: Time) -> None:
    of = quotas(time, tenant(), tenant("other", requests_per_minute=1))
    for _ in range(100):
        taken(of, most=10**9)
    assert of.rate_limits("acme", "") is None
    assert [levels.name for levels in of.news(0.0)[0]] == ["other"]


def test_the_prompt_and_the_maximum_output_are_reserved(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=250))
    taken(of, 10, 90), taken(of, 10, 90)
    shortage = short(of, 10, 90)
    assert (shortage.kind, shortage.wait_s, shortage.useful) == ("tokens", pytest.approx(12), True)
    assert shortage.message == (
        "rate limit reached for tokens per minute of tenant 'acme': limit 250, used 200 (200 reserved by "
        "unfinished requests), requested 100; try again in 12s"
    )
    taken(of, 10, 40)


def test_unused_tokens_are_returned_and_used_ones_are_not(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=100, requests_per_minute=2))
    held = taken(of)
    of.settle(held, 10 + 30)
    assert used(of) == {"requests_per_minute": 1, "tokens_per_minute": 40}
    of.close(held)
    assert used(of) == {"requests_per_minute": 1, "tokens_per_minute": 40}
    taken(of, 10, 50)
    assert short(of, 0, 0).kind == "requests"


def test_a_request_that_never_ran_uses_no_quota(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=100, requests_per_minute=1))
    held = taken(of)
    of.settle(held, 0)
    of.close(held)
    assert used(of) == {"requests_per_minute": 0, "tokens_per_minute": 0}
    assert [usage.held for usage in of.usage("tenant", "acme")] == [0, 0]


def test_tenant_and_key_must_both_have_quota_left_and_a_refusal_uses_neither(time: Time) -> None:
    keys = (key("a", quota=Quota(tokens_per_minute=100)), key("b"))
    of = quotas(time, tenant(tokens_per_minute=150), keys=keys)
    taken(of, key_id="a")
    assert "key 'a'" in short(of, 5, 5, key_id="a").message
    assert used(of) == {"tokens_per_minute": 100}
    assert "tenant 'acme'" in short(of, key_id="b").message
    taken(of, 10, 40, key_id="b")


def test_of_several_exceeded_limits_the_one_with_the_longest_wait_is_named(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=100, tokens_per_day=120, requests_per_minute=1))
    taken(of)
    shortage = short(of)
    assert "tokens per day" in shortage.message and shortage.kind == "tokens"
    assert shortage.wait_s == pytest.approx(80 / 120 * 86400)
    assert not shortage.useful


def test_a_request_that_can_never_fit_is_refused_as_useless_to_retry(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=100, burst_s=30))
    shortage = short(of, 30, 21)
    assert (shortage.wait_s, shortage.useful) == (math.inf, False)
    assert shortage.message == (
        "request too large for tokens per minute of tenant 'acme': limit 50, requested 51; shorten the "
        "prompt or lower max_tokens"
    )


def test_buckets_refill_continuously_and_no_further_than_their_burst(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=60, burst_s=120))
    spent(of, 20, 100)
    time.now += 1.5
    assert used(of) == {"tokens_per_minute": 119}
    time.now += 10_000
    taken(of, 20, 100)
    assert short(of, 1, 1).wait_s == 2.0


def test_a_burst_of_less_than_one_request_still_allows_one(time: Time) -> None:
    of = quotas(time, tenant(requests_per_minute=0.5))
    taken(of)
    assert short(of).wait_s == 120.0


def test_an_answer_without_a_length_limit_is_shortened_to_the_remaining_quota(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=1000))
    held = taken(of, 100, 4000, may_lower=True, samples=4)
    assert (held.max_tokens, held.tokens) == (900, 1000)
    of.settle(held, 700)
    held = taken(of, 99, 4000, may_lower=True, samples=2)
    assert (held.max_tokens, held.tokens) == (200, 299), "both samples have the same limit"
    assert short(of, 1, 1).useful


def test_an_answer_without_a_length_limit_is_refused_rather_than_made_very_short(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=100))
    taken(of, 10, 70)
    shortage = reserve(of, 10, 4000, may_lower=True)
    assert isinstance(shortage, Shortage)
    assert (shortage.wait_s, "requested 26" in shortage.message) == (6 / 100 * 60, True)
    assert taken(of, 10, 8, may_lower=True).max_tokens == 8


def test_unused_tokens_of_a_long_request_are_returned_up_to_the_capacity(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=60))
    long = taken(of, 10, 50)
    time.now += 20
    spent(of, 5, 15)
    time.now += 20
    of.settle(long, 10)
    assert used(of) == {"tokens_per_minute": 0}, "20 + 50 unused tokens exceed the capacity of 60"


def test_many_concurrent_reservations_are_returned_exactly_in_any_order(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=6000, burst_s=60))
    held = [taken(of, 1, 59 - number % 7) for number in range(100)]
    for number in (*range(1, 100, 2), *range(0, 100, 2)):
        of.settle(held[number], 10)
    # No time passes, so the quota is not refilled. Levels are stored with limited precision, but not a single
    # token may be lost.
    assert used(of) == {"tokens_per_minute": 1000}


def test_a_raised_limit_gives_no_tokens_immediately_and_a_lowered_one_caps_the_level(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=100))
    taken(of, 10, 60)
    time.now += 3
    of.set_policies(Policies([tenant(tokens_per_minute=6000)]))
    assert short(of, 10, 26).wait_s == pytest.approx(1 / 100)
    taken(of, 10, 25)
    time.now += 60
    of.set_policies(Policies([tenant(tokens_per_minute=50)]))
    taken(of, 10, 40)
    assert short(of, 1, 0).wait_s == pytest.approx(60 / 50)


def test_an_idle_tenant_gains_nothing_from_a_limit_that_is_raised_after_a_long_time(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=100))
    time.now += 3600
    of.set_policies(Policies([tenant(tokens_per_minute=100_000)]))
    assert isinstance(reserve(of, 10, 91), Shortage)


def test_running_requests_return_tokens_up_to_the_capacity_of_the_changed_limit(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=1000, tokens_per_day=5000))
    held = taken(of, 10, 890)
    of.set_policies(Policies([tenant(tokens_per_minute=500)]))
    assert used(of) == {"tokens_per_minute": 400}
    of.settle(held, 20)
    of.close(held)
    assert used(of) == {"tokens_per_minute": 0}


def test_a_new_limit_is_not_charged_for_requests_that_are_already_running(time: Time) -> None:
    of = quotas(time, tenant())
    held = taken(of, 10, 500)
    of.set_policies(Policies([tenant(tokens_per_minute=100)]))
    of.settle(held, 10)
    of.close(held)
    assert used(of) == {"tokens_per_minute": 0}


def test_a_rotated_key_continues_with_the_remaining_quota_of_the_old_key(time: Time) -> None:
    limits = Quota(tokens_per_minute=100)
    of = quotas(time, tenant(), keys=(key("old", quota=limits),))
    taken(of, 10, 50, key_id="old")
    of.news(0.0)
    rotated = (key("old", quota=limits, replaced_by="new"), key("new", quota=limits))
    of.set_policies(Policies([tenant()], rotated))
    assert short(of, 10, 50, key_id="new").wait_s == short(of, 10, 50, key_id="old").wait_s == 12.0
    levels, deleted = of.news(0.0)
    assert ([one.name for one in levels], deleted) == (["new"], [("key", "old")])
    revoked = (key("old", quota=limits, replaced_by="new", revoked_at=1.0), key("new", quota=limits))
    of.set_policies(Policies([tenant()], revoked))
    assert used(of, "key", "new") == {"tokens_per_minute": 60}


def test_a_clock_that_is_set_back_changes_no_level(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=60))
    taken(of, 10, 50)
    time.now -= 50
    assert used(of) == {"tokens_per_minute": 60}
    time.now += 1
    assert used(of) == {"tokens_per_minute": 59}


def test_the_tightest_limit_of_each_kind_is_reported(time: Time) -> None:
    keys = (key("k", quota=Quota(tokens_per_minute=300, requests_per_minute=600)),)
    of = quotas(time, tenant(tokens_per_day=8640, requests_per_minute=60), keys=keys)
    taken(of, 10, 90, key_id="k")
    limits = of.rate_limits("acme", "k")
    assert limits is not None
    assert (limits.limit_requests, limits.remaining_requests, limits.reset_requests_s) == (60, 59, 1.0)
    assert (limits.limit_tokens, limits.remaining_tokens, limits.reset_tokens_s) == (300, 200, 20.0)
    assert (of.rate_limits("acme", "") or limits).limit_tokens == 8640


# ── restarts ──


def restarted(
    time: Time, of: Quotas, after_s: float, *used: Used, keys: tuple[KeyRecord, ...] = ()
) -> Quotas:
    """Take a snapshot at Unix time 5000, and return the quotas as a restart `after_s` seconds later restores
    them."""
    levels, _ = of.news(5000.0)
    again = quotas(time, *of._policies.tenants.values(), keys=tuple(of._policies.keys.values()))
    again.restore(QuotaState(levels, list(used)), 5000.0 + after_s)
    return again


def test_a_clean_restart_keeps_the_levels_and_refills_them_for_the_time_between(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=60, requests_per_minute=6))
    spent(of, 10, 50)
    again = restarted(time, of, 12.0)
    assert used(again) == {"requests_per_minute": 0, "tokens_per_minute": 48}


def test_after_a_crash_open_requests_count_with_their_whole_reservations(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=60, requests_per_minute=6))
    taken(of, 10, 30)
    again = restarted(time, of, 0.0, Used("acme", "", 4999.0, 40))
    assert used(again) == used(of) == {"requests_per_minute": 1, "tokens_per_minute": 40}


def test_after_a_crash_requests_that_ended_since_the_snapshot_count_with_their_usage(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=60))
    held = taken(of, 10, 30)
    again = restarted(time, of, 1.0, Used("acme", "", 4999.0, 25), Used("acme", "", 5000.5, 9))
    assert used(again) == {"tokens_per_minute": 33}
    of.settle(held, 25)
    time.now += 1
    taken(of, 4, 5)
    assert used(of) == {"tokens_per_minute": 33}


def test_a_full_bucket_is_not_refilled_before_later_usage_is_subtracted(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=60))
    again = restarted(time, of, 30.0, Used("acme", "", 5030.0, 60))
    assert used(again) == {"tokens_per_minute": 60}


def test_a_key_rotated_just_before_a_crash_gets_the_levels_of_the_old_key(time: Time) -> None:
    limits = Quota(tokens_per_minute=100)
    of = quotas(time, tenant(), keys=(key("old", quota=limits),))
    spent(of, 10, 50, key_id="old")
    levels, _ = of.news(5000.0)
    rotated = (key("old", quota=limits, replaced_by="new"), key("new", quota=limits))
    again = quotas(time, tenant(), keys=rotated)
    again.restore(QuotaState(levels, [Used("acme", "old", 5000.0, 7)]), 5000.0)
    assert used(again, "key", "new") == {"tokens_per_minute": 67}
    assert [one.name for one in again.news(5000.0)[0]] == ["new"]
    assert QuotaState(levels).levels[0].name == "old"


def test_only_changed_levels_are_reported_and_unwritten_ones_are_reported_again(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=60), tenant("quiet", tokens_per_minute=5))
    assert [one.name for one in of.news(1.0)[0]] == ["acme", "quiet"]
    assert of.news(2.0) == ([], [])
    taken(of, 1, 1)
    assert [one.name for one in of.news(3.0)[0]] == ["acme"]
    of.remember()
    assert len(of.news(4.0)[0]) == 2
    of.reserve("unlimited", "", prompt_tokens=1, max_tokens=1)
    assert len(of.news(5.0)[0]) == 1, "one level is reported although none changed"
    of.set_policies(Policies([tenant("quiet", tokens_per_minute=5)]))
    assert of.news(6.0) == ([], [("tenant", "acme")])


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0.0, "0s"),
        (0.012, "12ms"),
        (0.0111, "12ms"),
        (0.9999, "1s"),
        (8.2, "9s"),
        (360.0, "6m0s"),
        (5430.0, "1h30m30s"),
        (86400.0, "24h0m0s"),
    ],
)
def test_durations_are_written_in_openais_format(seconds: float, said: str) -> None:
    assert duration(seconds) == said


def test_refused_work_is_charged_up_to_the_remaining_quota(time: Time) -> None:
    of = quotas(
        time,
        tenant(requests_per_minute=3, tokens_per_minute=1200),
        keys=(key(quota=Quota(tokens_per_minute=600)),),
    )
    of.news(0.0)
    of.charge("acme", "k", 300)
    assert used(of) == {"requests_per_minute": 1, "tokens_per_minute": 300}
    assert used(of, "key", "k") == {"tokens_per_minute": 300}
    assert {levels.name for levels in of.news(0.0)[0]} == {"acme", "k"}
    of.charge("acme", "k", 10_000)
    assert used(of) == {"requests_per_minute": 2, "tokens_per_minute": 1200}
    assert short(of, key_id="k").kind == "tokens"
    time.now += 60
    spent(of, 100, 100, "k")


def test_work_outside_of_requests_is_charged_to_the_token_limits_only(time: Time) -> None:
    of = quotas(time, tenant(requests_per_minute=3, tokens_per_minute=1200))
    of.charge("acme", "k", 300, requests=0)
    assert used(of) == {"requests_per_minute": 0, "tokens_per_minute": 300}


def test_a_charge_does_not_change_what_running_requests_return(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=1000))
    held = taken(of, 100, 500)
    of.charge("acme", "", 200)
    of.settle(held, 100)
    of.close(held)
    assert used(of) == {"tokens_per_minute": 300}


def test_charges_leave_the_amount_held_by_requests_exact(time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=100))
    held = taken(of, 1, 2)
    for _ in range(100):
        time.now += 8.6
        of.charge("acme", "", 100)
        assert of.usage("tenant", "acme")[0].held == 3
    of.settle(held, 3)
    of.close(held)
    assert of.usage("tenant", "acme")[0].held == 0


@pytest.mark.parametrize("amount", [123, 245, 509])
def test_a_whole_minute_limit_allows_exactly_that_amount(amount: int, time: Time) -> None:
    of = quotas(time, tenant(tokens_per_minute=amount, requests_per_minute=amount))
    assert {usage.limit: usage.capacity for usage in of.usage("tenant", "acme")} == {
        "tokens_per_minute": amount,
        "requests_per_minute": amount,
    }
    spent(of, 100, amount - 100)
