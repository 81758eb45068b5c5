"""Tests that only one front at a time runs the request with a given Idempotency-Key and keeps its answer."""

from __future__ import annotations

from appliance.channel.core_messages import Claimed
from appliance.channel.front_messages import Claim
from appliance.front_pool.claims import MAX_DROPPED_RUNS, Claims


def test_a_claim_lasts_until_its_front_releases_it_or_ends() -> None:
    claims = Claims()
    assert claims.claim("front-0", Claim(b"s", "r1")) == Claimed(b"s")
    assert claims.claim("front-1", Claim(b"s", "r2")) == Claimed(b"s", hand_over=True)
    claims.release(b"s")
    assert claims.claim("front-1", Claim(b"s", "r3")) == Claimed(b"s", retry_of="r1")
    claims.claim("front-0", Claim(b"other", "r4"))
    assert (claims.lose_front("front-1"), claims.owner(b"s"), claims.owner(b"other")) == (1, "", "front-0")
    assert claims.claim("front-0", Claim(b"s", "r5")) == Claimed(b"s", retry_of="r3")


def test_the_memory_of_runs_without_an_answer_is_bounded() -> None:
    claims, count = Claims(), MAX_DROPPED_RUNS + 10
    for number in range(count):
        claims.claim("front-0", Claim(b"%d" % number, f"r{number}"))
    claims.lose_front("front-0")
    known = [claims.claim("front-1", Claim(b"%d" % number, "again")).retry_of for number in range(count)]
    assert known == [""] * 10 + [f"r{number}" for number in range(10, count)]
