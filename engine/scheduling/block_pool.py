"""The pool of KV blocks: reference counts, prefix cache, eviction.

A block is in exactly one of three states:

- *free*: its content is not needed.
- *cached*: no sequence uses the block, but it holds a full block of a known prefix. The least recently used
  cached block is evicted first.
- *used*: it has one reference for each block table that names it.

`BlockPool.check` raises if a block is in no state or in two.

The prefix cache uses chained hashes, as vLLM's automatic prefix caching does: the digest of a block covers
the digest of the block before it and its own 64 token ids. The chain starts from the cache salt, so sequences
with different salts never share blocks. A hit is verified by comparing the parent digest and the tokens.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol

from engine.messages import BLOCK_TOKENS


class InvariantError(RuntimeError):
    """The scheduler's state is inconsistent. This is always a defect of the engine, never of a request."""


class TokenIds(Protocol):
    """Token ids that support slicing: a list, or the tokens of a sequence."""

    def __getitem__(self, key: slice, /) -> list[int]: ...


class BlockKey(NamedTuple):
    """The key of one full block in the prefix cache."""

    digest: bytes
    """SHA-256 over `parent` and `tokens`."""
    parent: bytes
    """Digest of the previous block; for the first block, of the cache salt."""
    tokens: bytes
    """The block's token ids, 32 bits each."""


class PrefixChain:
    """The block keys of one sequence. Each key is computed once, when it is first needed.

    The keys of the first `shared_blocks` blocks, which lie within the prompt, are computed once for all
    chains that `fork` returns.
    """

    __slots__ = ("_own", "_root", "_shared", "_shared_blocks")

    def __init__(self, salt: str, shared_blocks: int = 0) -> None:
        self._root = sha256(b"prefix\0" + salt.encode("utf-8", "surrogatepass")).digest()
        self._shared_blocks = shared_blocks
        self._shared: list[BlockKey] = []
        self._own: list[BlockKey] = []

    def key(self, index: int, token_ids: TokenIds) -> BlockKey:
        """Return the key of block `index` of a sequence that starts with `token_ids`. The block must be
        full."""
        shared = self._shared_blocks
        if index < shared:
            return self._extend(self._shared, self._root, 0, index, token_ids)
        parent = self.key(shared - 1, token_ids).digest if shared else self._root
        return self._extend(self._own, parent, shared, index - shared, token_ids)

    def _extend(
        self, keys: list[BlockKey], parent: bytes, first_block: int, index: int, token_ids: TokenIds
    ) -> BlockKey:
        while len(keys) <= index:
            parent = keys[-1].digest if keys else parent
            first = (first_block + len(keys)) * BLOCK_TOKENS
            tokens = array("I", token_ids[first : first + BLOCK_TOKENS]).tobytes()
            keys.append(BlockKey(sha256(parent + tokens).digest(), parent, tokens))
        return keys[index]

    def fork(self) -> PrefixChain:
        """Return a chain that shares the keys of the shared blocks, and is independent from there on."""
        other = PrefixChain.__new__(PrefixChain)
        other._root = self._root
        other._shared_blocks = self._shared_blocks
        other._shared = self._shared
        other._own = self._own.copy()
        return other


