"""The pool of KV blocks, with reference counts, prefix cache and eviction.

Each block is in exactly one of three states:

- *free*: its content is not needed.
- *cached*: no sequence uses the block, but it contains a full block of a known prefix. The least recently
  used block is evicted first.
- *used*: it has one reference for each block table that contains it.

`BlockPool.check` raises InvariantError if a block is in no state or in two states.

The prefix cache uses chained hashes, like vLLM's automatic prefix caching. A block's digest covers the
previous block's digest and the block's own 64 token ids. The chain starts with the cache salt, so sequences
with different salts never share blocks. Blocks are looked up by the previous block's digest and their own
tokens, so a cache hit requires no hashing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple, Protocol

from engine.messages import BLOCK_TOKENS, TOKEN_BYTES, pack_tokens


class InvariantError(RuntimeError):
    """Raised if the scheduler's state is inconsistent. This is always a bug in the engine, never a request's
    fault."""


class TokenIds(Protocol):
    """A collection of token ids that supports slicing, e.g. a list or `Sequence.tokens`."""

    def __getitem__(self, key: slice, /) -> list[int]: ...


class BlockKey(NamedTuple):
    """The key of a full block in the prefix cache."""

    digest: bytes
    """SHA-256 of `parent` and `tokens`."""
    parent: bytes
    """Digest of the previous block, or of the cache salt for the first block."""
    tokens: bytes
    """The block's token ids, packed by `pack_tokens`."""

    @property
    def content(self) -> Content:
        return self.parent, self.tokens


Content = tuple[bytes, bytes]
"""The key for looking up a block: the previous block's digest and the block's own tokens."""
_BLOCK_BYTES = TOKEN_BYTES * BLOCK_TOKENS
"""Size in bytes of a full block's packed tokens."""


class Cached(NamedTuple):
    """A block in the prefix cache."""

    block: int
    key: BlockKey


class PrefixChain:
    """The block keys of one sequence. Each key is computed once, on first use.

    `prompt` is the packed prompt. All chains created by `fork` share the keys of the prompt's full blocks.
    """

    __slots__ = ("_own", "_prompt", "_root", "_shared")

    def __init__(self, salt: str, prompt: bytes = b"") -> None:
        self._root = sha256(b"prefix\0" + salt.encode("utf-8", "surrogatepass")).digest()
        self._prompt = prompt
        self._shared: list[BlockKey] = []
        """Keys of the prompt's full blocks."""
        self._own: list[BlockKey] = []
        """Keys of the blocks after the prompt's full blocks. Empty until the keys of all full prompt blocks
        have been computed."""

    @property
    def _shared_blocks(self) -> int:
        return len(self._prompt) // _BLOCK_BYTES

    def key(self, index: int, token_ids: TokenIds) -> BlockKey:
        """Return the key of block number `index` of a sequence that starts with `token_ids`. The block must
        be full."""
        for number in range(len(self._shared) + len(self._own), index + 1):
            parent = self._known(number - 1).digest if number else self._root
            tokens = self._tokens(number, token_ids)
            self._append(BlockKey(sha256(parent + tokens).digest(), parent, tokens))
        return self._known(index)

    def find(self, blocks: dict[Content, Cached], end: int, token_ids: TokenIds) -> list[int]:
        """Look up the sequence's longest cached prefix in `blocks` and return the ids of its blocks, at most
        `end`. The blocks' keys are copied from `blocks`, which is faster than computing them."""
        found: list[int] = []
        keys = self._shared + self._own
        count, shared, prompt, parent = len(keys), self._shared_blocks, self._prompt, self._root
        for index in range(end):
            if index < count:
                tokens = keys[index].tokens
            elif index < shared:
                # The code of `_tokens` is repeated here, because calling the method would double the loop's
                # duration.
                tokens = prompt[index * _BLOCK_BYTES : (index + 1) * _BLOCK_BYTES]
            else:
                tokens = self._tokens(index, token_ids)
            hit = blocks.get((parent, tokens))
            if hit is None:
                break
            block, key = hit
            if index >= count:
                keys.append(key)
            parent = key.digest
            found.append(block)
        if len(keys) > count:
            self._shared[:], self._own = keys[:shared], keys[shared:]
        return found

    def fork(self) -> PrefixChain:
        """Return a chain that shares the keys of the prompt's blocks with this chain, but not those of later
        blocks."""
        other = PrefixChain.__new__(PrefixChain)
        other._root = self._root
        other._prompt = self._prompt
        other._shared = self._shared
        other._own = self._own.copy()
        return other

    def _tokens(self, index: int, token_ids: TokenIds) -> bytes:
        """Return the packed tokens of a full block."""
        if index < self._shared_blocks:
            return self._prompt[index * _BLOCK_BYTES : (index + 1) * _BLOCK_BYTES]
        return pack_tokens(token_ids[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])

    def _known(self, index: int) -> BlockKey:
        shared = self._shared_blocks
        return self._shared[index] if index < shared else self._own[index - shared]

    def _append(self, key: BlockKey) -> None:
        """Add the key of the next block."""
        (self._shared if len(self._shared) < self._shared_blocks else self._own).append(key)


