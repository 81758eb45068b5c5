"""Property tests of quotas, with reservations, settlements and completed requests in any order. Usage in a
period never exceeds the capacity plus the period's refill, no reservation leaks, and a crash never restores
used tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.traffic.buckets import Bucket, Peaks, Rate, rate_of
from appliance.traffic.quotas import Quotas, Reservation
from store.policies import RATE_LIMITS, KeyRecord, Policies, Quota, TenantRecord
from store.quotas import QuotaLevels, QuotaState, Used
from tests.examples import examples

KEYS = ("a", "b")
quotas = st.sampled_from(
    [
        Quota(),
        Quota(tokens_per_minute=60.0),
        Quota(tokens_per_minute=100.0, burst_s=120.0),
        Quota(tokens_per_minute=6000.0, burst_s=1.0),
        Quota(tokens_per_day=86400.0, tokens_per_minute=600.0),
        Quota(requests_per_minute=4.0),
        Quota(requests_per_minute=60.0, tokens_per_minute=600.0, tokens_per_day=900.0),
    ]
)


@dataclass
class Ask:
    """A request and its reservation."""

    key: str
    at: float
    reservation: Reservation
    tokens: int
    """Number of reserved tokens, or after settlement the number of charged tokens."""
    settled: bool = False

    def __post_init__(self) -> None:
        self.reserved = self.tokens


@examples(500)
@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(0, 5)), max_size=60),
    st.sampled_from([Peaks.MAX, 3]),
)
def test_a_bucket_tracks_its_highest_level_since_each_reservation(
    happens: list[tuple[bool, int, int]], most: int
) -> None:
    peaks, exact = Peaks(), most == Peaks.MAX
    levels: list[float] = []
    running: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Peaks, "MAX", most)
        for takes, amount, which in happens:
            if takes:
                running.append(peaks.take(float(amount)))
                levels.append(float(amount))
            elif running:
                number = running.pop(which % len(running))
                known = peaks.settle(number, amount, 60.0)
                peak = max(levels[number + 1 :], default=-math.inf)
                assert known == peak if exact else known >= peak
                levels[number + 1 :] = [min(60.0, level + amount) for level in levels[number + 1 :]]
            assert len(peaks._numbers) <= min(most, len(running))


@examples(400)
@given(st.lists(st.tuples(st.sampled_from(["take", "settle", "wait"]), st.integers(0, 8)), max_size=40))
def test_a_bucket_allows_no_more_usage_than_if_each_usage_had_been_known_in_advance(
    happens: list[tuple[str, int]],
) -> None:
    now = 0.0
    bucket = Bucket("tenant 't'", "tokens_per_minute", Rate(64.0, 1.0), now)
    used: dict[int, tuple[float, int]] = {}
    running: list[int] = []
    for event, eighths in happens:
        bucket.refill(now)
        if event == "wait":
            now += 8 * eighths
        elif event == "take" and (amount := int(bucket.level) * eighths // 8):
            running.append(bucket.take(amount))
            used[running[-1]] = now, amount
        elif event == "settle" and running:
            number = running.pop(eighths % len(running))
            at, amount = used[number]
            used[number] = at, amount * eighths // 8
            bucket.settle(number, amount - used[number][1], now)
        level, moment = 64.0, 0.0
        for at, amount in used.values():
            level = min(64.0, level + at - moment) - amount
            moment = at
            assert level >= 0.0
        bucket.refill(now)
        assert bucket.level <= min(64.0, level + now - moment)


class QuotaMachine(RuleBasedStateMachine):
    @initialize(tenant=quotas, a=quotas, b=st.just(Quota()))
    def start(self, tenant: Quota, a: Quota, b: Quota) -> None:
        self.now = 1000.0
        self.quota = {"t": tenant, "a": a, "b": b}
        self.asks: list[Ask] = []
        self.open: list[Ask] = []
        self.quotas = Quotas(lambda: self.now)
        self.quotas.set_policies(self.policies())
        self.snapshot: dict[str, QuotaLevels] = {}
        self.changed_since: set[int] = set()
        self.touched = set(self.quota)
        self.save()

    def policies(self) -> Policies:
        keys = [
            KeyRecord(id=k, name=k, tenant="t", prefix="", sha256=k, created_at=0.0, quota=self.quota[k])
            for k in KEYS
        ]
        return Policies([TenantRecord(name="t", created_at=0.0, quota=self.quota["t"])], keys)

    # ── events ──

    @rule(seconds=st.sampled_from([0.0625, 1.5, 10.0, 60.0, 400.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(
        key=st.sampled_from(KEYS),
        prompt=st.integers(1, 20),
        most=st.one_of(st.integers(1, 40), st.just(100_000)),
        samples=st.integers(1, 2),
        may_lower=st.booleans(),
    )
    def a_request_comes(self, key: str, prompt: int, most: int, samples: int, may_lower: bool) -> None:
        before = self.levels()
        made = self.quotas.reserve(
            "t", key, prompt_tokens=prompt, max_tokens=most * samples, samples=samples, may_lower=may_lower
        )
        if not isinstance(made, Reservation):
            assert self.levels() == before, "a refusal must change no level"
            assert made.wait_s > 0.0
            return
        assert 0 < made.max_tokens <= most * samples
        assert may_lower or made.max_tokens == most * samples
        assert made.tokens == prompt + made.max_tokens
        ask = Ask(key, self.now, made, made.tokens)
        self.asks.append(ask)
        self.open.append(ask)
        self.changed_since.add(id(ask))
        self.touched |= {"t", key}

    @rule(which=st.integers(0, 1000), part=st.sampled_from([0, 1, 4, 8]))
    def a_request_settles(self, which: int, part: int) -> None:
        running = [ask for ask in self.open if not ask.settled]
        if running:
            ask = running[which % len(running)]
            ask.tokens = ask.tokens * part // 8
            self.quotas.settle(ask.reservation, ask.tokens)
            assert ask.reservation.tokens == ask.tokens
            ask.settled = True
            self.touched |= {"t", ask.key}

    @rule(which=st.integers(0, 1000))
    def a_row_ends(self, which: int) -> None:
        settled = [ask for ask in self.open if ask.settled]
        if settled:
            ask = settled[which % len(settled)]
            self.quotas.close(ask.reservation)
            self.open.remove(ask)
            self.changed_since.add(id(ask))
            self.touched |= {"t", ask.key} if ask.tokens else set()

    @rule()
    def save(self) -> None:
        levels, deleted = self.quotas.news(self.now)
        assert not deleted
        told, limited = (
            {one.name for one in levels},
            {account.name for account in self.quotas._accounts.values()},
        )
        touched, self.touched = self.touched & limited, set()
        assert told == touched or (not touched and len(told) == 1), (
            "only changed accounts are reported, or one if none changed"
        )
        self.snapshot |= {one.name: one for one in levels}
        self.changed_since = set()

    @precondition(lambda self: len(self.asks) % 16 == 15)
    @rule()
    def the_service_crashes(self) -> None:
        """Restart from the snapshot and the log rows. Open rows contain the number of reserved tokens."""
        used = [
            Used("t", ask.key, ask.at, tokens)
            for ask in self.asks
            if ask in self.open or id(ask) in self.changed_since
            if (tokens := ask.reserved if ask in self.open else ask.tokens)
        ]
        self.open = []
        self.quotas = Quotas(lambda: self.now)
        self.quotas.set_policies(self.policies())
        self.quotas.restore(QuotaState(list(self.snapshot.values()), used), self.now)
        self.touched = set(self.quota)
        self.save()

    # ── invariants ──

    def levels(self) -> dict[tuple[str, str], float]:
        for scope, name in self.quotas._accounts:
            self.quotas.usage(scope, name)  # Reading the usage refills the levels up to the current time.
        return {
            (account.name, limit): bucket.level
            for account in self.quotas._accounts.values()
            for limit, bucket in account.buckets.items()
        }

    @invariant()
    def nothing_leaks(self) -> None:
        for account in self.quotas._accounts.values():
            mine = [ask for ask in self.open if account.scope == "tenant" or ask.key == account.name]
            for bucket in account.buckets.values():
                held = sum(ask.tokens if bucket.counts_tokens else ask.tokens > 0 for ask in mine)
                assert bucket.held == held
                assert bucket.level <= bucket.rate.capacity

    @invariant()
    def no_stretch_of_time_is_overstepped(self) -> None:
        for name, quota in self.quota.items():
            mine = [ask for ask in self.asks if name in ("t", ask.key) and ask.tokens]
            for limit in RATE_LIMITS:
                if (rate := rate_of(quota, limit)) is None:
                    continue
                # Compute the exact level of the bucket after each request has taken only the tokens that it
                # actually uses.
                level, at = Fraction(rate.capacity), Fraction(1000)
                for ask in mine:
                    moment = Fraction(ask.at)
                    level = min(Fraction(rate.capacity), level + (moment - at) * Fraction(rate.per_s))
                    at = moment
                    level -= ask.tokens if limit != "requests_per_minute" else 1
                    assert level > -1e-6, f"{name} exceeds {limit} by {float(-level)}"


QuotaMachine.TestCase.settings = examples(150, stateful_step_count=60)
test_quotas_are_never_overstepped_and_leak_nothing = QuotaMachine.TestCase
