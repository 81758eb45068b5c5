"""The pool of KV blocks: reference counts, prefix cache, eviction.

A block is in exactly one of three states: *free* (no content worth keeping), *cached* (nobody uses it, but it
holds a full block of a known prefix; least recently used is given away first) or *used* (one reference for
each block table that names it). `BlockPool.check` states this and raises where it does not hold.

Prefixes are found through chained hashes, as in vLLM's automatic prefix caching: the digest of a block covers
the digest of the block before it and its own 64 token ids, and the chain starts from the salt, so that two
salts never meet. A hit is verified by comparing tokens and parent, never trusted to the digest.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import sha256
from typing import NamedTuple

from engine.messages import BLOCK_TOKENS


class InvariantError(RuntimeError):
    """The scheduling state contradicts itself: a defect of the engine, never of a request."""


class Link(NamedTuple):
    """One full block of a prefix."""

    digest: bytes
    """SHA-256 over `parent` and `tokens`."""
    parent: bytes
    """Digest of the block before; of the salt for the first."""
    tokens: bytes
    """The block's token ids, 32 bits each."""


class PrefixChain:
    """The links of one sequence's full blocks, each hashed once and only when somebody asks for it."""

    __slots__ = ("_links", "_root")

    def __init__(self, salt: str) -> None:
        self._root = sha256(b"prefix\0" + salt.encode("utf-8", "surrogatepass")).digest()
        self._links: list[Link] = []

    def link(self, index: int, token_ids: Sequence[int]) -> Link:
        """The link of block `index` of a sequence that begins with `token_ids` (the block must be full)."""
        links = self._links
        while len(links) <= index:
            parent = links[-1].digest if links else self._root
            first = len(links) * BLOCK_TOKENS
            tokens = array("I", token_ids[first : first + BLOCK_TOKENS]).tobytes()
            links.append(Link(sha256(parent + tokens).digest(), parent, tokens))
        return links[index]

    def fork(self) -> PrefixChain:
        """A chain that starts with the same links and grows by itself."""
        other = PrefixChain.__new__(PrefixChain)
        other._root = self._root
        other._links = self._links.copy()
        return other


