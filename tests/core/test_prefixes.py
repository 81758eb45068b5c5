"""Tests of the hashes of prompt prefixes, and of the core's record of which replica has cached which
prefixes."""

from __future__ import annotations

from appliance.channel.prefixes import LENGTHS, prefix_hashes
from appliance.traffic.prefixes import MAX_PREFIXES, ComputedPrefixes


def test_prompts_share_the_hashes_of_their_common_beginning() -> None:
    first, second = list(range(5000)), [*range(1500), *range(9000, 13_000)]
    common = [len(set(hashes)) for hashes in zip(prefix_hashes(first), prefix_hashes(second), strict=True)]
    assert common == [1 if length <= 1500 else 2 for length in LENGTHS]
    assert prefix_hashes(list(range(257))) == prefix_hashes(first)[:2]
    assert prefix_hashes([5] * 64) == ()  # the engine never takes a prompt's last token from the cache


def test_the_longest_known_beginning_of_the_same_tenant_counts() -> None:
    known = ComputedPrefixes()
    known.add("acme", (b"a", b"b"))
    assert known.matching("acme", (b"a", b"b", b"c")) == 2
    assert known.matching("acme", (b"a", b"x")) == 1
    assert known.matching("other", (b"a", b"b")) == 0


def test_the_least_recently_used_beginnings_are_forgotten() -> None:
    known = ComputedPrefixes()
    for number in range(MAX_PREFIXES):
        known.add("acme", (b"%d" % number,))
    known.add("acme", (b"0",))
    known.add("acme", (b"new",))
    assert [known.matching("acme", (one,)) for one in (b"0", b"1", b"2", b"new")] == [1, 0, 1, 1]
