"""Tests that only one front at a time runs a request with an Idempotency-Key and keeps its answer."""

from __future__ import annotations

import pytest

from appliance.front_pool.claims import MAX_LOST_RUNS, Claims
from appliance.messages import Claim, Claimed, Release


class Time:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def claims(time: Time) -> Claims:
    return Claims(time, lambda: 60.0)


def claim(scope: bytes = b"s", request_id: str = "r1") -> Claim:
    return Claim(scope, request_id)


def test_expired_answers_are_forgotten_and_lost_ones_run_anew(claims: Claims) -> None:
    claims.claim("front-0", claim())
    claims.release("front-0", Release(b"s", "r1", void=False))
    assert claims.claim("front-1", claim(request_id="r2")) == Claimed(b"s", False)
    claims.release("front-1", Release(b"s", "r2", void=True))
    assert claims.claim("front-0", claim(request_id="r3")) == Claimed(b"s", False, retry_of="r2")


def test_a_late_release_does_not_affect_the_next_owner(claims: Claims) -> None:
    claims.claim("front-0", claim())
    claims.lose_front("front-0")
    claims.claim("front-1", claim(request_id="r2"))
    claims.release("front-0", Release(b"s", "r1", void=True))
    assert claims.owner(b"s") == "front-1"


def test_lost_answers_of_a_front_are_remembered_for_a_time(claims: Claims, time: Time) -> None:
    for number in range(3):
        claims.claim("front-0", claim(b"%d" % number, f"r{number}"))
    claims.claim("front-1", claim(b"other", "r9"))
    assert claims.lose_front("front-0") == 3
    assert len(claims) == 1
    assert claims.claim("front-1", claim(b"0", "again")).retry_of == "r0"
    time.now += 61.0
    assert claims.claim("front-1", claim(b"1", "later")).retry_of == ""


def test_the_memory_of_lost_runs_is_bounded(claims: Claims) -> None:
    for number in range(MAX_LOST_RUNS + 10):
        claims.claim("front-0", claim(b"%d" % number, f"r{number}"))
    claims.lose_front("front-0")
    known = [claims.claim("front-1", claim(b"%d" % number)).retry_of for number in range(MAX_LOST_RUNS + 10)]
    assert known == [""] * 10 + [f"r{number}" for number in range(10, MAX_LOST_RUNS + 10)]
