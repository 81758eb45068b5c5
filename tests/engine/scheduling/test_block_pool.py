"""Tests of the block pool and its prefix cache: tests of individual rules, and tests with random
operations."""

from __future__ import annotations

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

import engine.scheduling.block_pool
from engine.messages import BLOCK_TOKENS
from engine.scheduling.block_pool import BlockPool, InvariantError, PrefixChain
from tests.examples import examples


def tokens_of(*blocks: int) -> list[int]:
    """Return the tokens of full blocks, one block for each argument. All tokens of a block equal its
    argument."""
    return [token for token in blocks for _ in range(BLOCK_TOKENS)]


def cache(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    """Compute, register and release the full blocks of a sequence. Returns the blocks."""
    chain = PrefixChain(salt)
    table = [pool.allocate() for _ in range(len(tokens) // BLOCK_TOKENS)]
    for index, block in enumerate(table):
        pool.register(block, chain.key(index, tokens))
    pool.release_table(table)
    return table


def found(pool: BlockPool, tokens: list[int], salt: str = "") -> list[int]:
    return pool.match(PrefixChain(salt), tokens, len(tokens))


def test_a_known_prefix_is_found_up_to_the_first_difference() -> None:
    pool = BlockPool(8)
    table = cache(pool, tokens_of(1, 2, 3))
    assert found(pool, [*tokens_of(1, 2, 3), 9]) == table
    assert found(pool, [*tokens_of(1, 2, 4), 9]) == table[:2]
    assert found(pool, [*tokens_of(2, 2, 3), 9]) == []


def test_a_whole_prompt_is_never_a_hit_since_its_last_token_must_give_logits() -> None:
    pool = BlockPool(8)
    table = cache(pool, tokens_of(1, 2))
    assert found(pool, tokens_of(1, 2)) == table[:1]
    assert found(pool, tokens_of(1)) == []


def test_salts_separate_equal_prompts() -> None:
    pool = BlockPool(8)
    table = cache(pool, tokens_of(1, 2), salt="tenant-a")
    assert found(pool, [*tokens_of(1, 2), 0], salt="tenant-a") == table
    assert found(pool, [*tokens_of(1, 2), 0], salt="tenant-b") == []
    assert found(pool, [*tokens_of(1, 2), 0]) == []


def test_a_colliding_digest_is_not_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    # All digests are equal, so prompts can be distinguished only by comparing tokens and parents.
    monkeypatch.setattr(engine.scheduling.block_pool, "sha256", lambda data: hashlib.sha256(b""))
    pool = BlockPool(8)
    cache(pool, tokens_of(1))
    assert found(pool, [*tokens_of(2), 0]) == []
    assert len(found(pool, [*tokens_of(1), 0])) == 1


def test_each_block_of_a_sequence_is_hashed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(data: bytes) -> object:
        hashed.append(len(data))
        return hashlib.sha256(data)

    monkeypatch.setattr(engine.scheduling.block_pool, "sha256", counting)
    chain = PrefixChain("")
    tokens = tokens_of(*range(20))
    for _ in range(3):
        for index in range(20):
            chain.key(index, tokens)
    assert len(hashed) == 1 + 20
    fork = chain.fork()
    fork.key(19, tokens)
    assert len(hashed) == 1 + 20


def test_the_least_recently_used_prefix_is_evicted_first_from_its_end() -> None:
    pool = BlockPool(4)
    old, young = cache(pool, tokens_of(1, 2)), cache(pool, tokens_of(3, 4))
    for block in found(pool, [*tokens_of(1, 2), 0]):
        pool.share(block)
    pool.release_table(old)
    assert [pool.allocate() for _ in range(4)] == [young[1], young[0], old[1], old[0]]
    assert pool.evictions == 4
    assert found(pool, [*tokens_of(1), 0]) == []


def test_a_block_counts_as_shared_while_it_has_several_references() -> None:
    pool = BlockPool(4)
    (block,) = cache(pool, tokens_of(1))
    counts = []
    for change in (pool.share, pool.share, pool.share, pool.release, pool.release, pool.release):
        change(block)
        counts.append(pool.shared)
    assert counts == [0, 1, 1, 1, 0, 0]
    assert pool.evictions == 0, "free blocks are used before cached ones"


def test_of_equal_blocks_only_the_first_is_in_the_cache() -> None:
    pool = BlockPool(4)
    first = cache(pool, tokens_of(1))
    block = pool.allocate()
    pool.register(block, PrefixChain("").key(0, tokens_of(1)))
    assert not pool.is_cached(block)
    assert found(pool, [*tokens_of(1), 0]) == first
    pool.release(block)
    pool.check([])


def test_without_prefix_cache_no_block_is_found_or_cached() -> None:
    pool = BlockPool(4, prefix_cache=False)
    cache(pool, tokens_of(1, 2))
    assert found(pool, [*tokens_of(1, 2), 0]) == []
    assert (pool.cached, pool.available) == (0, 4)


def test_check_reports_each_inconsistency() -> None:
    pool = BlockPool(4)
    block = pool.allocate()
    with pytest.raises(InvariantError, match="has 1 references, but 0 block tables contain it"):
        pool.check([])
    with pytest.raises(InvariantError, match="twice in one block table"):
        pool.check([[block, block]])
    pool.release(block)
    with pytest.raises(InvariantError, match="released more often than it was referenced"):
        pool.release(block)


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="kv_blocks = 0 cannot hold a sequence"):
        BlockPool(0)


@examples(150)
@given(
    total=st.integers(1, 8),
    operations=st.lists(st.tuples(st.sampled_from(["take", "end", "check"]), st.integers(0, 30))),
)
def test_any_order_of_allocations_and_releases_keeps_the_invariants(
    total: int, operations: list[tuple[str, int]]
) -> None:
    pool = BlockPool(total)
    tables: list[list[int]] = []
    for operation, number in operations:
        if operation == "take":
            blocks = [number % 2, number % 3, number % 5][: 1 + number % 3]
            tokens = [*tokens_of(*blocks), 0]
            chain = PrefixChain(str(number % 2))
            hits = pool.match(chain, tokens, len(tokens))
            wanted = len(tokens) // BLOCK_TOKENS - len(hits)
            if wanted > pool.available - pool.unused_among(hits):
                continue
            for block in hits:
                pool.share(block)
            table = hits + [pool.allocate() for _ in range(wanted)]
            for index in range(len(table)):
                pool.register(table[index], chain.key(index, tokens))
            tables.append(table)
        elif operation == "end" and tables:
            pool.release_table(tables.pop(number % len(tables)))
        pool.check(tables)
        assert pool.used + pool.available == pool.total
    for table in tables:
        pool.release_table(table)
    pool.check([])
    assert pool.available == total


def test_a_block_that_may_be_non_finite_stays_cached_until_it_is_reallocated_and_zeroed() -> None:
    pool = BlockPool(2)
    chain, tokens = PrefixChain(""), list(range(BLOCK_TOKENS + 1))
    block = pool.allocate()
    pool.register(block, chain.key(0, tokens))
    pool.mark_may_be_non_finite(block)
    pool.release(block)
    assert pool.match(chain, tokens, len(tokens)) == [block]
    pool.check([])
    assert {pool.allocate(), pool.allocate()} == {0, 1}
    assert pool.take_clears() == [block]


def test_a_non_finite_block_leaves_the_cache_and_is_zeroed_when_reallocated() -> None:
    pool = BlockPool(2)
    chain = PrefixChain("")
    block = pool.allocate()
    pool.register(block, chain.key(0, tokens_of(1)))
    pool.mark_non_finite(block)
    pool.register(block, chain.key(0, tokens_of(1)))
    assert found(pool, [*tokens_of(1), 0]) == []
    pool.check([[block]])
    pool.release(block)
    pool.check([])
    assert pool.take_clears() == []
    both = {pool.allocate(), pool.allocate()}
    assert block in both
    assert pool.take_clears() == [block]
    assert pool.take_clears() == []