class BlockPool:
    """A pool of `total` KV blocks, numbered from 0. `match` takes time linear in the number of matched
    blocks, and `check` in the size of the pool. All other operations take constant time per block."""

    def __init__(self, total: int, *, prefix_cache: bool = True) -> None:
        if total < 1:
            raise ValueError(f"kv_blocks = {total} cannot hold a sequence; it must be at least 1")
        self.total = total
        self.prefix_cache = prefix_cache
        self.gains = 0
        """Total number of blocks freed or cached so far. A failed admission can succeed only after this
        number has increased."""
        self.evictions = 0
        """Total number of cached blocks overwritten because no block was free."""
        self.shared = 0
        """Number of blocks with more than one reference."""
        self._references = [0] * total
        self._keys: list[BlockKey | None] = [None] * total
        self._by_content: dict[Content, Cached] = {}
        self._free = list(range(total - 1, -1, -1))
        self._non_finite: set[int] = set()
        self._may_be_non_finite: set[int] = set()
        self._clears: list[int] = []
        self._cached: OrderedDict[int, float] = OrderedDict()
        """The cached blocks, least recently used first. Each value is the time (`now`) of the block's last
        use."""
        self.now = 0.0
        """Monotonic time in seconds, updated by the scheduler in every step. Reading the clock for each block
        would take longer than releasing the block."""

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated, whether free or cached."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Number of cached blocks: unused blocks that contain a known prefix."""
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    def references(self, block: int) -> int:
        """Return the number of block tables that contain this block."""
        return self._references[block]

    def allocate(self) -> int:
        """Allocate a block with one reference. If no block is free, evicts the least recently used cached
        block. Raises InvariantError if no block is available, so callers must check `available` first.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._forget_key(block)
            self.evictions += 1
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
        references = self._references[block]
        if references == 0:
            del self._cached[block]
        elif references == 1:
            self.shared += 1
        self._references[block] = references + 1

    def release(self, block: int) -> None:
        """Drop one reference to a block. A block without references becomes cached if its prefix is known,
        otherwise free."""
        left = self._references[block] - 1
        if left < 0:
            raise InvariantError(f"KV block {block} was released more often than it was referenced")
        self._references[block] = left
        if left == 0:
            self.gains += 1
            if self._keys[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = self.now
        elif left == 1:
            self.shared -= 1

    def release_table(self, table: list[int]) -> None:
        """Release all blocks of a block table, last block first, so that eviction removes cached prefixes
        from the end."""
        for block in reversed(table):
            self.release(block)

    def mark_may_be_non_finite(self, block: int) -> None:
        """Record that a used block may contain NaN or infinity, so that it is zeroed when next allocated. The
        block remains in the prefix cache, because any sequence with the same prefix would compute the same
        values."""
        self._may_be_non_finite.add(block)

    def mark_non_finite(self, block: int) -> None:
        """Record that a used block contains NaN or infinity. The block is removed from the prefix cache and
        zeroed when next allocated."""
        self._forget_key(block)
        self._non_finite.add(block)
        self._may_be_non_finite.add(block)

    def take_clears(self) -> list[int]:
        """Return the blocks that have been allocated since the previous call and must be zeroed before
        use."""
        taken, self._clears = self._clears, []
        return taken

    def clear(self) -> None:
        """Forget all cached prefixes. Call this after zeroing the contents of all blocks. Raises
        InvariantError if a block is in use."""
        if self.used:
            raise InvariantError(f"{self.used} KV blocks are in use and cannot be cleared")
        for block in self._cached:
            self._forget_key(block)
        self._free.extend(self._cached)
        self._cached.clear()
        self._non_finite.clear()
        self._may_be_non_finite.clear()
        self.gains += 1

    def states(self, blocks: range) -> tuple[bytes, bytes]:
        """Return the states and ages of the given blocks, encoded as in `BlockUse`."""
        cached, now = self._cached, self.now
        references = self._references[blocks.start : blocks.stop : blocks.step]
        states = bytearray(0 if count == 0 else 2 if count == 1 else 3 for count in references)
        ages = bytearray(len(blocks))
        for position, block in enumerate(blocks):
            if not states[position] and (used_at := cached.get(block)) is not None:
                states[position] = 1
                ages[position] = int(1 + now - used_at).bit_length() - 1
        return bytes(states), bytes(ages)

    def is_cached(self, block: int) -> bool:
        """Return whether the prefix cache contains this block. The block may be in use."""
        return self._keys[block] is not None

    def unused_among(self, blocks: Iterable[int]) -> int:
        """Return how many of the given blocks are unreferenced. Sharing an unreferenced block reduces
        `available`."""
        return sum(self._references[block] == 0 for block in blocks)

    def match(self, chain: PrefixChain, token_ids: TokenIds, count: int) -> list[int]:
        """Return the cached blocks of the longest known prefix within the first `count` tokens, without
        adding references. The last token is never matched, because a step must compute at least one token to
        produce logits.
        """
        if not self.prefix_cache:
            return []
        return chain.find(self._by_content, (count - 1) // BLOCK_TOKENS, token_ids)

    def register(self, block: int, key: BlockKey) -> None:
        """Add a used block to the prefix cache. `key` must cover 64 tokens that have been computed and
        confirmed.

        Does nothing if the cache already contains a block with the same key.
        """
        known = self._keys[block] is not None or key.content in self._by_content
        if self.prefix_cache and not known and block not in self._non_finite:
            self._keys[block] = key
            self._by_content[key.content] = Cached(block, key)
            self.gains += 1

    def _forget_key(self, block: int) -> None:
        """Remove a block from the prefix cache if it is there."""
        key, self._keys[block] = self._keys[block], None
        if key is not None:
            del self._by_content[key.content]

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise InvariantError if the pool is inconsistent or does not match the given block tables. Takes
        time linear in the size of the pool."""
        counted: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise InvariantError(f"a block occurs twice in one block table: {list(table)}")
            counted.update(table)
        for block, references in enumerate(self._references):
            if counted[block] != references:
                raise InvariantError(
                    f"KV block {block} has {references} references, "
                    f"but {counted[block]} block tables contain it"
                )
        free, cached = set(self._free), set(self._cached)
        used = {block for block, references in enumerate(self._references) if references}
        shared = sum(references > 1 for references in self._references)
        if shared != self.shared:
            raise InvariantError(f"{shared} KV blocks are shared, but the pool's count is {self.shared}")
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
                f"{len(free)} free, {len(cached)} cached and {len(used)} used blocks "
                f"do not add up to {self.total}"
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
        named = {key.content: Cached(block, key) for block, key in enumerate(self._keys) if key is not None}
        if named != self._by_content:
            raise InvariantError("the prefix index does not match the blocks' keys")
