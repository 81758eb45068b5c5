"""The block tables of running sequences: which blocks of the pool they hold, what of that the device knows.

A table's blocks are its own but for what was found in the prefix cache, and what forks share: the last,
partial block of a shared prompt is copied before anybody writes to it. Full blocks whose numbers are known to
be finite are offered to the cache.
"""

from __future__ import annotations

from engine.messages import BLOCK_TOKENS, StepPlan
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.sequence import Sequence, blocks_for


class BlockTables:
    """Keeps `Sequence.table` and what goes with it, on blocks of one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def find(self, sequence: Sequence) -> tuple[list[int], int, int]:
        """The blocks of a prefill that are in the prefix cache, how many others it needs, and for how many
        the pool has room."""
        pool, count = self._pool, sequence.prefill_end
        # What is scored must be computed.
        hits = [] if sequence.wants_prompt_logprobs else pool.match(sequence.chain, sequence.tokens, count)
        return hits, blocks_for(count) - len(hits), pool.available - pool.unused_among(hits)

    def take(self, sequence: Sequence, hits: list[int], needed: int) -> None:
        """Give a sequence the blocks that were found, and so many new ones."""
        for block in hits:
            self._pool.share(block)
        sequence.table = hits + [self._pool.allocate() for _ in range(needed)]
        sequence.registered = len(hits)
        sequence.position = sequence.finite = len(hits) * BLOCK_TOKENS

    def fork(self, leader: Sequence, fork: Sequence) -> None:
        """Have a sibling share the leader's blocks, which it finds computed."""
        fork.table = leader.table.copy()
        for block in fork.table:
            self._pool.share(block)
        fork.chain = leader.chain.fork()
        fork.finite = leader.finite
        fork.sent_blocks = 0

    def make_writable(self, plan: StepPlan, sequence: Sequence) -> bool:
        """Make `position` writable: a new block, or a copy of a shared one. False when none is available."""
        pool, table, row = self._pool, sequence.table, sequence.row
        if sequence.position == len(table) * BLOCK_TOKENS:
            if not pool.available:
                return False
            table.append(pool.allocate())
            plan.blocks.append((row, len(table) - 1, table[-1]))
            sequence.sent_blocks = len(table)
        elif pool.references(table[-1]) > 1:
            if not pool.available:
                return False
            shared, table[-1] = table[-1], pool.allocate()
            pool.release(shared)
            plan.copies.append((shared, table[-1]))
            plan.blocks.append((row, len(table) - 1, table[-1]))
        sequence.pause = min(len(table) * BLOCK_TOKENS, sequence.limit - 1)
        return True

    def send(self, plan: StepPlan, sequence: Sequence) -> None:
        """Bring the device's block table of the sequence's row up to date."""
        row, table = sequence.row, sequence.table
        plan.blocks.extend((row, index, table[index]) for index in range(sequence.sent_blocks, len(table)))
        sequence.sent_blocks = len(table)

    def register(self, sequence: Sequence, confirmed: int) -> None:
        """Offer the full blocks under the first `confirmed` tokens to the prefix cache."""
        pool = self._pool
        if not pool.prefix_cache:
            return
        for index in range(sequence.registered, confirmed // BLOCK_TOKENS):
            block = sequence.table[index]
            if not pool.is_cached(block):
                pool.register(block, sequence.chain.link(index, sequence.tokens))
            sequence.registered = index + 1

    def taint(self, sequence: Sequence) -> None:
        """Keep what the sequence computed, which is not finite, from anybody else."""
        for block in sequence.table:
            self._pool.taint(block)

    def release(self, sequence: Sequence) -> None:
        """Free a sequence's blocks. What is in flight for it still runs, before anything that a later plan
        does with them; what it writes may not be finite."""
        if sequence.finite < sequence.position:
            for block in sequence.table[sequence.finite // BLOCK_TOKENS : blocks_for(sequence.position)]:
                self._pool.doubt(block)
        self._pool.release_table(sequence.table)
        sequence.table = []
        sequence.position = sequence.registered = sequence.finite = 0
