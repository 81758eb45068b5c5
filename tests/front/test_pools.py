"""Places for connections: which one makes room."""

from __future__ import annotations

from appliance.http.pools import Pool


class Client:
    """A connection that notes that it was closed."""

    def __init__(self) -> None:
        self.closed = False

    def evict(self) -> None:
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