class BlockPool:
    """`total` blocks, numbered from 0. Every operation is O(1) but `match`, which is O(blocks matched)."""

    def __init__(self, total: int, *, prefix_cache: bool = True) -> None:
        if total < 1:
            raise ValueError(f"a pool of {total} KV blocks cannot hold a sequence: give it at least 1")
        self.total = total
        self.prefix_cache = prefix_cache
        self.gains = 0
        """Counts events that can make an admission fit that did not: blocks freed and blocks cached."""
        self._references = [0] * total
        self._links: list[Link | None] = [None] * total
        self._by_digest: dict[bytes, int] = {}
        self._free = list(range(total - 1, -1, -1))
        self._tainted: set[int] = set()
        self._doubtful: set[int] = set()
        self._clears: list[int] = []
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        """Blocks that nobody uses and that hold a known prefix."""
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    def references(self, block: int) -> int:
        """Block tables that name this block."""
        return self._references[block]

    def allocate(self) -> int:
        """A block with one reference and no content, evicting the least recently used prefix if need be.

        Raises InvariantError when none is available: callers look at `available` first.
        """
        if self._free:
            block = self._free.pop()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            link = self._links[block]
            if link is not None:
                del self._by_digest[link.digest]
            self._links[block] = None
        else:
            raise InvariantError(f"all {self.total} KV blocks are in use")
        self._references[block] = 1
        if block in self._doubtful:
            self._doubtful.remove(block)
            self._tainted.discard(block)
            self._clears.append(block)
        return block

    def share(self, block: int) -> None:
        """One more reference to a used or cached block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """One reference less; a block without references keeps its content while it is cached."""
        left = self._references[block] - 1
        if left < 0:
            raise InvariantError(f"KV block {block} released once too often")
        self._references[block] = left
        if left == 0:
            self.gains += 1
            if self._links[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def release_table(self, table: list[int]) -> None:
        """Release a sequence's blocks, its tail first, so that eviction shortens prefixes from their end."""
        for block in reversed(table):
            self.release(block)

    def doubt(self, block: int) -> None:
        """A used block may hold numbers that are not finite: whoever gets it next gets it cleared. Until then
        it is found as before: by those who would compute the same."""
        self._doubtful.add(block)

    def taint(self, block: int) -> None:
        """A used block holds numbers that are not finite, for all that is known: nobody finds it any more,
        and whoever gets it next gets it cleared."""
        link = self._links[block]
        if link is not None:
            del self._by_digest[link.digest]
            self._links[block] = None
        self._tainted.add(block)
        self._doubtful.add(block)

    def take_clears(self) -> list[int]:
        """Blocks that were allocated since the last call and must be filled with zeros before they are
        written."""
        taken, self._clears = self._clears, []
        return taken

    def is_cached(self, block: int) -> bool:
        """Whether the prefix cache knows this block's content (used or not)."""
        return self._links[block] is not None

    def unused_among(self, blocks: Iterable[int]) -> int:
        """How many of these blocks nobody uses: sharing them lowers `available`."""
        return sum(self._references[block] == 0 for block in blocks)

    def match(self, chain: PrefixChain, token_ids: Sequence[int], count: int) -> list[int]:
        """Blocks that hold the longest known prefix of the first `count` tokens; takes no references.

        At least one token is left over: without computing it there would be no logits.
        """
        found: list[int] = []
        if not self.prefix_cache:
            return found
        for index in range((count - 1) // BLOCK_TOKENS):
            link = chain.link(index, token_ids)
            block = self._by_digest.get(link.digest)
            if block is None or self._links[block] != link:
                break
            found.append(block)
        return found

    def register(self, block: int, link: Link) -> None:
        """Let a used block be found by its content: `link` covers 64 tokens that were computed and confirmed.

        The first block with a content is the one that is found; equal ones stay private.
        """
        known = self._links[block] is not None or link.digest in self._by_digest
        if self.prefix_cache and not known and block not in self._tainted:
            self._links[block] = link
            self._by_digest[link.digest] = block
            self.gains += 1

    def check(self, tables: Iterable[Sequence[int]]) -> None:
        """Raise InvariantError unless the pool agrees with itself and with all block tables. O(total)."""
        counted: Counter[int] = Counter()
        for table in tables:
            if len(set(table)) != len(table):
                raise InvariantError(f"a block stands twice in one block table: {list(table)}")
            counted.update(table)
        for block, references in enumerate(self._references):
            if counted[block] != references:
                raise InvariantError(
                    f"KV block {block} has {references} references, {counted[block]} block tables name it"
                )
        free, cached = set(self._free), set(self._cached)
        used = {block for block, references in enumerate(self._references) if references}
        if len(free) != len(self._free):
            raise InvariantError("a block stands twice in the free list")
        for names, both in (
            ("free and cached", free & cached),
            ("free and used", free & used),
            ("cached and used", cached & used),
        ):
            if both:
                raise InvariantError(f"KV blocks {sorted(both)} are {names} at once")
        if len(free) + len(cached) + len(used) != self.total:
            raise InvariantError(
                f"{len(free)} free + {len(cached)} cached + {len(used)} used blocks are not {self.total}"
            )
        known = {block for block, link in enumerate(self._links) if link is not None}
        if known & free or not cached <= known:
            raise InvariantError(
                f"free blocks with a prefix: {sorted(known & free)}; "
                f"cached blocks without one: {sorted(cached - known)}"
            )
        if not self._tainted <= self._doubtful:
            raise InvariantError(
                f"blocks with broken numbers would not be cleared: {sorted(self._tainted - self._doubtful)}"
            )
        if known & self._tainted:
            raise InvariantError(f"blocks with broken numbers can be found: {sorted(known & self._tainted)}")
        named = {link.digest: block for block, link in enumerate(self._links) if link is not None}
        if named != self._by_digest:
            raise InvariantError("the prefix index does not name the blocks that hold the prefixes")
