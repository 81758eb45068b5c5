"""Tests of connection limits, and of which connection is closed when a limit is reached."""

from __future__ import annotations

import pytest

from appliance.http.peers import Peer
from appliance.http.pools import Pool


class Client:
    """A connection that records whether it has been closed."""

    def __init__(self) -> None:
        self.closed = False

    def abort(self) -> None:
        self.closed = True


def filled(pool: Pool, tenant: str, count: int) -> list[Client]:
    made = [Client() for _ in range(count)]
    assert all(pool.add(one, tenant) for one in made)
    return made


def test_one_tenant_leaves_an_eighth_of_the_places_to_others() -> None:
    pool = Pool()
    pool.limit = 16
    greedy = filled(pool, "greedy", 14)
    for one in greedy:
        pool.mark_busy(one)
    assert not pool.add(Client(), "greedy")
    others = filled(pool, "other", 2)
    assert not any(one.closed for one in [*greedy, *others])


def test_a_tenant_with_all_of_its_places_loses_its_own_longest_idle_connection() -> None:
    pool = Pool()
    pool.limit = 16
    (other,) = filled(pool, "other", 1)
    greedy = filled(pool, "greedy", 14)
    pool.mark_busy(greedy[0])
    assert pool.add(Client(), "greedy")
    assert [one.closed for one in greedy[:3]] == [False, True, False]
    assert not other.closed and len(pool) == 15


def test_a_full_pool_closes_the_connection_that_has_waited_longest() -> None:
    pool = Pool()
    pool.limit = 4
    first, second = filled(pool, "a", 2)
    filled(pool, "b", 2)
    pool.mark_busy(first)
    assert pool.add(Client(), "c")
    assert not first.closed and second.closed


def test_after_the_limit_is_lowered_waiting_connections_are_closed() -> None:
    pool = Pool()
    pool.limit = 4
    made = filled(pool, "a", 3)
    pool.mark_busy(made[0])
    assert pool.make_space() and not any(one.closed for one in made)
    pool.limit = 2
    assert pool.make_space()
    assert [one.closed for one in made] == [False, True, False]
    pool.limit = 0
    assert not pool.make_space()
    assert [one.closed for one in made] == [False, True, True]


def test_a_connection_whose_key_changes_counts_for_the_other_tenant() -> None:
    pool = Pool()
    pool.limit = 16
    moving = filled(pool, "", 14)
    assert all(pool.assign(one, "greedy") for one in moving)
    for one in moving:
        pool.mark_busy(one)
    late = filled(pool, "", 1)[0]
    pool.mark_busy(late)
    assert not pool.assign(late, "greedy")
    assert pool.assign(late, "other")
    pool.remove(moving[0])
    assert pool.assign(late, "greedy")


def test_the_address_with_the_most_connections_loses_one() -> None:
    pool = Pool()
    pool.limit = 8
    modest = [Client() for _ in range(2)]
    flood = [Client() for _ in range(100)]
    assert pool.add(modest[0], source="198.51.100.1")
    for one in flood[:50]:
        assert pool.add(one, source="203.0.113.7")
    assert pool.add(modest[1], source="198.51.100.1")
    for one in flood[50:]:
        assert pool.add(one, source="203.0.113.7")
    assert not any(one.closed for one in modest)
    assert [one.closed for one in flood] == [True] * 94 + [False] * 6
    for one in flood[94:]:
        pool.mark_busy(one)
    assert pool.add(Client(), source="203.0.113.8")
    assert [one.closed for one in modest] == [True, False]


@pytest.mark.parametrize(
    ("address", "source"),
    [
        ("198.51.100.1:4711", "198.51.100.1"),
        ("[2001:db8:1:2:3::4]:4711", "2001:db8:1:2::/64"),
        ("[fe80::1%eth0]:4711", "fe80::/64"),
        ("", ""),
    ],
)
def test_the_source_of_a_tcp_client_is_its_host_or_its_network(address: str, source: str) -> None:
    assert Peer("tcp", -1, address).source == source