class BlockPool:
    """A pool of `total` blocks, numbered from 0. `match` is O(matched blocks), `check` O(total), the rest
    O(1)."""

    def __init__(self, total: int, *, prefix_cache: bool = True) -> None:
        if total < 1:
            raise ValueError(f"kv_blocks = {total} cannot hold a sequence; it must be at least 1")
        self.total = total
        self.prefix_cache = prefix_cache
        self.gains = 0
        """Number of blocks freed or cached so far. Both can make an admission succeed that failed before."""
        self._references = [0] * total
        self._keys: list[BlockKey | None] = [None] * total
        self._by_digest: dict[bytes, int] = {}
        self._free = list(range(total - 1, -1, -1))
        self._non_finite: set[int] = set()
        self._may_be_non_finite: set[int] = set()
        self._clears: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Number of blocks that `allocate` can hand out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of cached blocks: unused, with a known prefix."""
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    def references(self, block: int) -> int:
        """Return how many block tables name this block."""
        return self._references[block]

    def allocate(self) -> int:
        """Return a block with one reference, evicting the least recently used cached block if no block is
        free.

        Raises InvariantError if no block is available; callers check `available` first.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            key = self._keys[block]
            if key is not None:
                del self._by_digest[key.digest]
            self._keys[block] = None
        else:
            raise InvariantError(f"all {self.total} KV blocks are in use")
        self._references[block] = 1
        if block in self._may_be_non_finite:
            self._may_be_non_finite.remove(block)
            self._non_finite.discard(block)
            self._clears.append(block)
        return block

    def share(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """Drop a reference. A block without references becomes cached if its prefix is known, and free
        otherwise."""
        left = self._references[block] - 1
        if left < 0:
            raise InvariantError(f"KV block {block} was released more often than it was referenced")
        self._references[block] = left
        if left == 0:
            self.gains += 1
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def release_table(self, table: list[int]) -> None:
        """Release all blocks of a block table, the last one first, so that eviction shortens prefixes at
        their end."""
        for block in reversed(table):
            self.release(block)

    def mark_may_be_non_finite(self, block: int) -> None:
        """Record that a used block may hold NaN or infinity: it is zeroed when it is allocated again. The
        prefix cache still finds the block, because a sequence with the same prefix would compute the same
        values."""
        self._may_be_non_finite.add(block)

    def mark_non_finite(self, block: int) -> None:
        """Record that a used block holds NaN or infinity: the prefix cache no longer finds the block, and it
        is zeroed when it is allocated again."""
        key = self._keys[block]
        if key is not None:
            del self._by_digest[key.digest]
            self._keys[block] = None
        self._non_finite.add(block)
        self._may_be_non_finite.add(block)

    def take_clears(self) -> list[int]:
        """Return the blocks allocated since the last call that must be zeroed before they are written."""
        taken, self._clears = self._clears, []
        return taken

    def is_cached(self, block: int) -> bool:
        """Return whether the prefix cache contains this block, used or not."""
        return self._keys[block] is not None

    def unused_among(self, blocks: Iterable[int]) -> int:
        """Return how many of these blocks have no reference. Sharing such a block lowers `available`."""
        return sum(self._references[block] == 0 for block in blocks)

    def match(self, chain: PrefixChain, token_ids: TokenIds, count: int) -> list[int]:
        """Return the cached blocks of the longest known prefix of the first `count` tokens, without adding
        references.

        At least one token is always left to compute, because a step needs it to produce logits.
        """
        found: list[int] = []
        if not self.prefix_cache:
            return found
        for index in range((count - 1) // BLOCK_TOKENS):
            key = chain.key(index, token_ids)
            block = self._by_digest.get(key.digest)
            if block is None or self._keys[block] != key:
                break
            found.append(block)
        return found

    def register(self, block: int, key: BlockKey) -> None:
        """Add a used block to the prefix cache; `key` covers 64 computed and confirmed tokens.

        If another block with the same key is already in the cache, this block stays private.
        """
        known = self._keys[block] is not None or key.digest in self._by_digest
        if self.prefix_cache and not known and block not in self._non_finite:
            self._keys[block] = key
            self._by_digest[key.digest] = block
            self.gains += 1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise InvariantError unless the pool is consistent in itself and with all block tables.
        O(total)."""
        counted: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise InvariantError(f"a block occurs twice in one block table: {list(table)}")
            counted.update(table)
        for block, references in enumerate(self._references):
            if counted[block] != references:
                raise InvariantError(
                    f"KV block {block} has {references} references, but {counted[block]} block tables name it"
                )
        free, cached = set(self._free), set(self._cached)
        used = {block for block, references in enumerate(self._references) if references}
        if len(free) != len(self._free):
            raise InvariantError("a block occurs twice in the free list")
        for names, both in (
            ("free and cached", free & cached),
            ("free and used", free & used),
            ("cached and used", cached & used),
        ):
            if both:
                raise InvariantError(f"KV blocks {sorted(both)} are {names} at the same time")
        if len(free) + len(cached) + len(used) != self.total:
            raise InvariantError(
                f"{len(free)} free + {len(cached)} cached + {len(used)} used blocks are not {self.total}"
            )
        known = {block for block, key in enumerate(self._keys) if key is not None}
        if known & free or not cached <= known:
            raise InvariantError(
                f"free blocks with a key: {sorted(known & free)}; "
                f"cached blocks without a key: {sorted(cached - known)}"
            )
        if not self._non_finite <= self._may_be_non_finite:
            raise InvariantError(
                f"non-finite blocks would not be zeroed: {sorted(self._non_finite - self._may_be_non_finite)}"
            )
        if known & self._non_finite:
            raise InvariantError(
                f"non-finite blocks are in the prefix cache: {sorted(known & self._non_finite)}"
            )
        named = {key.digest: block for block, key in enumerate(self._keys) if key is not None}
        if named != self._by_digest:
            raise InvariantError("the prefix index does not match the blocks' keys")
